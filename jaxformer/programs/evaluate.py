"""Evaluate the newest checkpoint of a run on its whole validation split.

    jaxformer evaluate --workdir=runs/gpt_tiny

Needs the text that the run was trained on, under the same file names (relative ones are looked up in the current
folder). It must be the same text: its tokens are compared with the run's. With --mesh the parameters are split over
devices, and over processes where the environment names several: for models too large for one device.
"""

from jaxformer import records
from jaxformer.runs.command_line import add_verify, add_workdir, parser, path_text


def main() -> None:
    """Prints the validation loss with its standard error; with --json one JSON object."""
    arguments = parser(__doc__, "evaluate")
    add_workdir(arguments)
    arguments.add_argument(
        "--json", action="store_true", help="print one JSON object (nan is a string) instead of text"
    )
    arguments.add_argument(
        "--cache-dir", type=path_text, metavar="DIR", help="cache of corpora (default: in your cache folder)"
    )
    add_verify(arguments)
    options = arguments.parse_args()
    from jaxformer.runs.pretrain import evaluate

    settings = {"mesh": options.mesh, "cache_dir": options.cache_dir, "verify": options.verify}
    if options.json:
        print(records.as_json(evaluate(options.workdir, **settings, log=lambda _: None)))
    else:
        evaluate(options.workdir, **settings)

"""Evaluate the newest checkpoint of a run on its whole held-out split.

python -m experiments.evaluate --workdir=runs/gpt_tiny
"""

import json

from jaxformer.command_line import parser, path_text
from jaxformer.process import program


def main() -> None:
    """Prints the held-out loss with its standard error; with --json one JSON object."""
    arguments = parser(__doc__, "evaluate")
    arguments.add_argument("--workdir", required=True, type=path_text, help="directory of the run")
    arguments.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = arguments.parse_args()
    from jaxformer.main import evaluate

    if options.json:
        print(json.dumps(evaluate(options.workdir, log=lambda _: None)))
    else:
        evaluate(options.workdir)


if __name__ == "__main__":
    program(main)

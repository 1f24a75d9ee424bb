"""Evaluate the newest checkpoint of a run: on its whole validation split, or on other text.

    jaxformer evaluate runs/gpt_tiny
    jaxformer evaluate runs/gpt_tiny --files='book.txt,articles/*.jsonl.gz'
    jaxformer evaluate runs/gpt_tiny --by-position

The first needs the text that the run was trained on, under the same file names (relative ones are looked up in the
current folder). It must be the same text: its tokens are compared with the run's. With --files the text is these files,
whole, in the tokens of the run's own tokenizer; a folder that save_to_disk of the library datasets wrote; or one of
token shards, of which what they hold out is read. With --by-position it tells the loss by the place of a token in its
document as well: how much a model gains from a longer past. With --mesh the parameters are split over devices, and over
processes where the environment names several: for models too large for one device.
"""

from jaxformer import records
from jaxformer.config.fields import from_text
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import add_verify, add_workdir, parser, path_text

READING = ("text_field", "separator", "on_error")  # how --files are read


def main() -> None:
    """Prints the validation loss with its standard error; with --json one JSON object."""
    arguments = parser(__doc__, "evaluate")
    add_workdir(arguments)
    arguments.add_argument(
        "--files",
        metavar="GLOB,...",
        help="evaluate on these instead: .txt, .jsonl, .parquet, ... (as data.files), a saved dataset, or token shards",
    )
    arguments.add_argument("--text-field", metavar="NAME", help="of a .jsonl line, or the column (default: the run's)")
    arguments.add_argument("--separator", metavar="TEXT", help="between documents of a .txt file (default: the run's)")
    arguments.add_argument("--on-error", choices=("stop", "skip"), help="if a line is no text (default: the run's)")
    arguments.add_argument(
        "--by-position", action="store_true", help="also by the place in the document: 0, 1, 2 to 3, 4 to 7, ..."
    )
    arguments.add_argument(
        "--json", action="store_true", help="print one JSON object (nan is a string) instead of text"
    )
    arguments.add_argument(
        "--cache-dir", type=path_text, metavar="DIR", help="cache of corpora (default: in your cache folder)"
    )
    add_verify(arguments)
    options = arguments.parse_args()
    reading = {name: value for name in READING if (value := getattr(options, name)) is not None}
    if options.files is None and reading:
        flag, value = next(iter(reading.items()))
        raise ConfigError(f"--{flag.replace('_', '-')}: {value!r}; says how --files are read; accepted: with --files")
    from jaxformer.runs.evaluation import OtherText, evaluate

    other = None
    if options.files is not None:
        other = OtherText(from_text(options.files, tuple[str, ...], "--files"), **reading)
    settings = {"other": other, "mesh": options.mesh, "cache_dir": options.cache_dir, "verify": options.verify}
    settings["by_position"] = options.by_position
    if options.json:
        print(records.as_json(evaluate(options.workdir, **settings, log=lambda _: None)))
    else:
        evaluate(options.workdir, **settings)

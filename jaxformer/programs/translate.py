"""Translate a file line by line with a trained encoder-decoder, by beam search:

    jaxformer translate --workdir=runs/en_de --file=test.en --output=test.de
    jaxformer translate --workdir=runs/en_de --file=test.en --output=test.de --reference=test.true.de

An answer has at most as many tokens as its source and 50 more. What is killed goes on where it was when it is started
again. --reference prints BLEU and chrF (extra `bleu`).
"""

from pathlib import Path

from jaxformer.runs.command_line import add_workdir, finite, integer, parser, path_text
from jaxformer.runtime.program import keep_compiled_programs


def main() -> None:
    """Writes the translations, and prints how many there are and how good."""
    arguments = parser(__doc__, "translate")
    add_workdir(arguments)
    arguments.add_argument("--file", required=True, type=path_text, metavar="FILE", help="a source in each line")
    arguments.add_argument("--output", required=True, type=path_text, metavar="FILE", help="for the translations")
    arguments.add_argument("--beam", type=integer(1), default=4, metavar="N", help="beams (4)")
    arguments.add_argument(
        "--length-penalty", type=finite, default=0.6, metavar="A", help="above 0: prefers longer texts (0.6)"
    )
    arguments.add_argument(
        "--more-tokens", type=integer(0), default=50, metavar="N", help="of an answer than of its source, at most (50)"
    )
    arguments.add_argument("--rows", type=integer(1), default=32, metavar="N", help="lines at once (32)")
    arguments.add_argument("--reference", type=path_text, metavar="FILE", help="right translations, to compare with")
    options = arguments.parse_args()

    from jaxformer.errors import ConfigError
    from jaxformer.runs import translation
    from jaxformer.runs.pretrain import open_run

    if options.length_penalty < 0:
        raise ConfigError(f"--length-penalty: {options.length_penalty:g}; accepted: at least 0")
    source, output = (Path(each).expanduser() for each in (options.file, options.output))
    references = None
    if options.reference is not None:
        references = translation.read_lines(Path(options.reference).expanduser(), "--reference")
        translation.scores(references, references)  # refuses before the work what would fail after it
        count = len(translation.read_lines(source))
        if len(references) != count:
            raise ConfigError(f"--reference: {len(references)} lines; accepted: {count}, as many as --file has")
    run = open_run(options.workdir, options.mesh)
    if run.config.compilation_cache:
        keep_compiled_programs()
    search = translation.Search(options.beam, options.length_penalty, options.more_tokens, options.rows)
    fresh = translation.translate(run, source, output, search)
    print(f"{output}: {fresh} lines translated")
    if references is not None:
        print(translation.scores(translation.read_lines(output), references))

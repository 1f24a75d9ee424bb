"""Pairs of stretches of texts: what was written, and what follows it.

    python -m experiments.stretches --files='books/train-*.txt.xz' --validation=books/validation.txt.xz \\
        --out=runs/stretches

Writes pairs.jsonl, held_out.jsonl and their tokenizer, tokenizer.json, into a folder: what `compare_pairs` needs.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxformer.data import text_files, tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import file_path, integer, parser
from jaxformer.runtime.program import program
from jaxformer.storage import files

SOURCE, TARGET = 440, 220  # characters of a stretch, up to the end of a word
MOST = 191, 95  # tokens of a source and of a target that a row of 192 and 96 holds
ALONE = 97, 48  # fewest tokens of each, so that two pairs never fit one row
LEAST = 50  # pairs
FILES = {"pairs": "pairs.jsonl", "held_out": "held_out.jsonl"}
Pairs = Sequence[tuple[str, str]]


def cut(text: str) -> Iterator[tuple[str, str]]:
    """Neighbouring pairs of stretches of a text: a source and what follows it; each ends where a word does.

    >>> source, target = next(cut("word " * 200))
    >>> len(source), len(target), target[:5]
    (444, 220, ' word')
    """
    begin = 0
    while True:
        middle = text.find(" ", begin + SOURCE)
        end = text.find(" ", middle + TARGET) if middle >= 0 else -1
        if end < 0:
            return
        yield text[begin:middle], text[middle:end]
        begin = end


def pairs_of(flag: str, pattern: str, separator: str, count: int) -> list[tuple[str, str]]:
    """At least so many pairs, if there are, and less than twice as many, spread evenly over the documents of the files
    that a flag names.

    Raises:
      ConfigError: there are no such files, or fewer than LEAST pairs in them.
    """
    try:
        found = [
            pair
            for path in text_files.find((pattern,), flag)
            for book in text_files.documents(path, separator=separator, text_field="text", field=flag)
            for pair in cut(book)
            if len(pair[0]) < SOURCE + 40 and len(pair[1]) < TARGET + 40  # a table of figures may have no spaces
        ]
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.", "--", 1)) from None
    if len(found) < LEAST:
        raise ConfigError(f"--{flag}: {pattern!r} holds {len(found)} pairs; accepted: texts of at least {LEAST}")
    return found[:: max(len(found) // count, 1)]


def write(out: Path, training: Pairs, held_out: Pairs, least: tuple[int, int] = (0, 0)) -> list[Path]:
    """Writes those pairs whose sides have `least` to MOST tokens, and a tokenizer for them; returns the paths.

    Raises:
      ConfigError: there are no such pairs; nothing has been written.
    """
    tokenizer = tokenizers.train("bpe", ("".join(pair) for pair in training), 1024)
    texts = {}
    for name, pairs in zip(FILES.values(), (training, held_out), strict=True):
        sizes = [[len(tokens) for tokens in tokenizer.encode_batch([pair[side] for pair in pairs])] for side in (0, 1)]
        lines = [
            json.dumps({"source": source, "target": target})
            for (source, target), *size in zip(pairs, *sizes, strict=True)
            if all(low <= each <= high for each, low, high in zip(size, least, MOST, strict=True))
        ]
        if not lines:
            raise ConfigError(
                f"{name}: none of {len(pairs)} pairs has a source of {least[0]} to {MOST[0]} tokens and a target of "
                f"{least[1]} to {MOST[1]}; accepted: texts that have"
            )
        print(
            f"{name}: {len(lines)} of {len(pairs)} pairs, of {least[0]} to {MOST[0]} and {least[1]} to {MOST[1]} tokens"
        )
        texts[name] = "\n".join(lines) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    for name, text in texts.items():
        files.write_atomically(out / name, text.encode())
    return [out / name for name in ("tokenizer.json", *texts)]


def main() -> None:
    """Writes the files, and prints their paths."""
    flags = parser(__doc__, "stretches")
    flags.add_argument("--files", required=True, help="texts to learn from: a glob")
    flags.add_argument("--validation", required=True, help="other texts, held out: a glob")
    flags.add_argument("--separator", default="\f", help="between documents (default: a form feed)")
    flags.add_argument("--pairs", type=integer(LEAST), default=100_000, help="to learn from (default: 100000)")
    flags.add_argument("--held-out", type=integer(LEAST), default=2000, help="pairs (default: 2000)")
    flags.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder for what is written")
    options = flags.parse_args()
    if not options.separator:
        raise ConfigError("--separator: ''; accepted: the text between two documents")
    if options.out.is_file():
        raise ConfigError(f"--out: {options.out} is a file; accepted: a folder")
    training = pairs_of("files", options.files, options.separator, options.pairs)
    held_out = pairs_of("validation", options.validation, options.separator, options.held_out)
    try:
        paths = write(options.out, training, held_out, ALONE)
    except OSError as error:
        raise ConfigError(f"--out: {options.out} cannot be written ({error.strerror})") from None
    for path in paths:
        print(path)


if __name__ == "__main__":
    program(main)

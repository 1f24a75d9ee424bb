"""Translation of a file, line by line, by beam search; what is killed goes on where it was.

Lines are taken in blocks, and those of a block in batches of like length, so that little is padded. Finished blocks are
appended to FILE.partial; at the end it becomes FILE. Beside it stands what it was made of and with, and a checksum of
what is finished, so that it does not go on with another text or another model, or after damage.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer import decoding
from jaxformer.config import diff, encoder_of, to_dict
from jaxformer.data.decoding_text import DecodingText, decoding_text, text_of
from jaxformer.data.progress_bars import say
from jaxformer.decoding.request import check_task, rows_of
from jaxformer.errors import ConfigError
from jaxformer.functional.position_encodings import encoding_of
from jaxformer.models.families import family_of
from jaxformer.runs import memory_check
from jaxformer.runs.pretrain import Run
from jaxformer.storage import files
from jaxformer.training.progress import duration
from jaxformer.types import Params

BATCHES = 16  # of a block
EVERY = 10.0  # seconds between lines of progress


class Search(NamedTuple):
    """How each line is searched.

    Attributes:
      beams: see `beam_search`.
      length_penalty: see `beam_search`.
      more_tokens: a translation has at most so many tokens more than its source.
      rows: lines of a batch.
    """

    beams: int = 4
    length_penalty: float = 0.6
    more_tokens: int = 50
    rows: int = 32


def translate(run: Run, source: Path, output: Path, search: Search) -> int:
    """Writes a line for each line of a file, an empty one for an empty one; returns how many lines were left to do.

    Args:
      run: of a family that reads a source.
      source: UTF-8 text, a source in each line.
      output: where the translations go; must not exist.
      search: how they are found.

    Raises:
      ConfigError: a run that cannot do it, a line that cannot be read or is too long, an output that is there or was
        begun with something else; all before anything is written.
    """
    cfg, text = run.config.model, decoding_text(run.tokenizer, run.config)
    if family_of(cfg).encode is None:
        raise ConfigError(f"--workdir: holds a {cfg.family}, which reads no source; translate needs encoder_decoder")
    check_task("generate", cfg)
    if output.exists():
        raise ConfigError(f"--output: {output} is there; accepted: another name")
    lines = read_lines(source)
    ids = _encoded(source, lines, text, run)
    tokens = 1 + max(map(len, ids)) + search.more_tokens
    tokens = tokens if encoding_of(cfg).extends else min(tokens, cfg.context_length)
    flags = f"--rows ({search.rows}) x --beam ({search.beams}) and --more-tokens"
    memory_check.check_decoding(cfg, search.rows * search.beams, tokens, flags, search.rows)
    made = {
        "text": _digest("\n".join(lines).encode()), "config": _digest(json.dumps(to_dict(run.config)).encode()),
        "step": run.step, "weights": _of_weights(run.params), "tokenizer": run.tokenizer.fingerprint,
        **search._asdict(),
    }  # fmt: skip
    partial, about = output.with_name(f"{output.name}.partial"), output.with_name(f"{output.name}.partial.json")
    done, written = _begun(partial, about, made)
    block = search.rows * BATCHES

    def note(done: int) -> None:
        finished = {"lines": done, "sha256": written.hexdigest()}
        files.write_atomically(about, json.dumps(made | finished).encode())

    try:
        note(done)
        progress = _Progress(len(lines), done)
        with partial.open("ab") as out:
            for start in range(done, len(lines), block):
                found = _block(run, text, ids[start : start + block], search, progress)
                content = "".join(f"{line}\n" for line in found).encode()
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
                written.update(content)
                note(start + len(found))
        partial.replace(output)
        about.unlink()
    except OSError as error:
        kept = f"; what is finished is kept in {partial.name}, where the same command goes on"
        raise ConfigError(
            f"--output: {output}: {error.strerror or error}{kept if os.path.exists(partial) else ''}"
        ) from None
    return len(lines) - done


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _of_weights(params: Params) -> str:
    """A digest of the first numbers of every parameter: another training changes all of them."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf[(slice(0, 1),) * max(leaf.ndim - 1, 0)]).tobytes())
    return found.hexdigest()[:16]


def read_lines(path: Path, flag: str = "--file") -> list[str]:
    """The lines of a file, without their ends; `flag`: that named it.

    Raises:
      ConfigError: it cannot be read, or is no UTF-8 text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror or error}") from None
    lines = content.split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    if not lines:
        raise ConfigError(f"{flag}: {path} is empty; accepted: a text in each line")
    out = []
    for number, line in enumerate(lines, 1):
        try:
            out.append(line.decode().removesuffix("\r"))
        except UnicodeDecodeError:
            raise ConfigError(f"{flag}: {path}:{number}: is not UTF-8 text") from None
    return out


def _encoded(path: Path, lines: Sequence[str], text: DecodingText, run: Run) -> list[list[int]]:
    """The ids of each line; of an empty one none."""
    out, stack = [], encoder_of(run.config.model)
    for number, line in enumerate(lines, 1):
        try:
            ids = text.source(line) if line.strip() else []
            if ids:
                rows_of("source", [ids], None, stack, "sources", "model.encoder.source_length")
        except ConfigError as error:
            raise ConfigError(f"--file: {path}:{number}: {error}") from None
        out.append(ids)
    return out


def _begun(partial: Path, about: Path, made: dict[str, Any]) -> tuple[int, Any]:
    """How many lines of an output are finished, and their checksum; what a killed process left of more is cut off.

    Raises:
      ConfigError: they were made of or with something else, or are no longer what was written.
    """
    written = hashlib.sha256()
    if not os.path.exists(partial):  # as Path.exists, and False for a name that is too long
        return 0, written
    try:
        before = dict(json.loads(about.read_bytes()))
    except (OSError, ValueError, TypeError):
        before = {}
    lines, checksum = before.pop("lines", None), before.pop("sha256", None)
    what = "something that is not known" if not before else ", ".join(diff(before, made)) if before != made else None
    if what is not None:
        raise ConfigError(f"--output: {partial} was begun with {what}; accepted: another name, or remove it")
    with partial.open("rb+") as kept:
        for _ in range(lines if isinstance(lines, int) else 0):
            written.update(kept.readline())
        if written.hexdigest() != checksum:
            raise ConfigError(
                f"--output: {partial} is not what was written there; accepted: another name, or remove it"
            )
        kept.truncate(kept.tell())
    return lines or 0, written


def _block(run: Run, text: DecodingText, ids: Sequence[list[int]], search: Search, progress: "_Progress") -> list[str]:
    """The translations of some lines, in order."""
    out = [""] * len(ids)
    order = sorted((i for i, each in enumerate(ids) if each), key=lambda i: len(ids[i]))
    progress.add(len(ids) - len(order))
    for start in range(0, len(order), search.rows):
        batch = order[start : start + search.rows]
        padded = batch + batch[:1] * (search.rows - len(batch))  # another number of rows would compile again
        sources = [ids[i] for i in padded]
        found = decoding.beam_search(
            run.params,
            [[text.start]] * len(padded),
            run.config.model,
            beams=search.beams,
            length_penalty=search.length_penalty,
            sources=sources,
            max_new_tokens=[len(each) + search.more_tokens for each in sources],
            stop=[text.end],
            suppress=text.suppress,
        )
        for row, i in enumerate(batch):
            kept: np.ndarray = found.tokens[row, 0, : found.lengths[row, 0]]
            out[i] = " ".join(text_of(text.pieces, kept).split("\n")).strip()
        progress.add(len(batch))
    return out


class _Progress:
    """Says how far it is, now and then."""

    def __init__(self, total: int, done: int, log: Callable[[str], None] = say):
        self._total, self._done, self._fresh, self._log = total, done, 0, log
        self._began = self._said = time.monotonic()
        log(f"{total} lines to translate" + (f", {done} of them are there" if done else ""))

    def add(self, lines: int) -> None:
        """So many more lines are done."""
        self._done, self._fresh = self._done + lines, self._fresh + lines
        now = time.monotonic()
        if now - self._said < EVERY or not self._fresh:
            return
        self._said, rate = now, self._fresh / (now - self._began)
        left = duration((self._total - self._done) / rate)
        self._log(f"{self._done} of {self._total} lines, {rate:.1f} a second, {left} left")


def scores(translations: Sequence[str], references: Sequence[str]) -> str:
    """BLEU and chrF of translations, by sacrebleu, with their signatures.

    Raises:
      ConfigError: sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise ConfigError("--reference: needs the bleu extra: pip install 'jaxformer[bleu]'") from None
    metrics = [BLEU(), CHRF()]
    found = [(metric.corpus_score(list(translations), [list(references)]), metric) for metric in metrics]
    return "\n".join(f"{score.name} {score.score:.1f} ({metric.get_signature()})" for score, metric in found)

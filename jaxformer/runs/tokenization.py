"""Text to token shards as an Apache Beam pipeline, in three steps: count, train a tokenizer, write shards.

What a step finds it leaves in files, so that a start after a kill goes on there, and all workers need is the folder.
The steps are given a function that calls another with each of some items, so that they run without Beam as well.
"""

import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig, load
from jaxformer.data import ingest, shard_plan, shard_writer, sources, tokenizers
from jaxformer.data.corpus import text_settings
from jaxformer.data.progress_bars import say
from jaxformer.data.shard_plan import Counted, Plan, Stretch, Unit
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError, ProgramError
from jaxformer.runs import workdir_lock
from jaxformer.runs.store_lock import lock_of
from jaxformer.storage import files, json_checksum, ranged
from jaxformer.storage.address import place

WORK = "work"  # folder of what a later start goes on from
ELEMENTS = 4096  # of a pipeline over files, at most: each leaves a file behind
_MOST = 1 << 30

Run = Callable[[Callable[[Any], Any], Iterable[Any]], None]


def tokenize(data: DataConfig, out: Path, count: int, run: Run, extension: str = "") -> int:
    """Tokenises a text into shards.

    Args:
      data: the text and its tokenizer.
      out: folder for the shards, or an address; made unless it is there.
      count: shards of the training text.
      run: ``(function, items)``: calls the function with each item, anywhere, in any order, more than once if need be.
      extension: config file that brings a source of its own, for the workers.

    Returns:
      How many shards were written; those that were there already are left as they are.

    Raises:
      ConfigError: any fault of the text; the folder holds something else, or another process writes into it.
    """
    try:
        return _tokenize(data, out, count, run, extension)
    except OSError as error:
        raise ConfigError(_of_disk(out, error)) from None


def _tokenize(data: DataConfig, out: Path, count: int, run: Run, extension: str) -> int:
    if data.mixture is not None:
        raise ConfigError("config.data.source: mixture; accepted here: one source, and one folder of shards for each")
    if sources.SOURCES[str(data.source)].tokens is not None:
        raise ConfigError("config.data.source: tokens; is tokenised already; accepted: a source of text")
    given = Tokenizer.load(data.tokenizer_file) if data.tokenizer_file is not None else None
    found = shard_plan.units(data)
    settings = {**text_settings(data, given), "shards": count, "units": [list(unit) for unit in found]}
    key = json_checksum.digest(json.dumps(settings, sort_keys=True).encode())
    _begin(out, key)
    with lock_of(str(out), "--out"):
        _begin(out, key)  # another process may just have
        files.open_folder(out / WORK)
        files.write_atomically(out / WORK / "key", key)
        return _in_order(data, found, out, count, run, extension, given)


def _in_order(
    data: DataConfig, found: list[Unit], out: Path, count: int, run: Run, extension: str, given: Tokenizer | None
) -> int:
    """The steps, each of which leaves out what is there already."""
    work = out / WORK
    if json_checksum.read_verified(work / "plan.json", _MOST) is None:
        plan = _count(data, found, work, count, run, extension) or _count(
            data, shard_plan.whole(), work, count, run, extension
        )
        assert plan is not None
        _write(work / "plan.json", json_checksum.add_checksum({"plan": plan}))
    plan = _plan(work)
    for unit, look in zip(plan.units, plan.looks, strict=True):
        shard_plan.check_unchanged(data, unit, look)
    tokenizer = _tokenizer(data, plan, work, given, run, extension)
    about = json_checksum.digest(json.dumps([plan, tokenizer.fingerprint]).encode())
    every = [(split, number) for split in sources.SPLITS for number in range(plan.shards[split])]
    sizes = ranged.sizes(out)
    todo = [each for each in every if not shard_writer.is_finished(out, *each, about, sizes)]
    if len(todo) < len(every):
        say(f"{len(every) - len(todo)} of {len(every)} shards are there already")
    if todo:
        held_out = plan.shards["validation"]
        say(f"tokenising {plan.num_bytes('train')} bytes of training text, and what is held out, into "
            f"{len(every) - held_out} + {held_out} shards")  # fmt: skip
        # Who writes shards that follow each other reads a file once for all of them.
        files_of_text = len(plan.units) if plan.units[0].path else 0
        most = max(1, min(8, count // 8), -(-count // (4 * files_of_text))) if files_of_text else count
        run(functools.partial(_shards, data, str(out), about, extension), list(_runs(todo, most)))
    shard_writer.finish(out, tokenizer, plan.shards, about)
    for leftover in out.glob(".*-*"):  # of workers that were killed
        leftover.unlink(missing_ok=True)
    return len(todo)


def _runs(todo: Sequence[tuple[str, int]], most: int) -> Iterator[tuple[str, int, int]]:
    """(split, first, last + 1) of consecutive shards, at most so many of them: what one worker writes in one go."""
    for split in sources.SPLITS:
        numbers = [number for of, number in todo if of == split]
        for _, group in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
            run = [number for _, number in group]
            for at in range(0, len(run), most):
                yield split, run[at], run[min(at + most, len(run)) - 1] + 1


def _begin(out: Path, key: str) -> None:
    """Makes the folder, or finds that it is one of the same text and settings. Only the folder is written."""
    try:
        others = sorted({*files.open_folder(out)} - {WORK, workdir_lock.FILE_NAME})
        begun = out / WORK / "key"
        if not begun.exists():
            if others:
                raise ConfigError(f"--out: {out} is not empty ({others[0]}); accepted: a new or empty folder")
        elif files.read_bytes(begun, 64) != key.encode():
            raise ConfigError(
                f"--out: {out} was begun with other text, files, tokenizer or --shards; accepted: the same, or an "
                "empty folder"
            )
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be used ({error.strerror or error})") from None


def _count(data: DataConfig, found: list[Unit], work: Path, count: int, run: Run, extension: str) -> Plan | None:
    """Has the units counted, and plans by it."""
    groups = _groups(found)
    say(f"counting the documents of {len(found)} files" if found[0].path else "counting the documents")
    todo = [(number, group) for number, group in enumerate(groups)]
    run(functools.partial(_scan, data, str(work), extension), todo)
    counted = [Counted(*each) for number in range(len(groups)) for each in _read(work / f"count-{number:05}.json")]
    for path in work.glob("count-*.json"):
        path.unlink()
    return shard_plan.make(data, found, counted, count)


def _groups(items: list[Any]) -> list[list[Any]]:
    """The items in at most ELEMENTS groups, in order."""
    size = -(-len(items) // ELEMENTS)
    return [items[at : at + size] for at in range(0, len(items), size)]


def _tokenizer(
    data: DataConfig, plan: Plan, work: Path, given: Tokenizer | None, run: Run, extension: str
) -> Tokenizer:
    """The one that is given, or trained, or was trained when this was begun."""
    made = json_checksum.read_verified(work / "tokenizer.made", 1 << 16)  # put after the tokenizer
    if made is not None:
        with contextlib.suppress(ConfigError):
            kept = Tokenizer.load(work / tokenizers.FILE_NAME)
            if json_checksum.digest(kept.content()) == made["digest"]:
                return kept
    if given is None:
        alphabet = sources.SOURCES[str(data.source)].alphabet
        if alphabet is not None:
            given = tokenizers.train("chars", [alphabet(data)], None)
        elif data.tokenizer == "bytes":
            given = tokenizers.train("bytes", [], None)
        else:
            tokenizers.check_vocab_size(data.tokenizer_vocab)
            say(f"making the {data.tokenizer} tokenizer")
            groups = _groups(list(range(len(plan.stretches["train"]))))
            run(functools.partial(_sample, data, str(work), extension), list(enumerate(groups)))
            texts = (text for n in range(len(groups)) for text in _read(work / f"sample-{n:05}.json"))
            given = tokenizers.train(data.tokenizer, texts, data.tokenizer_vocab)
            for path in work.glob("sample-*.json"):
                path.unlink()
    given.save(work)
    made = {"digest": json_checksum.digest(given.content())}
    _write(work / "tokenizer.made", json_checksum.add_checksum(made))
    return given


# What runs on the workers: each takes what it needs from files, and writes one file, or a shard.


def _scan(data: DataConfig, work: str, extension: str, item: tuple[int, list[Unit]]) -> None:
    _load(extension)
    number, group = item
    _write(place(work) / f"count-{number:05}.json", [shard_plan.scan(data, Unit(*unit)) for unit in group])


def _sample(data: DataConfig, work: str, extension: str, item: tuple[int, list[int]]) -> None:
    _load(extension)
    number, stretches = item
    plan = _plan(place(work))
    texts = [text for each in stretches for text in shard_plan.sample(data, plan, each, ingest.SAMPLE_BYTES)]
    _write(place(work) / f"sample-{number:05}.json", texts)


def _shards(data: DataConfig, out: str, about: str, extension: str, item: tuple[str, int, int]) -> None:
    _load(extension)
    folder, (split, begin, end) = place(out), item
    plan, tokenizer = _prepared(folder / WORK, about)
    documents = shard_plan.shard_texts(data, plan, split, range(begin, end))
    ahead: list[tuple[int, str]] = []  # the document that was read and belongs to a later shard

    def texts(number: int) -> Iterator[str]:
        for shard, text in itertools.chain(list(ahead), documents):
            ahead[:] = [(shard, text)]
            if shard > number:
                return
            if shard == number:
                yield text
        ahead.clear()

    for number in range(begin, end):
        skipped = plan.skipped[split] if number == 0 else 0
        shard_writer.write(folder, split, number, texts(number), tokenizer, about=about, num_skipped=skipped)


@functools.lru_cache(1)
def _prepared(work: Path, about: str) -> tuple[Plan, Tokenizer]:
    return _plan(work), Tokenizer.load(work / tokenizers.FILE_NAME)


@functools.lru_cache(1)
def _load(extension: str) -> None:
    if extension:
        load(extension)


def _plan(work: Path) -> Plan:
    units, looks, stretches, numbers, skipped = _read(work / "plan.json")["plan"]
    stretches = {split: [Stretch(*each) for each in all_] for split, all_ in stretches.items()}
    return Plan([Unit(*unit) for unit in units], looks, stretches, numbers, skipped)


def _read(path: Path) -> Any:
    return json_checksum.parse(files.read_bytes(path, _MOST))


def _write(path: Path, value: Any) -> None:
    files.write_atomically(path, json.dumps(value))


def beam(out: Path, options: list[str]) -> Run:
    """What calls a function with each item in a Beam pipeline, one element each.

    Args:
      out: folder for the shards, which all workers see.
      options: words of a command line for Beam, the runner among them.

    Raises (when it is called):
      ConfigError: what the function raised; ProgramError: the pipeline ended otherwise.
    """
    return functools.partial(_run, out, options)


def _run(out: Path, options: list[str], function: Callable[[Any], Any], items: Iterable[Any]) -> None:
    package = need_beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    error = out / WORK / "error"
    error.unlink(missing_ok=True)
    try:
        with package.Pipeline(options=PipelineOptions(options)) as pipeline:
            made = pipeline | package.Create(list(items)) | package.Reshuffle()
            made | package.Map(functools.partial(_told, str(error), function))
    except Exception as problem:
        why = " ".join(str(problem).split()).split(" [while running")[0][:400]
        raise ProgramError(
            f"--out: {out}: the pipeline ended: {why}"
        ) from problem  # as where `error` cannot be written
    if error.exists():
        raise ConfigError(files.read_bytes(error, 1 << 16).decode())


def _told(error: str, function: Callable[[Any], Any], item: Any) -> None:
    """Calls the function. A fault of the text or the disk is left in a file, after which nothing more is done: runners
    try again what their workers raise, and wrap it."""
    path = place(error)
    if path.exists():
        return
    try:
        function(item)
    except ConfigError as problem:
        files.write_atomically(path, str(problem))
    except OSError as problem:
        files.write_atomically(path, _of_disk(path.parent.parent, problem))


def _of_disk(out: Path, error: OSError) -> str:
    """The line about a disk or a store that cannot be read or written."""
    return f"--out: {error.filename or out}: {error.strerror or error}"


def need_beam() -> Any:
    """The package apache_package. Raises ConfigError: it is not installed."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it warns of clouds that it cannot reach
    try:
        import apache_beam
    except ImportError:
        raise ConfigError("jaxformer tokenize needs the beam extra: pip install 'jaxformer[beam]'") from None
    finally:
        root.setLevel(level)
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)  # it tells as a traceback what it also raises
    return apache_beam

"""Which documents go into which token shard, found by many workers, each of which reads some of the files.

The text is a list of units: files, or, of a source that is no list of files, a split. `scan` counts the documents and
bytes of units, `make` cuts them into splits and shards. A document belongs to the shard in whose share of the split's
bytes it begins. So the shards follow from the text and their number alone, and who writes one needs only the counts.

Nothing here needs the whole text: a worker reads the units that its shard touches, and the plan grows with the number
of units, not with that of documents.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxformer.config import DataConfig
from jaxformer.data import contents, sources, text_files
from jaxformer.data.faults import Faults
from jaxformer.data.ingest import pieces
from jaxformer.errors import ConfigError
from jaxformer.storage.address import place

# Source that is a list of files -> config field of each split's files. Others are read as one unit for each split.
BY_FILE = {"files": ("data.files", "data.validation_files")}


class Unit(NamedTuple):
    """What one worker reads from its beginning.

    Attributes:
      path: a file; "": all of a split of the source.
      split: that of a whole split; of a file, the one whose field named it.
    """

    path: str
    split: str


class Counted(NamedTuple):
    """What a unit holds.

    Attributes:
      documents, num_bytes: of it; UTF-8 bytes.
      skipped: lines or examples that cannot be read as text.
      look: size and times of the file, or of all files of the source, to notice that one changed.
    """

    documents: int
    num_bytes: int
    skipped: int
    look: list[int]


class Stretch(NamedTuple):
    """Documents of one unit, from number `begin` to `end` - 1, with their bytes in all."""

    unit: int
    begin: int
    end: int
    num_bytes: int


class Plan(NamedTuple):
    """Where every document goes.

    Attributes:
      units: as `units` gives them, or one for each split.
      looks: of each unit.
      stretches: split -> its documents, in order.
      shards: split -> how many.
      skipped: split -> lines or examples left out.
    """

    units: list[Unit]
    looks: list[list[int]]
    stretches: dict[str, list[Stretch]]
    shards: dict[str, int]
    skipped: dict[str, int]

    def num_bytes(self, split: str) -> int:
        """UTF-8 bytes of a split."""
        return sum(stretch.num_bytes for stretch in self.stretches[split])


def units(data: DataConfig) -> list[Unit]:
    """The text in the order that the source gives it: its files, where it is files and all of them are used."""
    if data.source in BY_FILE and data.max_train_bytes is None:
        splits = {False: "train", True: "validation"}
        return [Unit(str(each.path), splits[each.label.startswith("validation")]) for each in sources.inputs(data)]
    return whole()


def whole() -> list[Unit]:
    """Each split as a unit, as any source can be read."""
    return [Unit("", split) for split in sources.SPLITS]


def texts(data: DataConfig, unit: Unit, faults: Faults) -> Iterator[str]:
    """The documents of a unit. Raises ConfigError as `sources.documents`."""
    if not unit.path:
        yield from sources.documents(data, sources.SPLITS[unit.split != "train"], faults)
        return
    field = BY_FILE[str(data.source)][unit.split != "train"]
    yield from text_files.documents(
        place(unit.path), separator=data.separator, text_field=data.text_fields, field=field, faults=faults
    )


def scan(data: DataConfig, unit: Unit) -> Counted:
    """Reads a unit and counts."""
    faults, before = Faults(data.on_error), _look(data, unit)
    count = size = 0
    for text in texts(data, unit, faults):
        count += 1
        size += len(text.encode())
    check_unchanged(data, unit, before)
    return Counted(count, size, faults.count, before)


def check_unchanged(data: DataConfig, unit: Unit, look: list[int]) -> None:
    """Raises ConfigError if the file is not as it was looked at."""
    if _look(data, unit) != look:
        what = unit.path or "the text"
        raise ConfigError(f"config.data: {what} changed while it was read; start again when nobody writes to it")


def make(data: DataConfig, found: list[Unit], counted: list[Counted], shards: int) -> Plan | None:
    """Cuts the text into splits, as `data.source=files` does, and these into shards.

    Args:
      data: validation_fraction, and how text is read.
      found: of `units` or `whole`.
      counted: of each.
      shards: of the training text; the held-out text gets as many as make them as large.

    Returns:
      The plan; None if the text is one document, which has to be cut itself: plan again with `whole`.

    Raises:
      ConfigError: a split is empty.
    """
    whole_units = [Stretch(number, 0, each.documents, each.num_bytes) for number, each in enumerate(counted)]
    skipped: dict[str, int] = dict.fromkeys(sources.SPLITS, 0)
    if any(unit.split == "validation" for unit in found):
        stretches: dict[str, list[Stretch]] = {
            split: [s for s in whole_units if found[s.unit].split == split] for split in sources.SPLITS
        }  # fmt: skip
        for unit, each in zip(found, counted, strict=True):
            skipped[unit.split] += each.skipped
    else:
        sources.check_held_out(data.validation_fraction)
        documents = sum(each.documents for each in counted)
        if documents == 1:
            return None
        train = sources.train_documents(documents, data.validation_fraction)
        stretches = _cut(data, found, counted, train, skipped)
    sizes: dict[str, int] = {split: sum(stretch.num_bytes for stretch in stretches[split]) for split in sources.SPLITS}
    for split, size in sizes.items():
        if not size:
            raise ConfigError(f"config.data: the {split} text is empty (data.max_train_bytes {data.max_train_bytes})")
    numbers = {"train": shards, "validation": max(1, -(-shards * sizes["validation"] // sizes["train"]))}
    return Plan(found, [each.look for each in counted], stretches, numbers, skipped)


def _cut(
    data: DataConfig, found: list[Unit], counted: list[Counted], train: int, skipped: dict[str, int]
) -> dict[str, list[Stretch]]:
    """Both splits of the documents: the first `train`, and the rest; adds what each leaves out to `skipped`."""
    out: dict[str, list[Stretch]] = {"train": [], "validation": []}
    before = 0
    for number, each in enumerate(counted):
        inside = min(max(train - before, 0), each.documents)  # documents of this unit that are trained on
        before += each.documents
        size, left_out = (each.num_bytes, each.skipped) if inside else (0, 0)
        if 0 < inside < each.documents:
            faults = Faults(data.on_error)
            size = sum(len(text.encode()) for text in itertools.islice(texts(data, found[number], faults), inside))
            left_out = faults.count
        for split, (begin, end, num_bytes, count) in (
            ("train", (0, inside, size, left_out)),
            ("validation", (inside, each.documents, each.num_bytes - size, each.skipped - left_out)),
        ):
            skipped[split] += count
            if end > begin:
                out[split].append(Stretch(number, begin, end, num_bytes))
    return out


def shard_texts(data: DataConfig, plan: Plan, split: str, numbers: range) -> Iterator[tuple[int, str]]:
    """(shard, text) of the documents of consecutive shards, in order, each file read once.

    Raises:
      ConfigError: a file changed since it was counted.
    """
    total, shards = plan.num_bytes(split), plan.shards[split]
    before = 0
    for stretch in plan.stretches[split]:
        after = before + stretch.num_bytes
        if (after - 1) * shards // total >= numbers.start and before * shards // total < numbers.stop:
            unit, at = plan.units[stretch.unit], before
            check_unchanged(data, unit, plan.looks[stretch.unit])
            for text in itertools.islice(texts(data, unit, Faults(data.on_error)), stretch.begin, stretch.end):
                shard = at * shards // total  # where its first byte lies
                if shard >= numbers.stop:
                    break
                if shard >= numbers.start:
                    yield shard, text
                at += len(text.encode())
            check_unchanged(data, unit, plan.looks[stretch.unit])
        before = after


def sample(data: DataConfig, plan: Plan, stretch: int, wanted: int) -> list[str]:
    """Pieces of one stretch of the training text, for training a tokenizer.

    Whether a piece is taken depends on where in the text it begins alone: about one in `total / wanted` of them, evenly
    spread, and the same ones whoever looks for them. Of a tokenizer of characters, each that there is.
    """
    chosen, total = plan.stretches["train"][stretch], plan.num_bytes("train")
    unit = plan.units[chosen.unit]
    at = sum(each.num_bytes for each in plan.stretches["train"][:stretch])
    read = itertools.islice(texts(data, unit, Faults(data.on_error)), chosen.begin, chosen.end)
    if data.tokenizer == "chars":
        return ["".join(sorted(set(itertools.chain.from_iterable(read))))]
    taken = []
    for piece in itertools.chain.from_iterable(map(pieces, read)):
        size = len(piece.encode())
        if total <= wanted or (at + size) * wanted // (total * size) > at * wanted // (total * size):
            taken.append(piece)
        at += size
    return taken


def _look(data: DataConfig, unit: Unit) -> list[int]:
    """Of its file, or of all that its source reads."""
    paths = [place(unit.path)] if unit.path else [each.path for each in sources.inputs(data)]
    return [number for path in paths for number in contents.look(path)]

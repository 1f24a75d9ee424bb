"""The faults: what can happen to files, to folders and to processes.

Every fault of a file is a function (dice, path, trial) that returns what it did in a few words, or None if it cannot be
done to that file.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.faults.victims import Made


class Trial(NamedTuple):
    """What a fault of a file may look at.

    Attributes:
      folder: of the trial; `elsewhere` beside what is damaged holds what nobody may touch.
      made: undamaged victims.
      others: folder in the trial -> the victim of the same form that another run left.
    """

    folder: Path
    made: Made
    others: dict[str, Path]


# Folder in the trial -> the other one of its kind.
OTHERS = {"run": "other", "study": "other study", "xdg": "other xdg"}
Fault = Callable[[random.Random, Path, Trial], str | None]


def flip(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """One bit."""
    content = bytearray(path.read_bytes())
    if not content:
        return None
    at, bit = dice.randrange(len(content)), dice.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} of {len(content)}"


def digit(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """One digit of a text, as another."""
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    places = [match.start() for match in re.finditer(rb"[0-9]", content)]
    if not places:
        return None
    at = dice.choice(places)
    new = dice.choice([d for d in b"0123456789" if d != content[at]])
    path.write_bytes(content[:at] + bytes([new]) + content[at + 1 :])
    before = content[max(0, at - 40) : at].decode(errors="replace")
    return f"byte {at}, after {before!r}: {chr(content[at])} -> {chr(new)}"


def noise(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """1 % of the bytes."""
    content = bytearray(path.read_bytes())
    if not content:
        return None
    for at in dice.sample(range(len(content)), max(1, len(content) // 100)):
        content[at] ^= dice.randrange(1, 256)
    path.write_bytes(content)
    return f"1 % of {len(content)} bytes"


def cut(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """Truncated."""
    size = path.stat().st_size
    if not size:
        return None
    length = dice.randrange(size)
    os.truncate(path, length)
    return f"cut to {length} of {size} bytes"


def empty(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """Truncated to nothing."""
    if not path.stat().st_size:
        return None
    os.truncate(path, 0)
    return "empty"


def delete(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """Gone."""
    path.unlink()
    return "deleted"


def append(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """Garbage at the end."""
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randint(1, 200)))
    return "garbage appended"


def repeat_line(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """A line of a text, twice."""
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2 or path.suffix not in (".json", ".jsonl", ".txt", ".html"):
        return None
    at = dice.randrange(len(lines))
    path.write_bytes(b"".join([*lines[: at + 1], *lines[at:]]))
    return f"line {at + 1} of {len(lines)} repeated"


def swap(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """Another run's file of that name."""
    top, *rest = path.relative_to(trial.folder).parts
    other = trial.others[top].joinpath(*rest)
    if not other.is_file():
        beside = [p for p in other.parent.rglob("*") if p.is_file() and p.suffix == path.suffix] if (
            other.parent.is_dir()) else []  # fmt: skip
        if not beside:
            return None
        other = dice.choice(sorted(beside))
    if other.read_bytes() == path.read_bytes():
        return None
    shutil.copyfile(other, path)
    return f"replaced by {other.relative_to(trial.made.folder)}"


def neighbour(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """Another file of that folder."""
    beside = [p for p in sorted(path.parent.iterdir()) if p != path and p.is_file() and not p.is_symlink()]
    beside = [p for p in beside if p.read_bytes() != path.read_bytes()]
    if not beside:
        return None
    other = dice.choice(beside)
    shutil.copyfile(other, path)
    return f"replaced by {other.name} beside it"


def link(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """A link to the same content elsewhere, which must stay as it is."""
    target = trial.folder / "elsewhere" / path.name
    shutil.move(path, target)
    path.symlink_to(target)
    return "a link to its content elsewhere"


def broken_link(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """A link to nothing, which must not be made."""
    path.unlink()
    path.symlink_to(trial.folder / "elsewhere" / "not there")
    return "a link to nothing"


def directory(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """A folder of that name."""
    path.unlink()
    path.mkdir()
    if dice.random() < 0.5:
        (path / "a file").write_text("mine")
    return "a folder"


def pipe(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """A named pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)
    return "a pipe"


def hostile(dice: random.Random, path: Path, trial: Trial) -> str | None:
    """JSON made to hurt: very deep, huge numbers, keys and folders that lead elsewhere."""
    if path.suffix not in (".json", ".jsonl") and path.name not in ("metadata", "_METADATA"):
        return None
    elsewhere = trial.folder / "elsewhere"
    up = os.path.relpath(elsewhere, path.parent.parent)
    text = path.read_text(errors="replace")
    numbers = list(re.finditer(r"(?<=[:\[ ])-?[0-9][0-9.e+-]*", text))
    strings = list(re.finditer(r'(?<=: )"[^"\n]*"', text))
    how = dice.choice(["deep", "huge", "lone surrogate", "up", "absolute", "null", "list"])
    if how in ("huge", "null", "list") and numbers:
        at = dice.choice(numbers)
        new = {"huge": dice.choice(["9" * 400, "1e400", "4000000000", "-1"]), "null": "null", "list": "[]"}[how]
    elif how in ("lone surrogate", "up", "absolute") and strings:
        at = dice.choice(strings)
        new = {"lone surrogate": '"\\ud800"', "up": json.dumps(up), "absolute": json.dumps(str(elsewhere))}[how]
    elif how == "deep":
        path.write_text(dice.choice(["[", '{"a":']) * 100_000)
        return "100,000 brackets"
    else:
        return None
    path.write_text(text[: at.start()] + new + text[at.end() :])
    return f"{how}: {new[:60]} for {at.group()[:40]!r}"


FILE_FAULTS: dict[str, Fault] = {
    "flipped bit": flip, "changed digit": digit, "noise": noise, "truncated": cut, "empty": empty, "deleted": delete,
    "garbage appended": append, "repeated line": repeat_line, "other run's": swap, "neighbour's": neighbour,
    "link": link, "broken link": broken_link, "folder": directory, "pipe": pipe, "hostile": hostile,
}  # fmt: skip


def checkpoint_renamed(dice: random.Random, folder: Path, trial: Trial) -> str | None:
    """A checkpoint copied under another step: `cp -r 8 10`."""
    steps = sorted(p for p in (folder / "checkpoints").iterdir())
    source, step = dice.choice(steps), dice.choice([2, 6, 10, 14, 100])
    shutil.copytree(source, folder / "checkpoints" / str(step))
    return f"checkpoint {source.name} copied to {step}"


def checkpoint_swapped(dice: random.Random, folder: Path, trial: Trial) -> str | None:
    """Another seed's checkpoint in the place of one, or beside them."""
    source = trial.others["run"] / "checkpoints"
    step = dice.choice(sorted(p.name for p in source.iterdir()))
    target = folder / "checkpoints" / step
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / step, target)
    return f"another seed's checkpoint {step}"


def checkpoint_gone(dice: random.Random, folder: Path, trial: Trial) -> str | None:
    """A checkpoint, or all of them, deleted."""
    steps = sorted((folder / "checkpoints").iterdir())
    gone = [folder / "checkpoints"] if dice.random() < 0.2 else [dice.choice(steps[:-1])]
    shutil.rmtree(gone[0])
    return f"{gone[0].name} deleted"


def odd_names(dice: random.Random, folder: Path, trial: Trial) -> str | None:
    """Names among the checkpoints that look like steps."""
    name = dice.choice(["²", "0115", "00", "-1", "1e3", "١٢", "9" * 30, "13.orbax-checkpoint-tmp-1"])
    newest = sorted((folder / "checkpoints").iterdir(), key=lambda p: int(p.name))[-1]
    how = dice.choice(["copy", "link", "empty"])
    target = folder / "checkpoints" / name
    if how == "copy":
        shutil.copytree(newest, target)
    elif how == "link":
        target = folder / "checkpoints" / "13"
        target.symlink_to(newest)
    else:
        target.mkdir()
    return f"{target.name!r}, {how}"


def folder_linked(dice: random.Random, folder: Path, trial: Trial) -> str | None:
    """A folder replaced by a link to its content elsewhere."""
    inside = sorted(p for p in folder.iterdir() if p.is_dir() and p.name != "compiled")  # that one may lie elsewhere
    if not inside:
        return None
    path, target = dice.choice(inside), trial.folder / "elsewhere" / "folder"
    shutil.move(path, target)
    path.symlink_to(target)
    return f"{path.name} is a link to its content elsewhere"


def folder_gone(dice: random.Random, folder: Path, trial: Trial) -> str | None:
    """A folder deleted, or a file in its place."""
    inside = sorted(p for p in folder.iterdir() if p.is_dir())
    if not inside:
        return None
    path = dice.choice(inside)
    shutil.rmtree(path)
    if dice.random() < 0.5:
        path.write_text("a file")
        return f"{path.name} is a file"
    return f"{path.name} deleted"


FOLDER_FAULTS: dict[str, Fault] = {
    "checkpoint renamed": checkpoint_renamed, "checkpoint swapped": checkpoint_swapped,
    "checkpoint deleted": checkpoint_gone, "odd names": odd_names, "folder linked": folder_linked,
    "folder deleted": folder_gone,
}  # fmt: skip
ONLY_RUNS = {"checkpoint renamed", "checkpoint swapped", "checkpoint deleted", "odd names"}

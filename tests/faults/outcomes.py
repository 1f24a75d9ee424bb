"""What came of a fault: right, noticed, refused in one line, silent, or worse."""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.programs import Ended
from tests.faults.victims import Made, Reader, lines

# right: the same result, nothing said. noticed: a line says what is damaged, and what is left is right.
# refused: exit code 2, one line, nothing of the victim's changed. The others are failures.
GOOD = ("right", "noticed", "refused")
BAD = ("silent", "traceback", "touched")
NOTICES = re.compile(
    r"damage|valid|checksum|set aside|not read|cannot|could not|note:|warning:|skipp|dropp|ignor|differ|again|broken"
    r"|older|fall|lost|missing|no record",
    re.IGNORECASE,
)
# What standard error says of work that is done once.
PROGRESS = re.compile(r"(reading|making|tokenising|another process is tokenising) .*")
MOST_LINES = 3  # on standard error, of a program that does what it should


class Outcome(NamedTuple):
    """One of GOOD or BAD, and why."""

    kind: str
    why: str


def snapshot(folders: Iterable[Path], content: bool = True) -> dict[str, str]:
    """path -> what is there, links not followed; with `content` a hash of it, otherwise size and time of change."""
    found = {}
    for folder in folders:
        for root, directories, files in os.walk(folder):
            for name in directories + files:
                path = Path(root) / name
                try:
                    about = path.lstat()
                    mode = stat.S_IFMT(about.st_mode)
                    if mode == stat.S_IFLNK:
                        what = f"link {os.readlink(path)}"
                    elif mode != stat.S_IFREG:
                        what = f"{mode}"
                    elif content:
                        what = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
                    else:
                        what = f"{about.st_size} {about.st_mtime_ns}"
                except FileNotFoundError:
                    continue
                found[str(path)] = what
    return found


def changes(before: dict[str, str], after: dict[str, str], new: bool = True) -> list[str]:
    """What is gone, differs or, with `new`, has come."""
    out = [f"{path} is gone" for path in before if path not in after]
    out += [f"{path} was changed" for path in before if path in after and after[path] != before[path]]
    return out + ([f"{path} was made" for path in after if path not in before] if new else [])


def compared(result: dict[str, Any], references: list[dict[str, Any]]) -> str:
    """ "same"; "older": of an older checkpoint; "less": numbers are missing, none differ; or what differs."""
    if result == references[0]:
        return "same"
    if result in references:
        return "older"
    differing = [k for k in result.keys() & references[0].keys() if result[k] != references[0][k]]
    more = result.keys() - references[0].keys() - {"records"}
    if not differing and not more and result.get("records") != "cannot be read":
        return "less"
    if differing:
        name = sorted(differing)[0]
        return f"{name} is {str(result[name])[:60]}, not {str(references[0][name])[:60]}"
    return f"also {sorted(more)[0]}" if more else "its records cannot be read afterwards"


def judge(reader: Reader, made: Made, trial: Path, ended: Ended, changed: list[str], outside: list[str]) -> Outcome:
    """The outcome of a program that has ended.

    Args:
      reader: which program.
      made: with its references.
      trial: its folder.
      ended: how it ended, what it printed.
      changed: of the victim's files, by this program.
      outside: of everything else.
    """
    if outside:
        return Outcome("touched", f"outside the trial: {outside[0]}")
    wrong = crash(ended)
    if wrong:
        return Outcome("traceback", wrong)
    if ended.code == 2:
        if changed:
            return Outcome("touched", f"refused, but {changed[0]}")
        return Outcome("refused", ended.err.strip())
    if ended.code != 0:
        return Outcome("traceback", f"exit code {ended.code}: {ended.err.strip()[:300]}")
    try:
        result = reader.result(trial, ended)
    except Exception as error:
        return Outcome("silent", f"exit code 0, but no result: {type(error).__name__}: {error}")
    news = lines(ended, trial) - made.said[reader.name]
    notices = [line for line in sorted(news) if NOTICES.search(line)]
    how = compared(result, made.references[reader.name])
    if how == "same":
        return Outcome("noticed", notices[0]) if notices else Outcome("right", "")
    if how in ("older", "less") and notices:
        return Outcome("noticed", f"{how}: {notices[0]}")
    return Outcome("silent", f"{how}; said: {notices[0] if notices else 'nothing'}")


def crash(ended: Ended) -> str | None:
    """What a program must never do, whatever it was given; None if it did not."""
    err = [line for line in ended.err.strip().splitlines() if not PROGRESS.fullmatch(line)]
    if ended.code is None:
        return "it hangs"
    if ended.code < 0:
        return f"died by signal {-ended.code}: {ended.err.strip()[-200:]}"
    if "Traceback" in ended.err:
        return f"traceback: {err[-1][:300]}"
    told = [line for line in err if not line.startswith("note: ")]  # as of a cache that cannot be written either
    if ended.code == 2 and (len(told) != 1 or not told[0].startswith("error: ")):
        return f"exit code 2 with {len(err)} lines: {ended.err.strip()[:300]!r}"
    if len(err) > MOST_LINES:
        return f"{len(err)} lines on standard error: {ended.err.strip()[:300]!r}"
    return None


def table(outcomes: Counter[tuple[str, str, str]], by: int) -> str:
    """The outcomes as text; `by` 0: a row for each fault, 1: for each kind of file."""
    columns = (*GOOD, *BAD)
    rows = sorted({key[by] for key in outcomes})
    width = max([len(row) for row in rows] + [5])
    head = "fault" if by == 0 else "of"
    out = [f"{head:<{width}}  tried  " + "  ".join(f"{name:>9}" for name in columns)]
    for row in [*rows, "all"]:
        counts = [
            sum(n for key, n in outcomes.items() if row in ("all", key[by]) and key[2] == name) for name in columns
        ]
        out.append(f"{row:<{width}}  {sum(counts):>5}  " + "  ".join(f"{n or '.':>9}" for n in counts))
    return "\n".join(out)

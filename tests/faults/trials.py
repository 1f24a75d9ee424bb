"""The trials: a seed chooses a fault, what it is done to, and the program that meets it."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults import damage, outcomes
from tests.faults.outcomes import Outcome, changes, snapshot
from tests.faults.programs import ROOT, Ended, Program
from tests.faults.victims import BY_NAME, Made, Reader, argv, copy

# victim -> (folders in the trial that hold it, the programs that read it)
VICTIMS = {
    "run": ("run", ["resume", "resume", "resume finished", "evaluate", "generate", "curves"]),
    "corpus cache": ("xdg", ["resume", "start", "evaluate", "study half"]),
    "compiled": ("xdg/jaxformer/compiled", ["resume", "start", "evaluate", "generate", "study start"]),
    "study": ("study", ["fit", "study", "study half"]),
}
KINDS = [  # of files, for the table: (what matches its path in the trial, name)
    (r"^xdg/.*/compiled/.*-cache$", "compiled program"), (r"^xdg/.*/compiled/", "compiled checksum"),
    (r"^xdg/.*validation\.tokens$", "cache held-out tokens"), (r"^xdg/.*\.tokens$", "cache training tokens"),
    (r"^xdg/.*\.starts$", "cache starts"), (r"^xdg/.*/index/", "cache index"),
    (r"^xdg/.*\.lock$", "cache lock"), (r"^xdg/.*tokenizer", "cache tokenizer"), (r"^xdg/", "cache other"),
    (r"^run/manifest", "run manifest"), (r"^run/records", "run records"), (r"^run/tokenizer", "run tokenizer"),
    (r"/meta/", "checkpoint meta"), (r"/params/", "checkpoint params"), (r"/state/", "checkpoint state"),
    (r"^run/checkpoints/", "checkpoint other"), (r"^run/", "run other"),
    (r"^study/manifest", "study manifest"), (r"^study/records", "study records"), (r"^study/runs/", "study run file"),
    (r"^study/fit", "study fit"), (r"^study/", "study other"),
]  # fmt: skip


class Tried(NamedTuple):
    """A trial that is over: the fault's kind, what it was done to, what exactly was done, who read it, what came."""

    fault: str
    of: str
    did: str
    reader: str
    outcome: Outcome


class Suite:
    """Runs trials.

    Args:
      made: the victims.
      root: folder that holds them and the home folder; nothing in it may change but the trial's own.
      fresh: starts Python anew for every program.
      only: of the trials "FAULT of KIND, read by PROGRAM" those that this pattern is found in.
    """

    def __init__(self, made: Made, root: Path, fresh: bool = False, only: str = ""):
        self.made, self.root, self.fresh, self.only = made, root, fresh, re.compile(only)
        self.folder = root / "trial"
        self.can_mount = _mounts(root)
        self._watched = [made.folder, root / "home", ROOT / "jaxformer", ROOT / "experiments", ROOT / "configs"]

    def run(self, seed: str) -> Tried:
        """One trial, made anew in an empty folder."""
        dice = random.Random(seed)
        for _ in range(1000):
            clear(self.folder)
            (self.folder / "elsewhere").mkdir(parents=True)
            (self.folder / "elsewhere" / "mine").write_text("mine")
            kind = dice.choices(("file", "folder", "process"), (75, 10, 15))[0]
            if kind == "process":
                name = dice.choice(sorted(PROCESS_FAULTS))
                tried = PROCESS_FAULTS[name](self, dice) if self.only.search(name) else None
            else:
                tried = self._damaged(dice, kind)
            if tried is not None:
                return tried
        raise AssertionError(f"no trial that {self.only.pattern!r} is found in")

    def start(self, reader: Reader, name: str = "1", file_size: int | None = None) -> Program:
        """Starts a program in the trial."""
        return Program(
            argv(reader, self.made.folder, self.folder), self.folder, name, file_size=file_size, fresh=self.fresh
        )

    def wait(self, program: Program, reader: Reader) -> Ended:
        """Waits for its end, 15 times as long as it takes undamaged, and at least a minute."""
        return program.wait(max(60.0, 15 * self.made.seconds[reader.name]))

    def outside(self) -> dict[str, str]:
        """All that no program may change: the victims' originals, home, the package, what links lead to."""
        seen = snapshot(self._watched, content=False) | snapshot([self.folder / "elsewhere", self.folder / "cwd"])
        return {path: what for path, what in seen.items() if "__pycache__" not in path and "/matplotlib" not in path}

    def meet(self, reader: Reader, fault: str, of: str, did: str, *, refusable: bool = True) -> Tried:
        """Runs a program in the trial as it lies, and judges it."""
        (self.folder / "cwd").mkdir(exist_ok=True)
        own = [self.folder / name for name in reader.needs.values()]
        before, outside = snapshot(own), self.outside()
        ended = self.wait(self.start(reader), reader)
        changed, touched = changes(before, snapshot(own), new=False), changes(outside, self.outside())
        outcome = outcomes.judge(reader, self.made, self.folder, ended, changed, touched)
        if outcome.kind == "refused" and not refusable:
            outcome = Outcome("traceback", f"nothing is damaged, but: {outcome.why}")
        return Tried(fault, of, did, reader.name, outcome)

    def _damaged(self, dice: random.Random, kind: str) -> Tried | None:
        victim = dice.choice(sorted(VICTIMS))
        where, readers = VICTIMS[victim]
        reader = BY_NAME[dice.choice(readers)]
        copy(self.made.folder, reader, self.folder)
        others = {top: self.made.folder / other for top, other in damage.OTHERS.items()}
        trial = damage.Trial(self.folder, self.made, others)
        top = self.folder / where
        files = self._files(victim, top)
        labels = sorted({self.kind(path) for path in files})
        for _ in range(200):
            if kind == "folder":
                faults, path = damage.FOLDER_FAULTS, top / "jaxformer" if where == "xdg" else top
                label = f"{victim} folder"
            else:
                # Half of the time any file, half of the time any kind of file: checkpoints are many files.
                wanted = dice.choice([None, dice.choice(labels)])
                faults = damage.FILE_FAULTS
                path = dice.choice([p for p in files if wanted in (None, self.kind(p))])
                label = self.kind(path)
            fault = dice.choice(sorted(faults))
            if fault in damage.ONLY_RUNS and victim != "run":
                continue
            if not self.only.search(f"{fault} of {label}, read by {reader.name}"):
                continue
            did = faults[fault](dice, path, trial)
            if did is not None and label == "compiled program" and dice.random() < 0.7:  # which it loads, nobody knows
                for each in files:
                    if each != path and self.kind(each) == label:
                        faults[fault](dice, each, trial)
                did += ", and so all of them"
            if did is not None:
                return self.meet(reader, fault, label, f"{path.relative_to(self.folder)}: {did}")
        return None

    def kind(self, path: Path) -> str:
        """The kind of a file of the trial."""
        relative = path.relative_to(self.folder).as_posix()
        return next(name for pattern, name in KINDS if re.search(pattern, relative))

    def _files(self, victim: str, top: Path) -> list[Path]:
        """All files of a victim, in an order that does not hang on random parts of their names."""
        files = [p for p in top.rglob("*") if p.is_file() and not p.is_symlink()]
        if victim == "corpus cache":
            files = [p for p in files if "compiled" not in p.parts]
        return sorted(files, key=lambda p: (re.sub(r"[0-9a-f]{16,}", "", p.as_posix()), p.stat().st_size))


def clear(folder: Path) -> None:
    """Removes a trial's folder, whatever is mounted or forbidden in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def _mounts(root: Path) -> bool:
    """Whether file systems can be mounted here."""
    place = root / "mounted"
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True).returncode:
        return False
    return subprocess.run(["umount", place], capture_output=True).returncode == 0


@contextlib.contextmanager
def _mounted(place: Path, *options: str) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


def killed(suite: Suite, dice: random.Random) -> Tried:
    """Killed at random moments, one to three times, and started again."""
    reader = BY_NAME[dice.choice(["start", "start", "resume", "study start"])]
    number = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    copy(suite.made.folder, reader, suite.folder)
    if dice.random() < 0.3:  # as after a fresh installation: corpus and programs are made as well
        shutil.rmtree(suite.folder / "xdg")
    moments = [dice.uniform(0, 1.5 * suite.made.seconds[reader.name]) for _ in range(dice.randint(1, 3))]
    fault = f"killed by {number.name}"
    for moment in moments:
        program = suite.start(reader)
        time.sleep(moment)
        program.kill(number)
        ended = suite.wait(program, reader)
        by_signal = ended.code in (-number, 0, 75, 130) or (ended.code is not None and ended.code == -signal.SIGKILL)
        if not by_signal or "Traceback" in ended.err:
            why = outcomes.crash(ended) or f"exit code {ended.code}: {ended.err.strip()[:300]}"
            return Tried(fault, reader.name, f"after {moment:.2f} s", reader.name, Outcome("traceback", why))
    did = f"after {', '.join(f'{moment:.2f}' for moment in moments)} s"
    return suite.meet(reader, fault, reader.name, did, refusable=False)


def two_writers(suite: Suite, dice: random.Random) -> Tried:
    """Two programs at once in one working directory: one is right, the other too or refused."""
    reader = BY_NAME[dice.choice(["start", "resume", "study start"])]
    copy(suite.made.folder, reader, suite.folder)
    if dice.random() < 0.5:
        shutil.rmtree(suite.folder / "xdg")
    pause = dice.choice([0.0, dice.uniform(0, suite.made.seconds[reader.name])])
    did = f"{pause:.2f} s apart"
    (suite.folder / "cwd").mkdir()
    outside = suite.outside()
    first = suite.start(reader, "1")
    time.sleep(pause)
    second = suite.start(reader, "2")
    both = [suite.wait(first, reader), suite.wait(second, reader)]
    touched = changes(outside, suite.outside())
    found = [outcomes.judge(reader, suite.made, suite.folder, ended, [], touched) for ended in both]
    bad = [outcome for outcome in found if outcome.kind in outcomes.BAD]
    if not bad and all(outcome.kind == "refused" for outcome in found):
        bad = [Outcome("traceback", f"both are refused: {found[0].why}")]
    if bad:
        return Tried("two writers", reader.name, did, reader.name, bad[0])
    refused = [outcome for outcome in found if outcome.kind == "refused"]
    last = suite.meet(reader, "two writers", reader.name, did, refusable=False)  # what they left is whole
    return last._replace(outcome=refused[0]) if refused and last.outcome.kind in outcomes.GOOD else last


def full_disk(suite: Suite, dice: random.Random) -> Tried:
    """No room left for the run, the study or the caches; then there is, and the same command goes on."""
    reader = BY_NAME[dice.choice(["start", "start", "resume", "study start"])]
    copy(suite.made.folder, reader, suite.folder)
    where = dice.choice(["study" if "study" in reader.name else "run", "xdg"])
    place = suite.folder / where
    if where == "xdg":
        shutil.rmtree(place)
    if not suite.can_mount or dice.random() < 0.3:  # a limit to the size of a file stands in for it
        limit = int(dice.choice([2**14, 10 ** dice.uniform(4.2, 5.3)]))  # with room for what it prints
        fault, did = "file size limit", f"{limit} bytes"
        ended = suite.wait(suite.start(reader, file_size=limit), reader)
    else:
        size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file()) if place.is_dir() else 0
        room = int(dice.choice([0, 10 ** dice.uniform(3.7, 6)]))
        fault, did = "full disk", f"{where} with {room} bytes left"
        aside = suite.folder / "aside"
        if place.is_dir():
            shutil.move(place, aside)
        with _mounted(place, "-t", "tmpfs", "-o", f"size={size * 2 + room + 65536}", "none"):
            if aside.is_dir():
                shutil.copytree(aside, place, dirs_exist_ok=True)
            free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - room
            if free > 0:
                (place / ".ballast").write_bytes(b"\0" * free)
            ended = suite.wait(suite.start(reader), reader)
            (place / ".ballast").unlink(missing_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(place, aside, symlinks=True)
        shutil.rmtree(place)
        shutil.move(aside, place)
    wrong = outcomes.crash(ended)
    if wrong is None and ended.code not in (0, 2):
        wrong = f"exit code {ended.code}: {ended.err.strip()[:300]}"
    if wrong:
        return Tried(fault, reader.name, did, reader.name, Outcome("traceback", wrong))
    last = suite.meet(reader, fault, reader.name, did, refusable=False)
    if ended.code == 2 and last.outcome.kind in outcomes.GOOD:
        return last._replace(outcome=Outcome("refused", ended.err.strip()))
    return last


def unwritable(suite: Suite, dice: random.Random) -> Tried:
    """A folder on a read-only file system."""
    reader = BY_NAME[dice.choice(["start", "resume", "evaluate", "generate", "fit", "study"])]
    copy(suite.made.folder, reader, suite.folder)
    choices = ["xdg", "xdg/jaxformer", "xdg/jaxformer/compiled", *reader.needs.values()]
    where = dice.choice(choices)
    if not suite.can_mount:
        return Tried("unwritable (skipped: no mounts here)", reader.name, where, reader.name, Outcome("right", ""))
    place = suite.folder / where
    with _mounted(place, "--bind", str(place)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True, capture_output=True)
        return suite.meet(reader, "unwritable", reader.name, where)


PROCESS_FAULTS: dict[str, Callable[[Suite, random.Random], Tried]] = {
    "full disk": full_disk, "killed": killed, "two writers": two_writers, "unwritable": unwritable,
}  # fmt: skip

"""The fault suite: what can go wrong with files and processes, at random, and what jaxformer makes of it.

    python -m tests.faults --minutes=30 --seed=1
    python -m tests.faults --trial=1:17            the 17th trial of seed 1 alone, with all that it printed

Small runs, a scaling study, a corpus cache and compiled programs are made once. Each trial copies them, damages
something (a bit, a digit, a file, a folder, a kill, a full disk, a second writer, ...) and runs a program on it, whose
numbers are then compared with the undamaged ones, bit for bit. It prints how often that came out

    right      the same numbers, nothing said (the damage is of no account, or what was damaged is made again)
    noticed    a line says what is damaged; the numbers are right, or honestly those of an older checkpoint
    refused    exit code 2, one line, nothing of the victim's changed
    silent     exit code 0 and other numbers, nothing said
    traceback  a traceback, a signal, a hang, or more than three lines on standard error
    touched    something outside was changed, or the victim was, although it was refused

Exit code: 1 if there is any of the last three, 0 otherwise. Run as root on Linux it mounts small file systems to be
full disks; elsewhere a limit to the size of files stands in for them, and read-only folders are left out.
"""

import argparse
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite; returns its exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of trials, after making the victims (default 30)")
    parser.add_argument("--trials", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, help="of the trials (default: by chance)")
    parser.add_argument("--trial", action="append", default=[], metavar="SEED", help="this trial alone; repeatable")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help='trials such as "flipped bit of cache tokens, read by evaluate"'
    )
    parser.add_argument("--fresh", action="store_true", help="start Python anew for every program, as a user does")
    parser.add_argument("--victims", type=Path, metavar="FOLDER", help="keep the victims here, and use them again")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave each failed trial here")
    options = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        return _run(options, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _run(options: argparse.Namespace, root: Path) -> int:
    from tests.faults import programs, victims

    (root / "home").mkdir()
    programs.prepare(root / "home")

    from tests.faults.outcomes import BAD, table
    from tests.faults.trials import Suite

    def say(text: str) -> None:
        print(text, flush=True)

    began = time.monotonic()
    made = victims.kept_or_made((options.victims or root / "victims").absolute(), say)
    suite = Suite(made, root, options.fresh, options.only)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    say(f"ready after {time.monotonic() - began:.0f} s; seed {seed}")
    found: Counter[tuple[str, str, str]] = Counter()
    failed: list[str] = []
    until = time.monotonic() + 60 * options.minutes
    number = 0
    while True:
        if options.trial:
            if number == len(options.trial):
                break
            name = options.trial[number]
        elif time.monotonic() > until or number == options.trials:
            break
        else:
            name = f"{seed}:{number}"
        number += 1
        tried = suite.run(name)
        found[tried.fault, tried.of, tried.outcome.kind] += 1
        text = (
            f"{tried.outcome.kind}: trial {name}, {tried.reader!r} after {tried.fault} of {tried.of}: {tried.did}\n"
            f"    {tried.outcome.why}\n"
        ).replace(str(suite.folder), "TRIAL")
        if tried.outcome.kind in BAD:
            only = f" --only={shlex.quote(options.only)}" if options.only else ""
            failed.append(f"{text}    python -m tests.faults --trial={name}{only}")
            say(failed[-1])
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                target = options.keep / f"trial-{name.replace(':', '-')}"
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(suite.folder, target, symlinks=True, ignore=_pipes)
        elif options.trial:
            say(text.rstrip())
    say(f"\n{number} trials in {time.monotonic() - began:.0f} s, seed {seed}\n\n{table(found, 0)}\n\n{table(found, 1)}")
    if failed:
        say(f"\n{len(failed)} failed:\n" + "\n".join(failed))
    return 1 if failed else 0


def _pipes(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if (Path(folder) / name).is_fifo()}


if __name__ == "__main__":
    sys.exit(main())

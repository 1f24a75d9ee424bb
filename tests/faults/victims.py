"""What the fault suite damages: runs, a study, a corpus cache and compiled programs, small, made once.

And the programs that then read them, with what each of them gives when nothing is damaged.
"""

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.programs import ROOT, Ended, Program

RUN = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "model": {{"num_layers": 1, "width": 16, "num_heads": 2, "context_length": 32}},
        "data": {{"source": "files", "files": ("{text}",), "separator": "\\n\\n", "tokenizer": "bytes"}},
        "optimizer": {{"warmup_steps": 2}},
        "train": {{"steps": 12, "batch_rows": 4, "steps_per_dispatch": 2, "eval_every_steps": 4, "log_every_steps": 2}},
        "checkpoint": {{"save_every_steps": 4, "keep": 3}},
    }})
"""
STUDY = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "model": {{"context_length": 32, "positions": "rotary"}},
        "data": {{"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 40_000}},
        "optimizer": {{"schedule": "wsd", "warmup_steps": 5, "learning_rate": 1e-2}},
        "train": {{"batch_rows": 8, "steps_per_dispatch": 5, "eval_rows": 64}},
        "ladder": {{"widths": (8, 16, 24), "head_width": 8, "min_layers": 1, "layer_width": 100,
                   "tokens": (4096, 8192, 16384), "learning_rates": (1.0,), "learning_rate_extensions": 0}},
    }})
"""


class Reader(NamedTuple):
    """A program that reads victims.

    Attributes:
      name: of it.
      argv: module and flags; RUN, STUDY and TRIAL stand for paths.
      needs: victim -> name of the folder in the trial where its copy lies.
      result: of a trial's folder and what the program printed: a dict that is equal wherever the result is.
    """

    name: str
    argv: tuple[str, ...]
    needs: dict[str, str]
    result: Callable[[Path, Ended], dict[str, Any]]


def losses(path: Path) -> dict[str, Any]:
    """(kind, step, run, ...) -> loss, of what a file of records says; without it, {}."""
    from jaxformer import records

    try:
        found = records.latest(records.load(path))
    except (OSError, ValueError):
        return {"records": "cannot be read"}
    except Exception as error:  # what `load` lets through is damage of a program's own making
        return {"records": repr(error)}
    return {
        f"{r['kind']} {r.get('run', '')} {r['step']} {r.get('event', '')}".strip(): r.get("loss")
        for r in found
        if r["kind"] != "event"
    }


def _parameters(folder: Path) -> dict[str, Any]:
    """Step and the checksums of all arrays of the newest checkpoint, as written by the program that had them."""
    root = folder / "run" / "checkpoints"
    steps = (
        sorted(int(p.name) for p in root.iterdir() if p.name.isascii() and p.name.isdigit()) if root.is_dir() else []
    )
    if not steps:
        return {"step": None}
    text = (root / str(steps[-1]) / "meta" / "metadata").read_text(errors="replace")
    leaves = re.findall(r'"((?:params|state|ema)[^"]*)": \[\[[^\]]*\], "[a-z0-9]+", "([0-9a-f]{8})"', text)
    assert len(leaves) > 10, "the format of checkpoints has changed"
    return {"step": steps[-1], **dict(leaves)}


def _resumed(folder: Path, ended: Ended) -> dict[str, Any]:
    held = re.findall(r"^held out: (.*)$", ended.out, re.MULTILINE)
    return {"held out": held, **_parameters(folder), **losses(folder / "run" / "records.jsonl")}


def _evaluated(folder: Path, ended: Ended) -> dict[str, Any]:
    return json.loads(ended.out)


def _printed(folder: Path, ended: Ended) -> dict[str, Any]:
    return {"text": ended.out.replace(str(folder), "TRIAL")}


def _drawn(folder: Path, ended: Ended) -> dict[str, Any]:
    return {"picture": hashlib.sha256((folder / "curve.png").read_bytes()).hexdigest()}


def _fitted(folder: Path, ended: Ended) -> dict[str, Any]:
    fit = (folder / "study" / "fit.json").read_text().replace(str(folder), "TRIAL")
    return {"fit": hashlib.sha256(re.sub(r'"command": "[^"]*"', "", fit).encode()).hexdigest()}


def _studied(folder: Path, ended: Ended) -> dict[str, Any]:
    return {**_fitted(folder, ended), **losses(folder / "study" / "records.jsonl")}


PRETRAIN = ("experiments.pretrain", "--config={made}/run.py", "--config.workdir={trial}/run")
SCALING = ("experiments.scaling", "--config={made}/study.py", "--config.workdir={trial}/study", "--bootstrap=100")
READERS = [
    Reader("resume", PRETRAIN, {"half": "run"}, _resumed),
    Reader("resume finished", PRETRAIN, {"run": "run"}, _resumed),
    Reader("start", PRETRAIN, {}, _resumed),
    Reader("evaluate", ("experiments.evaluate", "--workdir={trial}/run", "--json"), {"run": "run"}, _evaluated),
    Reader(
        "generate",
        ("experiments.generate", "--workdir={trial}/run", "--prompt=the ", "--max-new-tokens=16"),
        {"run": "run"},
        _printed,
    ),
    Reader(
        "curves",
        ("experiments.curves", "--workdir={trial}/run", "--label=run", "--out={trial}/curve.png"),
        {"run": "run"},
        _drawn,
    ),
    Reader("fit", (*SCALING, "--stage=fit"), {"study": "study"}, _fitted),
    Reader("study", SCALING, {"study": "study"}, _studied),
    Reader("study half", SCALING, {"half study": "study"}, _studied),
    Reader("study start", SCALING, {}, _studied),
]
BY_NAME = {reader.name: reader for reader in READERS}


class Made(NamedTuple):
    """Where victims lie, and what readers give of them undamaged.

    Attributes:
      folder: `run`, `half`, `other` (another seed's), `study`, `half study`, `other study`, the caches
        `xdg` (of the runs), `study xdg`, `other xdg`.
      references: reader -> results that are right: first the usual one, then those of older checkpoints, which are
        right if a line says that the newest one was damaged.
      said: reader -> lines that it prints undamaged, digits left out.
      seconds: reader -> how long it takes.
    """

    folder: Path
    references: dict[str, list[dict[str, Any]]]
    said: dict[str, set[str]]
    seconds: dict[str, float]


def argv(reader: Reader, made: Path, trial: Path, *more: str) -> list[str]:
    """The command of a reader in a trial."""
    return [word.format(made=made, trial=trial) for word in reader.argv] + list(more)


def lines(ended: Ended, trial: Path) -> set[str]:
    """What was printed, without numbers and the trial's name."""
    text = (ended.out + "\n" + ended.err).replace(str(trial), "TRIAL")
    return {re.sub(r"[0-9][0-9.,e+-]*", "#", line) for line in text.splitlines() if line.strip()}


def copy(made: Path, reader: Reader, trial: Path) -> None:
    """Lays copies of what a reader needs into an empty folder."""
    for victim, name in [*reader.needs.items(), ("xdg" if reader.argv[0] != SCALING[0] else "study xdg", "xdg")]:
        shutil.copytree(made / victim, trial / name, symlinks=True)


def code_hash() -> str:
    """Of all that victims and references depend on."""
    files = [p for name in ("jaxformer", "experiments") for p in sorted((ROOT / name).rglob("*.py"))]
    return hashlib.blake2b(b"".join(p.read_bytes() for p in [*files, Path(__file__)]), digest_size=8).hexdigest()


def kept_or_made(folder: Path, say: Callable[[str], None]) -> Made:
    """The victims that lie in a folder, made anew if there are none or the code has changed since."""
    index = folder / "made.json"
    try:
        about = json.loads(index.read_text())
    except (OSError, ValueError):
        about = {}
    if about.get("code") != code_hash():
        if about or (folder.is_dir() and not any(folder.iterdir())):
            shutil.rmtree(folder)
        folder.mkdir(parents=True)  # refuses a folder that holds something else
        made = make(folder, say)
        said = {name: sorted(found) for name, found in made.said.items()}
        about = {"code": code_hash(), **made._asdict(), "folder": str(folder), "said": said}
        index.write_text(json.dumps(about))
    said = {name: set(found) for name, found in about["said"].items()}
    return Made(folder, about["references"], said, about["seconds"])


def make(folder: Path, say: Callable[[str], None]) -> Made:
    """Makes all victims and references in an empty folder: about 30 program runs."""
    dice = random.Random(0)
    words = ["the", "of", "a", "in", "to", "and", "is", "was", "he", "for", "it", "with", "as", "his", "on"]
    documents = [" ".join(dice.choice(words) for _ in range(dice.randint(20, 120))) for _ in range(100)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    (folder / "text2.txt").write_text("\n\n".join(reversed(documents)))
    (folder / "run.py").write_text(RUN.format(text=folder / "text.txt"))
    (folder / "study.py").write_text(STUDY.format())
    stage = folder / "stage"

    def run(name: str, *more: str) -> Ended:
        ended = Program(argv(BY_NAME[name], folder, stage, *more), stage).wait(300)
        assert ended.code == 0 and "Traceback" not in ended.err, (name, ended)
        return ended

    def keep(victim: str, name: str) -> None:
        (stage / name).rename(folder / victim)

    say("making runs, a study, caches")
    stage.mkdir()
    run("start", "--config.seed=1")
    keep("other", "run")
    run("start")
    shutil.copytree(stage / "run", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "12")
    records = folder / "half" / "records.jsonl"
    kept = [line for line in records.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= 8]
    records.write_text("".join(kept))
    for name in ("evaluate", "generate"):
        run(name)
    keep("run", "run")
    keep("xdg", "xdg")
    run("study start", "--config.seed=1")
    keep("other study", "study")
    run("study start")
    shutil.copytree(stage / "study", folder / "half study")
    for path in [*(folder / "half study").iterdir()]:
        if path.name not in ("manifest.json", "runs", "trunks"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted((folder / "half study" / "runs").iterdir())[1::2]:
        path.unlink()
    keep("study", "study")
    keep("study xdg", "xdg")
    run("start", f"--config.data.files={folder / 'text2.txt'}")
    keep("other xdg", "xdg")
    shutil.rmtree(stage)

    say("what the programs give of them")
    references: dict[str, list[dict[str, Any]]] = {}
    said: dict[str, set[str]] = {}
    seconds: dict[str, float] = {}
    for reader in READERS:
        references[reader.name] = []
        for gone in ((), ("12",), ("12", "8")) if reader.needs.get("run") else ((),):
            stage.mkdir()
            copy(folder, reader, stage)
            for step in gone:
                shutil.rmtree(stage / "run" / "checkpoints" / step)
            began = time.monotonic()
            ended = run(reader.name)
            seconds[reader.name] = time.monotonic() - began
            references[reader.name].append(reader.result(stage, ended))
            if not gone:
                said[reader.name] = lines(ended, stage)
                assert not re.sub(r"(?m)^(note:|reading|making|tokenising) .*\n", "", ended.err), (reader.name, ended)
            shutil.rmtree(stage)
    resumed, half = references["resume finished"][0], references["resume"][0]
    assert resumed["held out"] == half["held out"], "resumption is not exact"
    return Made(folder, references, said, seconds)

"""Runs in object stores: what their tests start, and the fixtures of a store, a proxy of it and runs on disk."""

import functools
import gzip
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from object_stores import Proxy, environment, in_this_process, server

from jaxformer import records
from jaxformer.storage.address import Address, place
from jaxformer.storage.json_checksum import parse
from jaxformer.training.checkpoint.layout import SEAL, list_steps

ROOT = Path(__file__).resolve().parents[2]
MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly"),  # which gcsfs does with small files
    pytest.mark.skipif(not all(map(importlib.util.find_spec, ("gcsfs", "s3fs", "moto"))), reason="the services extra"),
]
STEPS = 600  # of few milliseconds, so that a run can be killed several times on a fast machine, too
SMALL = [
    "--config.data.tokenizer=bytes", "--config.model.num_layers=1", "--config.model.width=48",
    "--config.model.context_length=32", "--config.model.dtype=float32", "--config.train.global_batch_size=8",
    f"--config.train.steps={STEPS}", "--config.execution.steps_per_dispatch=1", "--config.train.log_every_steps=5",
    "--config.train.eval_every_steps=200", "--config.train.eval_rows=24", "--config.optimizer.warmup_steps=5",
    "--config.checkpoint.save_every_steps=60",
]  # fmt: skip
SHORT = ["--config.train.steps=20", "--config.train.eval_every_steps=10", "--config.checkpoint.save_every_steps=10"]


@pytest.fixture(params=["gs", "s3"])
def store(request):
    """(scheme, port) of a store, which this process uses, too."""
    with server(request.param) as port, in_this_process(request.param, port):
        yield request.param, port


def texts() -> dict[str, bytes]:
    """Some of the standard library's sources: in three files, packed in as many ways."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = [(root / name).read_bytes() for name in ("argparse.py", "typing.py", "inspect.py", "tarfile.py", "ast.py")]
    lines = "".join(json.dumps({"text": part.decode()}) + "\n" for part in parts[3:])
    return {
        "a.txt.gz": gzip.compress(parts[0] + parts[1], mtime=0), "b.txt.xz": lzma.compress(parts[2]),
        "c.jsonl": lines.encode(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """A folder with the texts; and flags -> the result of an undisturbed run with them on it, made once."""
    folder = tmp_path_factory.mktemp("disk")
    (folder / "text").mkdir()
    for name, content in texts().items():
        (folder / "text" / name).write_bytes(content)
    runs = Runs(folder)

    @functools.cache
    def undisturbed(*flags: str) -> tuple:
        workdir = folder / f"run{len(list(folder.glob('run*')))}"
        runs.finish(workdir, folder / "text", *flags)
        return result(workdir)

    return folder, undisturbed


class Runs:
    """Starts `jaxformer pretrain` as a user would."""

    def __init__(self, folder: Path, *store):
        self.folder = folder
        self.environment = {
            **os.environ, **(environment(*store) if store else {}), "XDG_CACHE_HOME": str(folder / "cache"),
            "JAX_NUM_CPU_DEVICES": "1",
        }  # fmt: skip
        self.log = folder / "log"

    def start(self, workdir: object, text: object, *more: str) -> subprocess.Popen:
        return self.begin(workdir, *more, f"--config.data.files={text}/*")

    def begin(self, workdir: object, *flags: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "jaxformer", "pretrain", "gpt_tiny", *SMALL, *flags]
        command.append(f"--config.workdir={workdir}")
        with open(self.log, "a") as log:
            return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def train(self, workdir: object, *flags: str) -> None:
        assert self.begin(workdir, *flags).wait(timeout=400) == 0, self.said()

    def finish(self, workdir: object, text: object, *more: str) -> None:
        self.train(workdir, *more, f"--config.data.files={text}/*")

    def said(self) -> str:
        return self.log.read_text()[-3000:]


def result(workdir: object) -> tuple:
    """The checksums of the last checkpoint's arrays, which checkpoints there are, and the losses on record."""
    folder = place(str(workdir))
    steps = list_steps(folder / "checkpoints")
    path = folder / "checkpoints" / str(steps[-1]) / SEAL
    content = path.read_bytes(2**20) if isinstance(path, Address) else path.read_bytes()
    found = records.latest(records.load(folder / "records.jsonl"))
    return parse(content)["leaves"], steps, [(r["kind"], r["step"], r["loss"]) for r in found if "loss" in r]


def in_store(folder: str) -> str:
    """The address of a folder, once the texts are in it."""
    for name, content in texts().items():
        place(f"{folder}/{name}").write_atomically(content)
    return folder


@pytest.fixture
def proxy(store):
    """A proxy of the store, which the runs use."""
    made = Proxy(store[1])
    yield made
    made.close()

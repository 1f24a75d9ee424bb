"""Whole runs in object stores, against servers on this machine that speak the real protocols (extra `services`)."""

import functools
import gzip
import importlib.util
import json
import lzma
import os
import random
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from kills import kill_often
from object_stores import Proxy, environment, in_this_process, server, wait_for
from test_scaling_study import CONFIG as STUDY
from test_scaling_study import told

from jaxformer import records
from jaxformer.config import CheckpointConfig
from jaxformer.data.mixture import open_text
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runs.store_lock import StoreLock
from jaxformer.runs.texts import batches_of, held_out_of
from jaxformer.storage import object_store
from jaxformer.storage.address import Address, place
from jaxformer.storage.json_checksum import parse
from jaxformer.training.checkpoint.layout import SEAL, list_steps
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.state import TrainState

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly"),  # which gcsfs does with small files
    pytest.mark.skipif(not all(map(importlib.util.find_spec, ("gcsfs", "s3fs", "moto"))), reason="the services extra"),
]
STEPS = 240
SMALL = [
    "--config.data.tokenizer=bytes", "--config.model.num_layers=2", "--config.model.width=96",
    "--config.model.context_length=128", "--config.train.global_batch_size=8",
    f"--config.train.steps={STEPS}", "--config.execution.steps_per_dispatch=5", "--config.train.log_every_steps=5",
    "--config.train.eval_every_steps=80", "--config.train.eval_rows=24", "--config.optimizer.warmup_steps=5",
    "--config.checkpoint.save_every_steps=30",
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


def test_kills_change_nothing_in_a_store(store, on_disk, tmp_path):
    """kill -9 at four random moments, text and run in the store: the same bits and records as undisturbed on disk."""
    scheme, port = store
    runs, text, workdir = Runs(tmp_path, scheme, port), in_store(f"{scheme}://bucket/text"), f"{scheme}://bucket/killed"

    def reached() -> int:
        path = place(workdir) / "records.jsonl"
        return max((r["step"] for r in records.load(path)), default=0) if path.exists() else 0

    kill_often(lambda: runs.start(workdir, text), reached, random.Random(scheme), kills=4, ahead=15)
    runs.finish(workdir, text)
    assert result(workdir) == on_disk[1]()
    assert not list((tmp_path / "cache" / "jaxformer" / "staging").glob("*/content/*"))


@pytest.fixture
def proxy(store):
    """A proxy of the store, which the runs use."""
    made = Proxy(store[1])
    yield made
    made.close()


def test_a_slow_store_that_drops_connections_changes_nothing(store, proxy, on_disk, tmp_path):
    """Every answer 20 ms late, some of the connections dropped in the middle: the bits of a run on disk."""
    proxy.delay, proxy.drop = 0.02, 0.02
    runs, workdir = Runs(tmp_path, store[0], proxy.port), f"{store[0]}://bucket/run"
    runs.finish(workdir, in_store(f"{store[0]}://bucket/text"), *SHORT)
    assert result(workdir) == on_disk[1](*SHORT)
    assert len(proxy.requests) > 100


def test_a_store_that_goes_away(store, proxy, on_disk, tmp_path):
    """One line in bounded time, exit code 2, the older checkpoints intact; then the run goes on to the same bits."""
    runs, workdir = Runs(tmp_path, store[0], proxy.port), f"{store[0]}://bucket/run"
    runs.environment["JAXFORMER_STORE_PATIENCE"] = "3"
    text = on_disk[0] / "text"
    process, checkpoints = runs.start(workdir, text), place(workdir) / "checkpoints"
    wait_for(lambda: process.poll() is not None or bool(list_steps(checkpoints)), 120)
    proxy.down, since = True, time.monotonic()
    assert process.wait(timeout=240) == 2, runs.said()
    print(f"{store[0]}: ended {time.monotonic() - since:.0f} s after its store")
    errors = [line for line in runs.log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"{workdir}/" in errors[0], errors
    assert "Traceback" not in runs.log.read_text() and "S3CRET" not in runs.log.read_text()
    before = list_steps(checkpoints)
    assert before and before[-1] < STEPS
    proxy.down = False
    runs.finish(workdir, text)
    assert f"going on from step {before[-1]}" in runs.log.read_text()
    assert result(workdir) == on_disk[1]()


def test_everything_else_that_reads_and_writes_runs(store, tmp_path):
    """evaluate, generate, curves, a tokenizer file and init_from, all in a store."""
    scheme, port = store
    runs = Runs(tmp_path, scheme, port)
    text, run = in_store(f"{scheme}://bucket/text"), f"{scheme}://bucket/run"
    runs.finish(run, text, *SHORT)

    def say(*words: str) -> str:
        command = [sys.executable, "-m", "jaxformer", *words]
        found = subprocess.run(command, cwd=ROOT, env=runs.environment, capture_output=True, text=True, timeout=400)
        assert found.returncode == 0, found.stderr[-3000:]
        assert not found.stderr
        return found.stdout

    final = records.load(place(run) / "records.jsonl", "final")[-1]
    assert f"loss {final['loss']:.4f}" in say("evaluate", f"--workdir={run}")
    assert say("generate", f"--workdir={run}", "--prompt=def", "--max-new-tokens=8").startswith("def")
    say("curves", f"--workdir={run}", f"--out={tmp_path / 'curve.png'}")
    for name in ("manifest.json", "records.jsonl"):
        assert b"S3CRET" not in (place(run) / name).read_bytes(2**20)  # the key in the environment
    runs.finish(f"{run}2", text, *SHORT, f"--config.init_from={run}")
    runs.finish(f"{run}3", text, *SHORT, f"--config.data.tokenizer_file={run}/tokenizer.json")
    assert "init_from: " in runs.log.read_text()


def tokenize(runs: Runs, text: object, out: object) -> subprocess.Popen:
    flags = [f"--config.data.files={text}/*", "--config.data.tokenizer=bytes", f"--out={out}", "--shards=6"]
    command = [sys.executable, "-m", "jaxformer", "tokenize", *flags]
    with open(runs.log, "a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=runs.environment, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def data_on_disk(on_disk):
    """The folder on disk, with token shards of the texts, another project's tokens and a saved dataset in it."""
    datasets, folder, runs = pytest.importorskip("datasets"), on_disk[0], Runs(on_disk[0])
    assert tokenize(runs, folder / "text", folder / "tokens").wait(timeout=200) == 0, runs.said()
    text = (folder / "text" / "c.jsonl").read_text()
    rows = [text[begin : begin + 4000] for begin in range(0, len(text), 4000)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(folder / "set")
    ids = np.concatenate([[0, *(np.frombuffer(row.encode(), np.uint8) % 200 + 6)] for row in rows]).astype("<u2")
    ids.tofile(folder / "all.bin")
    return folder


def rows_of(cache: Path, *flags: str) -> list[np.ndarray]:
    """The first rows that a run with the flags would train on, and those that it would be measured on."""
    words = ["gpt_tiny", *SMALL, *SHORT, f"--config.data.cache_dir={cache}", *flags]
    config = parse_config(parser("", "pretrain"), words).config
    corpus = open_text(config.data, progress=False)
    config = fit_vocabulary(config, corpus.tokenizer)
    found = [batches_of(config, corpus)[step] for step in range(3)]
    return [each.tokens for each in [*found, *held_out_of(config, corpus)[""].batches]]


def test_tokens_and_saved_datasets_in_a_store(store, data_on_disk, tmp_path):
    """Shards that `jaxformer tokenize` put there while it was killed are those of a disk, object for object as fsspec
    reads them; a run on them is that on a disk, bit for bit, and so are the rows of another project's tokens and of a
    saved dataset."""
    scheme, port = store
    runs, there, disk = Runs(tmp_path, scheme, port), f"{scheme}://bucket/data", data_on_disk
    text = in_store(f"{there}/text")

    def written() -> int:
        return len([*(place(there) / "tokens").glob("train-*.json")])

    for wanted in (1, 3):
        process = tokenize(runs, text, f"{there}/tokens")
        while written() < wanted and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert tokenize(runs, text, f"{there}/tokens").wait(timeout=200) == 0, runs.said()
    files = object_store.system(f"{scheme}://bucket")
    for path in (disk / "tokens").glob("*.*"):
        if path.suffix not in (".json", ""):  # which name the text's address by a hash
            assert files.cat_file(f"bucket/data/tokens/{path.name}") == path.read_bytes()
    assert not list((tmp_path / "cache" / "jaxformer" / "staging").glob("*/content/*"))

    for path in [disk / "all.bin", *(disk / "set").iterdir()]:
        place(f"{there}/{path.relative_to(disk).as_posix()}").upload(path)
    tokenizer = f"--config.data.tokenizer_file={disk / 'tokens' / 'tokenizer.json'}"
    for kind, name, *more in [("tokens", "tokens"), ("tokens", "all.bin", tokenizer), ("hf_dir", "set")]:
        rows = [rows_of(tmp_path / "rows", f"--config.data.{kind}={base}/{name}", *more) for base in (disk, there)]
        assert len(rows[0]) > 3
        for one, other in zip(*rows, strict=True):
            np.testing.assert_array_equal(one, other)
    runs.train(tmp_path / "run", *SHORT, f"--config.data.tokens={there}/tokens")
    if not (disk / "of_tokens").exists():
        runs.train(disk / "of_tokens", *SHORT, f"--config.data.tokens={disk}/tokens")
    assert result(tmp_path / "run") == result(disk / "of_tokens")


def study(runs: Runs, where: object) -> subprocess.Popen:
    config = runs.folder / "study.py"
    config.write_text(STUDY)
    command = [sys.executable, "-m", "jaxformer", "scaling", f"--config={config}", "--bootstrap=100"]
    with open(runs.log, "a") as log:
        return subprocess.Popen(
            [*command, f"--config.workdir={where}"], cwd=ROOT, env=runs.environment, stdout=log, stderr=log
        )


@pytest.fixture(scope="module")
def study_on_disk(tmp_path_factory):
    """The records of the study on disk."""
    runs = Runs(tmp_path_factory.mktemp("study"))
    assert study(runs, runs.folder / "study").wait(timeout=500) == 0, runs.said()
    return told(runs.folder / "study")


def test_a_killed_study_in_a_store(store, study_on_disk, tmp_path):
    """A scaling study, killed once its second run is recorded: the records of one on disk, and a report beside them."""
    runs, workdir = Runs(tmp_path, *store), f"{store[0]}://bucket/study"
    killed = study(runs, workdir)
    folder = place(workdir)
    wait_for(lambda: killed.poll() is not None or len(list((folder / "runs").iterdir())) > 1, 200)
    killed.kill()
    assert killed.wait() == -9, runs.said()
    assert study(runs, workdir).wait(timeout=500) == 0, runs.said()
    assert told(folder) == study_on_disk
    assert (folder / "report.html").is_file() and list((folder / "figures").iterdir())


def test_locks_name_the_version_that_they_replace(store, proxy):
    """S3's server refuses the second; GCS's does not know preconditions, so what is sent is looked at."""
    with in_this_process(store[0], proxy.port):
        path = f"{store[0]}://bucket/run/.lock"
        object_store.put_if(path, b"first", None)
        version = object_store.version_of(object_store.request("info", path))
        object_store.put_if(path, b"second", version)
        assert object_store.request("cat_file", path) == b"second"
        if store[0] == "gs":
            posts = [line for line in proxy.requests if line.startswith("POST ") and "upload" in line]
            assert all(f"ifGenerationMatch={number}" in line for number, line in zip((0, version), posts, strict=True))
            return
        with pytest.raises(FileExistsError):
            object_store.put_if(path, b"third", version)
        with pytest.raises(FileExistsError):
            object_store.put_if(path, b"third", None)
        assert object_store.request("cat_file", path) == b"second"


def test_what_a_checkpoint_costs(store, proxy):
    """Requests of one save, in a run that keeps two: printed, and bounded for the page about stores."""
    tree = {f"w{i}": np.ones((8, 8), np.float32) for i in range(4)}
    with in_this_process(store[0], proxy.port):
        folder = place(f"{store[0]}://bucket/run/checkpoints")
        state = TrainState(*[None] * len(TrainState._fields))._replace(
            params=tree, step=np.int32(1), bad_steps=np.int32(0)
        )
        saves = Checkpoints(folder, CheckpointConfig(keep=2))
        for step in (1, 2, 3, 4):
            before = len(proxy.requests)
            saves.save(step, state)
            saves.wait()
        saves.close()
        sent = [line.split(" ")[0] for line in proxy.requests[before:]]
        objects = len(list((folder / "4").objects()))
        print(store[0], objects, "objects:", {name: sent.count(name) for name in sorted(set(sent))})
        assert len(sent) <= 8 * objects


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_start_at_once_one_gets_the_lock(store, stale):
    """In S3, whose server here knows preconditions; also where all of them find a lock whose process has ended."""
    if store[0] == "gs":
        pytest.skip("the emulator of GCS knows no preconditions")
    workdir = Address("s3://bucket/run")
    if stale:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        with StoreLock(workdir):
            about = parse((workdir / ".lock").read_bytes(9999))
        (workdir / ".lock").write_atomically(json.dumps({**about, "token": "another", "process": ended.pid}))
    won, lost, ready = [], [], threading.Barrier(8)

    def start() -> None:
        ready.wait()
        try:
            won.append(StoreLock(workdir).__enter__())
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7
    assert all("is in use by process" in line for line in lost), lost
    won[0].__exit__(None, None, None)
    assert not (workdir / ".lock").exists()


def test_a_run_that_moves_between_disk_and_store(store, on_disk, tmp_path):
    """Killed on disk, gone on with in the store, killed there, finished on disk, each time a copy of the folder."""
    runs, workdir, text = Runs(tmp_path, *store), place(f"{store[0]}://bucket/run"), on_disk[0] / "text"

    def killed_after(where: Path, steps: int) -> None:
        process = runs.start(where, text)
        wait_for(lambda: process.poll() is not None or max(list_steps(where / "checkpoints"), default=0) > steps, 200)
        process.kill()
        assert process.wait() == -9, runs.said()

    first, last = tmp_path / "first", tmp_path / "last"
    killed_after(first, 30)
    for path in filter(Path.is_file, first.rglob("*")):
        (workdir / path.relative_to(first).as_posix()).upload(path)
    killed_after(workdir, 90)
    for each, size in workdir.objects().items():
        each.download(last / str(each).removeprefix(f"{workdir}/"), size)
    runs.finish(last, text)
    assert result(last) == on_disk[1]()

"""What TensorBoard, Weights & Biases and MLflow hold of a run is what its records hold: their files, read back."""

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxformer import records
from jaxformer.tracking.tracker import TrackedRun, named_fields

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboardX"}
# A run that is interrupted after six steps and goes on to twelve, each start in a process of its own.
PROGRAM = """
import json, sys
from pathlib import Path
import jax
from jaxformer.parallel.mesh import make_mesh
from jaxformer.training import loop
from tests.training.toy import batch_sources, make_config, make_model

workdir, tracker, stop = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = make_config(tracking={"trackers": tracker, "run_name": "n"}, checkpoint={"save_every_steps": 3})
if stop:
    loop._Run.asked = lambda self, step, saved: (step >= stop, False)
mesh = make_mesh(config.mesh, jax.devices()[:1])
batches, held_out = batch_sources(config, mesh)
loop.train(make_model(), batches, held_out, config, workdir=workdir, mesh=mesh, fingerprint="f", bar=False,
           final_fields={"compressed_bits_per_byte": {"gzip -9": 2.5}, "note": None})
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of one run with all trackers that are installed, and its records, `crc` left out."""
    workdir = tmp_path_factory.mktemp("run")
    trackers = [name for name, package in PACKAGES.items() if find_spec(package)]
    said = ""
    for stop in (6, 0):
        words = [sys.executable, "-c", PROGRAM, str(workdir), ",".join(trackers), str(stop)]
        own = os.environ | {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline"}
        done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        said += done.stdout
    assert "stopped tracking" not in said and "stopped at step 6" in said
    found = [{k: v for k, v in each.items() if k != "crc"} for each in records.load(workdir / "records.jsonl")]
    assert {each["kind"] for each in found} == {"event", "train", "eval", "final"}
    return workdir, found


def wandb_entries(path: Path) -> Iterator[bytes]:
    """The entries of a .wandb file, which is a log as LevelDB writes it after seven bytes of its own."""
    content = path.read_bytes()
    place, whole = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield whole
            whole = b""


@pytest.mark.slow
def test_the_offline_files_of_weights_and_biases_hold_every_field(tracked):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    workdir, wanted = tracked
    files = sorted((workdir / "wandb").glob("offline-run-*/*.wandb"))
    rows, ids, config = [], set(), {}
    for file in files:
        for entry in wandb_entries(file):
            record = Record.FromString(entry)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                assert (record.run.project, record.run.display_name) == ("jaxformer", "n")
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    assert len(files) == 2 and len(ids) == 1  # two starts of one run
    assert config["train"]["steps"] == 12
    assert len(rows) == len(wanted)
    for row, record in zip(rows, wanted, strict=True):
        got = {name: value for name, value in row.items() if not name.startswith("_")}
        assert got == {"step": record["step"], **named_fields(record)}


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_service_that_dies_or_hangs_ends_no_run(tmp_path, signal):
    """Weights & Biases writes by a process of its own, for which it would wait for ever when the run's ends."""
    pytest.importorskip("wandb")
    kill = """
import os, signal, threading, time
def kill():
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while time.sleep(0.2) or not (workdir / "records.jsonl").exists():
        pass
    for child in path.read_text().split():
        if "wandb-core" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGNAL)
            print("killed", flush=True)
threading.Thread(target=kill, daemon=True).start()
"""
    slow = PROGRAM.replace("batch_sources(config, mesh)", "batch_sources(config, mesh, delay=0.2)")
    kill = f"from jaxformer.tracking import trackers; trackers.CLOSE_SECONDS = 3.0\n{kill}"
    program = slow.replace("mesh = make_mesh", f"{kill}\nmesh = make_mesh").replace("SIGNAL", signal)
    program += """
config = make_config(tracking={"trackers": "wandb"})  # the next run of this process is tracked again
(workdir / "next").mkdir()
loop.train(make_model(), batches, held_out, config, workdir=workdir / "next", mesh=mesh, fingerprint="g", bar=False)
"""
    words = [sys.executable, "-c", program, str(tmp_path), "wandb", "0"]
    own = os.environ | {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline"}
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "killed" in done.stdout and done.stdout.count("note: wandb stopped tracking (") == 1
    assert records.load(tmp_path / "records.jsonl")[-1]["kind"] == "final"
    (file,) = (tmp_path / "next" / "wandb").glob("offline-run-*/*.wandb")
    assert b"final/loss" in file.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how MLflow calls SQLAlchemy
def test_mlflow_holds_every_field(tracked):
    mlflow = pytest.importorskip("mlflow")
    workdir, wanted = tracked
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workdir / 'mlflow.db'}")
    where = client.get_experiment_by_name("jaxformer").experiment_id
    (found,) = client.search_runs([where])
    assert found.info.status == "FINISHED" and found.info.run_name == "n"
    assert found.data.params["train/steps"] == "12"
    for record in wanted:
        for name, value in named_fields(record).items():
            if isinstance(value, int | float):
                points = {(each.step, each.value) for each in client.get_metric_history(found.info.run_id, name)}
                assert (record["step"], float(value)) in points, name
            else:
                name = f"{name}/{record['event']}/{record['step']}" if record["kind"] == "event" else name
                assert found.data.tags[name] == str(value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_begins_anew_in_another_database(tmp_path):
    """As where a run in a store goes on on another machine."""
    pytest.importorskip("mlflow")
    from jaxformer.tracking.mlflow import Mlflow

    told = TrackedRun(tmp_path, "n", "p", {"seed": 0}, 6, "0123456789abcdef0123456789abcdef")
    tracker = Mlflow(told)
    assert tracker.id not in (None, told.id) and Mlflow(told._replace(id=tracker.id)).id == tracker.id
    tracker.close("finished")


@pytest.mark.slow
def test_tensorboard_holds_every_number(tracked):
    from tensorboardX.proto.event_pb2 import Event

    workdir, wanted = tracked
    found, purged = set(), []
    for file in sorted((workdir / "tensorboard").glob("events.*")):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (length,) = struct.unpack_from("<Q", content, place)
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += 16 + length
            found |= {(value.tag, event.step, value.simple_value) for value in event.summary.value}
            purged += [event.step] if event.HasField("session_log") else []
    assert 7 in purged  # what a start wrote after its last checkpoint is hidden
    for record in wanted:
        for name, value in named_fields(record).items():
            if isinstance(value, int | float) and math.isfinite(value):
                as_float32 = struct.unpack("<f", struct.pack("<f", value))[0]
                assert (name.replace(" ", "_"), record["step"], as_float32) in found, name

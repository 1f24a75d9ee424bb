"""Laws of tracking: every record arrives, the run never waits or ends for a tracker, going on finds the same run."""

import json
import sys
import threading
import time
import types
from pathlib import Path
from typing import ClassVar

import jax
import pytest

from jaxformer import records
from jaxformer.config import Config, TrackingConfig, from_mapping, registry, to_dict
from jaxformer.errors import ConfigError, ProgramError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.storage.address import place
from jaxformer.tracking import trackers
from jaxformer.tracking.tracker import TrackedRun, TrackerKind, named_fields
from jaxformer.tracking.trackers import TRACKERS, Trackers
from jaxformer.tracking.wandb import Wandb
from jaxformer.training.loop import train
from tests.training.toy import batch_sources, make_config, make_model

RECORDS = [
    {"kind": "event", "step": 0, "event": "started"},
    {"kind": "train", "step": 2, "loss": 3.5, "spent": {"total": 1.0}},
    {"kind": "eval", "step": 2, "loss": 3.0, "split": "validation"},
    {"kind": "final", "step": 2, "loss": 3.0, "split": "validation", "status": "finished"},
]


class Kept:
    """A tracker that keeps what it gets; each start of a run adds to `all`."""

    all: ClassVar[list] = []

    def __init__(self, run):
        self.run, self.got, self.ended, self.id = run, [], None, run.id or f"id{len(Kept.all)}"
        Kept.all.append(self)

    def log(self, record):
        self.got.append(record)

    def close(self, status):
        self.ended = status


class Failing(Kept):
    """One that fails at the second record."""

    def log(self, record):
        super().log(record)
        if len(self.got) == 2:
            raise OSError(28, "No space left on device")


class Stuck(Kept):
    """One whose server never answers."""

    abandoned = 0

    def abandon(self):
        Stuck.abandoned += 1

    def log(self, record):
        threading.Event().wait(30)


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """The three above as trackers of a config file."""
    monkeypatch.setattr(Kept, "all", [])
    for name, cls in {"kept": Kept, "failing": Failing, "stuck": Stuck}.items():
        monkeypatch.setitem(registry.TRACKERS, name, None)
        monkeypatch.setitem(TRACKERS, name, TrackerKind(cls))


def config(*names: str, **fields) -> Config:
    return from_mapping({"tracking": {"trackers": names, **fields}})


def track(workdir: Path, given: Config, found=RECORDS, step=0, fingerprint="f") -> list[str]:
    said: list[str] = []
    with_all = Trackers(given, workdir, step, fingerprint, said.append)
    for record in found:
        with_all.log(record)
    with_all.close()
    return said


def test_every_record_arrives_in_order_and_the_end_is_told(tmp_path):
    assert track(tmp_path, config("kept")) == []
    (kept,) = Kept.all
    assert kept.got == RECORDS and kept.ended == "finished"
    assert kept.run.name == tmp_path.name and kept.run.project == "jaxformer" and kept.run.step == 0
    track(tmp_path, config("kept", project="p", run_name="n"), [*RECORDS[:3], {**RECORDS[0], "event": "interrupted"}])
    assert (Kept.all[1].ended, Kept.all[1].run.project, Kept.all[1].run.name) == ("interrupted", "p", "n")
    track(tmp_path, config("kept"), RECORDS[:2])
    assert Kept.all[2].ended == "failed"


def test_going_on_finds_the_same_tracked_run(tmp_path):
    for step in (0, 4):
        track(tmp_path, config("kept"), step=step)
    first, second = Kept.all
    assert (first.run.id, first.id) == (None, "id0") and (second.run.id, second.id) == ("id0", "id0")
    track(tmp_path, config("kept"), fingerprint="another run in this folder")
    assert Kept.all[2].run.id is None
    (tmp_path / trackers.IDS).write_text("not JSON")
    track(tmp_path, config("kept"))
    assert Kept.all[3].run.id is None


@pytest.mark.slow
def test_of_a_run_in_a_store_files_of_trackers_and_traces_are_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workdir = place(f"memory://bucket/{tmp_path.name}/run")
    given = make_config(tracking={"trackers": "kept"}, train={"profile_steps": (1, 1)})
    mesh = make_mesh(given.mesh, jax.devices()[:1])
    for _ in range(2):
        train(make_model(), *batch_sources(given, mesh), given, workdir=workdir, mesh=mesh, fingerprint="f", bar=False)
    here = Path("runs/bucket") / tmp_path.name / "run"
    assert [(each.run.workdir, each.run.name) for each in Kept.all] == [(here, "run")] * 2
    assert Kept.all[1].run.id == Kept.all[0].id and here.is_dir()
    assert len(list(here.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(tmp_path):
    said = track(tmp_path, config("failing", "kept"))
    assert said == ["note: failing stopped tracking ([Errno 28] No space left on device); the run goes on, "
                    "records.jsonl has everything"]  # fmt: skip
    assert len(Kept.all[0].got) == 2 and Kept.all[1].got == RECORDS


def test_a_tracker_that_hangs_slows_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Stuck, "abandoned", 0)
    monkeypatch.setattr(trackers, "MOST_WAITING", 100)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    began = time.monotonic()
    said = track(tmp_path, config("stuck"), RECORDS)
    assert len(said) == 1 and "has not taken all records after 0.2 s" in said[0]
    said = track(tmp_path, config("stuck"), RECORDS * 1000)
    assert len(said) == 1 and "100 records wait for it" in said[0]
    assert time.monotonic() - began < 5 and Stuck.abandoned == 2


@pytest.mark.parametrize("method", ["log", "abandon"])
@pytest.mark.parametrize("error", [SystemExit(-9), ConnectionError("closed")])
def test_a_tracker_that_leaves_ends_no_run(method, error, tmp_path, monkeypatch):
    """wandb's teardown calls sys.exit with the code of its process, -9 after it was killed: the run ended with 247."""

    def leave(*arguments):
        raise error

    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Stuck, method, leave)
    (line,) = track(tmp_path, config("stuck", "kept"))
    assert line.startswith("note: stuck stopped tracking (") and Kept.all[1].got == RECORDS


def test_credentials_are_not_sent(tmp_path):
    data = {"source": "tfds", "tfds_name": "books?access_token=hunter2"}
    track(tmp_path, from_mapping({"tracking": {"trackers": "kept"}, "data": data}))
    told = json.dumps(Kept.all[0].run.config)
    assert "hunter2" not in told and "books?access_token=***" in told


def test_other_processes_do_not_track(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    track(tmp_path, config("kept"))
    assert Kept.all == [] and list(tmp_path.iterdir()) == []


def test_one_that_cannot_start_is_refused_and_the_others_are_ended(tmp_path, monkeypatch):
    def refuse(run):
        raise RuntimeError("no\nkey for s3://me:secret@host")

    monkeypatch.setitem(registry.TRACKERS, "kept2", None)
    monkeypatch.setitem(TRACKERS, "kept2", TrackerKind(refuse))
    with pytest.raises(ConfigError) as error:
        track(tmp_path, config("kept", "kept2"))
    line = "config.tracking.trackers: kept2 cannot start (no key for s3://***@host)"
    assert str(error.value) == line and Kept.all[0].ended == "failed"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_extra_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, TRACKERS[name].package, None)
    line = rf"^config\.tracking\.trackers: {name} needs the {name} extra: pip install 'jaxformer\[{name}\]'$"
    with pytest.raises(ConfigError, match=line):
        trackers.check_installed([name])
    with pytest.raises(ConfigError, match=line):
        track(tmp_path, config(name))
    assert list(tmp_path.iterdir()) == []


def test_the_switch_of_the_version_before():
    """`tensorboard` was a field of the config: in files, on command lines and in manifests."""
    board = TrackingConfig(trackers=("tensorboard",))
    assert from_mapping({"tensorboard": True}).tracking == from_mapping({}, {"tensorboard": "true"}).tracking == board
    assert from_mapping({"tensorboard": False}) == from_mapping({}, {"tensorboard": "false"}) == Config()
    both = {"tensorboard": True, "tracking": {"trackers": "wandb"}}
    assert from_mapping(both).tracking.trackers == ("tensorboard", "wandb")
    assert from_mapping(both, {"tensorboard": "no"}).tracking.trackers == ("wandb",)
    assert from_mapping({}, {"tracking.trackers": "wandb", "tensorboard": "1"}) == from_mapping(both)
    assert from_mapping({**to_dict(Config()), "tensorboard": True}).tracking == board
    with pytest.raises(ConfigError, match=r"^config.tensorboard: 3 is not true or false$"):
        from_mapping({"tensorboard": 3})
    with pytest.raises(ConfigError, match=r"^config.tensorboard: 'x' is not true or false$"):
        from_mapping({}, {"tensorboard": "x"})


def test_names_of_fields_tell_where_they_are_from():
    assert named_fields(RECORDS[1]) == {"train/loss": 3.5, "train/spent/total": 1.0}
    assert named_fields(RECORDS[2]) == {"validation/loss": 3.0, "validation/split": "validation"}
    assert named_fields(RECORDS[0]) == {"event/event": "started"}


@pytest.mark.slow
def test_records_are_those_of_a_run(tmp_path):
    """The loop sends its trackers what it writes."""
    given = make_config(tracking={"trackers": "kept"}, train={"steps": 6})
    mesh = make_mesh(given.mesh, jax.devices()[:1])
    train(make_model(), *batch_sources(given, mesh), given, workdir=tmp_path, mesh=mesh, log=lambda _: None, bar=False)
    wrote = [{k: v for k, v in each.items() if k != "crc"} for each in records.load(tmp_path / "records.jsonl")]
    assert [each["kind"] for each in wrote] == ["event", "train", "train", "eval", "final"] and Kept.all[0].got == wrote


def test_weights_and_biases_where_nobody_is_logged_in(monkeypatch, tmp_path):
    class UsageError(Exception):
        pass

    def init(**_):
        raise UsageError("No API key configured. Use `wandb login` to log in.")

    errors, settings = types.SimpleNamespace(UsageError=UsageError), lambda **_: None
    module = types.SimpleNamespace(errors=errors, init=init, Settings=settings)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ProgramError, match=r"wandb login` to log in\. Or set WANDB_MODE=offline, for files alone"):
        Wandb(TrackedRun(tmp_path, "name", "project", {}, 0, None))

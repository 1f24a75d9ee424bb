"""Every bad input ends in one line, exit code 2, and nothing written over. The lines stand in bad_input.md."""

import errno
import itertools
import re
import shutil
from pathlib import Path

import pytest
from bad_input_cases import TINY, Place, expected, place, provoked

__all__ = ["place"]


def write(place: Place, name: str, content: bytes) -> str:
    (place.folder / name).write_bytes(content)
    return f"--config.data.files={place.folder / name}"


COORDINATOR = [
    "--config.distributed.coordinator_address=node1:8476", "--config.distributed.num_processes=2",
    "--config.distributed.process_id=0",
]  # fmt: skip
# case -> what provokes it. Those that take more than flags are functions below.
FLAGS = {
    "misspelt field": ["--config.model.num_layer=2"],
    "unknown field": ["--config.model.zzz=2"],
    "unknown section": ["--config.modle.width=2"],
    "unknown flag": ["--verbose"],
    "override without a value": ["--config.model.width"],
    "wrong type": ["--config.train.steps=many"],
    "wrong choice": ["--config.optimizer.name=sgd"],
    "out of range": ["--config.model.dropout=1.5"],
    "heads not dividing the width": ["--config.model.num_heads=3"],
    "key/value heads not dividing the heads": ["--config.model.num_heads=4", "--config.model.num_kv_heads=3"],
    "objective of the other family": ["--config.model.family=bert"],
    "mesh not matching the devices": ["--config.mesh.data=3"],
    "a context axis not cutting the rows": [
        "--config.mesh.data=1",
        "--config.mesh.context=8",
        "--config.model.context_length=24",
    ],
    "coordinator without the number of processes": ["--config.distributed.coordinator_address=node1:8476"],
    "coordinator without a port": [*COORDINATOR, "--config.distributed.coordinator_address=node1"],
    "process number beyond the processes": [*COORDINATOR, "--config.distributed.process_id=2"],
    "coordinator, but off": [*COORDINATOR, "--config.distributed.mode=off"],
    "on, but nobody to join": ["--config.distributed.mode=on"],
    "batch not dividing over the devices": ["--config.train.global_batch_size=12"],
    "micro-batches not dividing the batch": ["--config.execution.gradient_accumulation_steps=3"],
    "vocabulary smaller than the tokenizer's": ["--config.model.vocab_size=100"],
    "unknown TFDS name": ["--config.data.source=tfds", "--config.data.tfds_name=mnis"],
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(place, case):
    code, line = place.pretrain(*FLAGS[case])
    assert (code, line) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


def test_config_file(place):
    assert place.run("pretrain", "--config=configs/gpt_tny.py") == (2, expected()["no such config file"])
    place.monkeypatch.chdir(place.folder / "..")
    assert place.run("pretrain", "--config=no/c.py") == (2, expected()["config file of another folder"])


TEXTS = {
    "missing text file": None,
    "empty text file": b"",
    "undecodable text file": b"caf\xe9 " * 50,
    "corpus shorter than one row": b"short",
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts(place, case):
    content = TEXTS[case]
    flag = f"--config.data.files={place.folder / 'none.txt'}" if content is None else write(place, "bad.txt", content)
    assert place.pretrain(flag) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


def test_workdirs(place):
    (place.folder / "foreign").mkdir()
    (place.folder / "foreign" / "thesis.tex").write_text("mine")
    assert place.pretrain(workdir="foreign") == (2, expected()["foreign workdir"])
    assert [p.name for p in (place.folder / "foreign").iterdir()] == ["thesis.tex"]
    assert place.pretrain(workdir="text.txt/run") == (2, expected()["unwritable workdir"])
    for name in ("evaluate", "generate", "fill_mask"):
        extra = {"evaluate": [], "generate": ["--prompt=a"], "fill_mask": ["--text=[MASK]"]}[name]
        assert place.run(name, f"--workdir={place.folder / 'none'}", *extra) == (2, expected()["no run in the workdir"])


@pytest.mark.slow
def test_runs(place):
    """What needs a run that is there: another config, a long prompt, the wrong family, damaged checkpoints."""
    assert place.pretrain() == (0, "")
    before = sorted((p, p.read_bytes()) for p in (place.folder / "run").rglob("*") if p.is_file())
    assert place.pretrain("--config.model.width=32", "--config.seed=1") == (2, expected()["workdir of another config"])
    other = place.folder / "other.txt"
    other.write_text("All unhappy families are unhappy in their own way. " * 100)
    text = place.text.read_text()
    place.text.write_text(other.read_text())
    assert mask_hex(place.pretrain()) == (2, mask_hex((2, expected()["workdir trained on other text"]))[1])
    place.text.write_text(text)
    run = f"--workdir={place.folder / 'run'}"
    assert place.run("generate", run, f"--prompt={'x' * 40}") == (2, expected()["prompt longer than the context"])
    assert place.run("fill_mask", run, "--text=[MASK]") == (2, expected()["fill_mask on a GPT"])
    assert sorted((p, p.read_bytes()) for p in (place.folder / "run").rglob("*") if p.is_file()) == before

    steps = list((place.folder / "run" / "checkpoints").iterdir())
    assert steps
    for step in steps:
        shutil.rmtree(step / "params")
    assert place.pretrain() == (2, expected()["no valid checkpoint"])


def mask_hex(outcome: tuple[int, str]) -> tuple[int, str]:
    return outcome[0], re.sub(r"\b[0-9a-f]{16}\b", "HASH", outcome[1])


@pytest.mark.slow
def test_full_disk(place, monkeypatch):
    """A save that meets a full disk: one line, and the older checkpoint is as it was."""
    import orbax.checkpoint as ocp

    real, saves = ocp.CheckpointManager.save, itertools.count()

    def failing(self, *args, **kwargs):
        if next(saves):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", failing)
    assert place.pretrain("--config.checkpoint.save_every_steps=2") == (2, expected()["full disk while saving"])
    monkeypatch.undo()


PLANS = {
    "unknown topology": ["--topology=v5z:4x4"],
    "topology of another shape": ["--topology=v5e:4x4x4"],
    "libtpu missing": ["--topology=v5e:4x4"],
    "CUDA compiler missing": ["--topology=h100:4x8"],
    "a kernel of another topology": ["--topology=cpu:8", "--config.execution.attention=flash_gpu"],
    "mesh not matching the topology": ["--topology=cpu:8", "--config.mesh.data=3"],
    "plan without a topology": [],
}


@pytest.mark.parametrize("case", PLANS)
def test_plans(place, monkeypatch, case):
    from jaxformer.plan import topology

    if "missing" in case:
        monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr("jaxformer.runs.command_line.load", lambda source: {})
    code, line = place.run("plan", f"--config={place.config}", *TINY, *PLANS[case])
    assert (code, line) == (2, expected()[case])


@pytest.mark.slow
def test_plan_that_does_not_fit(place, monkeypatch):
    from jaxformer.plan import topology
    from jaxformer.runtime import hardware

    monkeypatch.setitem(topology.CHIPS, "cpu", hardware.Chip("cpu", "cpu", memory=1024.0))
    code, line = place.run("plan", f"--config={place.config}", *TINY, "--topology=cpu:8")
    line = re.sub(r"[\d.]+ [KM]iB(?! on each)", "SIZE", line)
    assert (code, line) == (2, expected()["plan that does not fit"])


def test_diff_of_nothing(place):
    assert place.run("plan", "--diff", str(place.folder / "none.json"), "b") == (
        2,
        expected()["diff of something else"],
    )


def test_what_counts_as_provoked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "test_bad_input_planted.py"
    file.write_text(
        """import pytest
# "in a comment"
UNUSED = {"in data no test takes": []}
def test_a(place):
    "in a docstring"
    assert place.run("x") == (2, expected()["in a test"])
@pytest.mark.parametrize("case", {"a parameter": [], "another": []})
def test_b(place, case):
    assert place.run("x") == (2, expected()[case])
@pytest.mark.skip
def test_c(place):
    assert place.run("x") == (2, expected()["in a test that never runs"])
def test_d(place):
    assert place.run("x") == (2, "in a test that asks the table for nothing")
"""
    )
    assert provoked(file) == {"x", "in a test", "a parameter", "another"}


def test_table_is_complete():
    """Every row of the table is asserted by a test in one of the files of bad input."""
    files = sorted(Path(__file__).parent.glob("test_bad_input*.py"))
    assert set(expected()) - set().union(*map(provoked, files)) == set()

"""The whole way, config to run: real text in, records and checkpoints out; meshes agree; kills change nothing."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from kills import kill_often
from quick_runs import one_device

from jaxformer import records
from jaxformer.config import MeshConfig, from_mapping
from jaxformer.data import languages, mixture
from jaxformer.models.flops import flops_per_token
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs import evaluation, messages, pretrain, texts
from jaxformer.runs.command_line import Parsed
from jaxformer.runtime.program import program
from jaxformer.storage import json_checksum
from jaxformer.training.checkpoint.manager import list_steps

ROOT = Path(__file__).parents[2]
TEXT = "\f".join(f"Document {i}: " + " ".join(str(i * j) for j in range(40)) for i in range(60))


def tiny(folder: Path, **sections):
    """A config small enough to train in a second, on a text written into `folder`."""
    (folder / "text.txt").write_text(TEXT)
    tree = {
        "workdir": str(folder / "run"),
        "compilation_cache": False,
        "model": {"num_layers": 2, "width": 32, "num_heads": 8, "context_length": 32, "positions": "rotary"},
        "data": {
            "files": (str(folder / "text.txt"),),
            "separator": "\f",
            "tokenizer": "bytes",
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"steps": 8, "batch_rows": 16, "steps_per_dispatch": 2, "eval_every_steps": 4, "log_every_steps": 1},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return from_mapping(tree)


def parsed(config):
    return Parsed(config, [], "config.py", {}, None)


def test_evaluations_on_the_way_use_rows_of_the_whole_text(tmp_path):
    """Its first rows alone may be easier or harder than the rest, and their standard error would not say so."""
    config = tiny(tmp_path, train={"eval_rows": 16}, data={"validation_fraction": 0.5})
    corpus = mixture.open_text(config.data, progress=False)
    config = pretrain.fit_vocabulary(config, corpus.tokenizer)
    (held_out,) = texts.held_out_of(config, corpus).values()
    whole, (sample,) = np.concatenate([batch.tokens for batch in held_out.batches]), held_out.sample
    count = -(-(corpus.validation.num_tokens - 1) // 32)
    assert count > 100
    np.testing.assert_array_equal(sample.tokens, whole[np.arange(16) * count // 16])
    assert (
        next(
            iter(texts.held_out_of(replace(config, train=replace(config.train, eval_rows=None)), corpus).values())
        ).sample
        is None
    )


def losses(workdir) -> list[float]:
    return [r["loss"] for r in records.latest(records.load(Path(workdir) / "records.jsonl", "train"))]


BERT = {
    "model": {"family": "bert", "token_types": 2, "next_sentence": True, "block": "post_norm", "context_length": 64},
    "data": {"objective": "masked", "pairs": True},
}


@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt", "bert")])
def test_a_run_learns_and_is_described(family, tmp_path, capsys, monkeypatch):
    """On eight devices and on one."""
    if family == "bert":
        one_device(monkeypatch)
    config = tiny(tmp_path, **(BERT if family == "bert" else {}))
    result = pretrain.pretrain(parsed(config))
    assert (result.status, result.step) == ("finished", 8)
    found = records.load(tmp_path / "run" / "records.jsonl")
    evals = [r for r in found if r["kind"] == "eval"]
    assert [r["step"] for r in evals] == [4, 8]
    assert evals[-1]["loss"] < np.log(256)
    final = found[-1]
    assert final["kind"] == "final" and final["flops"] > 0 and final["tokens"] == 8 * 16 * config.model.context_length
    model = replace(config.model, vocab_size=320)
    flops = flops_per_token(model, head_fraction=0.15 if family == "bert" else 1.0).training
    assert final["flops"] == pytest.approx(final["tokens"] * flops)
    out = capsys.readouterr().out
    assert "measure: " in out and "resume:" not in out  # there is nothing left to go on with
    # What to try next is text of this corpus.
    shown = re.search("--prompt=(.*)" if family == "gpt" else "--text=(.*)", out)
    assert shown and re.fullmatch(r"'Document \d+: 0'" if family == "gpt" else r"'Docume\[MASK\]t \d+:?'", shown[1])
    assert ("gzip -9" in out) == (family == "gpt")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["model"]["vocab_size"] == 320
    run = pretrain.open_run(tmp_path / "run")
    assert run.step == 8 and run.tokenizer.decode(run.tokenizer.encode("né")) == "né"
    # Measuring the checkpoint gives what the run measured.
    again = evaluation.evaluate(tmp_path / "run")
    np.testing.assert_allclose(again["loss"], final["loss"], rtol=1e-5)
    # A run on a GPU by its own kernel is used here by another that computes the same.
    manifest = json_checksum.verified(manifest)
    manifest["config"]["execution"]["attention"] = "cudnn"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(json_checksum.add_checksum(manifest)))
    assert pretrain.open_run(tmp_path / "run").step == 8
    assert evaluation.evaluate(tmp_path / "run")["loss"] == again["loss"]


@pytest.mark.parametrize(("family", "shown"), [("gpt", "def "), ("bert", "import [MASK]")])
def test_what_to_try_on_python_is_python(family, shown):
    tree = {"model": {"family": family}, "data": {"objective": "masked" if family == "bert" else "next_token"}}
    assert messages.something_to_try(from_mapping(tree), None) == shown


LANGUAGE = {
    "data": {"source": "markov", "files": (), "separator": None, "language_symbols": 16, "language_order": 1,
             "language_zipf": 0.5, "language_tokens": 20_000, "validation_fraction": 0.2},
    "train": {"steps": 60, "eval_every_steps": 60, "steps_per_dispatch": 10},
}  # fmt: skip


@pytest.mark.slow
def test_a_run_below_the_floor_of_its_language_fails_in_one_line(tmp_path, monkeypatch, capsys):
    """Honest rows end above it; rows in which every token is its own target end below it and fail the program."""
    one_device(monkeypatch)
    config = tiny(tmp_path, **LANGUAGE)
    floor = languages.floor(config.data, 32)

    class Leaking(mixture.Batches):
        def __getitem__(self, step):
            batch = super().__getitem__(step)
            return batch._replace(tokens=batch.targets)

    def run(name):
        with pytest.raises(SystemExit) as end:
            program(lambda: 0 if pretrain.pretrain(parsed(replace(config, workdir=str(tmp_path / name)))) else 1)
        final = records.load(tmp_path / name / "records.jsonl", "final")[0]
        assert (final["floor"], final["floor_stderr"]) == (floor.nats, 0.0)
        out, err = capsys.readouterr()
        assert f"floor: the best possible model loses {floor.nats:.4f} nats per token; this one loses " in out
        return end.value.code, final["loss"], err

    code, loss, err = run("honest")
    assert code == 0 and floor.nats < loss < np.log(16) and "floor" not in err
    plain = texts.eval_batches
    monkeypatch.setattr(mixture, "Batches", Leaking)
    monkeypatch.setattr(texts, "eval_batches", lambda *a, **k: [b._replace(tokens=b.targets) for b in plain(*a, **k)])
    code, loss, err = run("leaking")
    assert code == 2 and loss < floor.nats
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'leaking'}: held-out loss {loss:.4f}")
    assert sum("below the floor" in line for line in err.splitlines()) == 1


def test_a_host_brings_the_rows_that_its_devices_hold(tmp_path, monkeypatch):
    """Which need not be its share by number: where the tensor axis spans hosts, several bring the same rows."""
    given = []

    def train(model, batches, held_out, *args, **kwargs):
        given.append((batches[3].tokens, held_out[""].batches[0].tokens))
        return pretrain.loop.Result("interrupted", 0, None, None, 0.0)

    monkeypatch.setattr(pretrain.loop, "train", train)
    pretrain.pretrain(parsed(tiny(tmp_path)))
    monkeypatch.setattr(pretrain, "host_rows", lambda rows, mesh: np.array([1, 2, rows - 1]))
    pretrain.pretrain(parsed(tiny(tmp_path)))
    for whole, own in zip(*given, strict=True):
        assert len(whole) == 16
        np.testing.assert_array_equal(own, whole[[1, 2, 15]])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shapes"), [("gpt", [(8, 1, 1), (2, 2, 2)]), ("bert", [(1, 8, 1), (1, 1, 8)])])
def test_meshes_agree(family, shapes, tmp_path):
    """A whole run has one loss curve within float32 rounding; tests/test_meshes.py has more meshes, of steps alone."""
    sections, curves = BERT if family == "bert" else {}, {}
    sections = {**sections, "train": {"steps": 4, "eval_every_steps": 4}}
    for shape in shapes:
        name = "x".join(map(str, shape))
        config = replace(tiny(tmp_path, **sections), workdir=str(tmp_path / name), mesh=MeshConfig(*shape))
        pretrain.pretrain(parsed(config))
        curves[name] = losses(tmp_path / name)
    one = replace(tiny(tmp_path, **sections), workdir=str(tmp_path / "one"), mesh=MeshConfig(1, 1, 1))
    devices = jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "make_mesh", lambda mesh: make_mesh(mesh, devices[:1]))
        pretrain.pretrain(parsed(one))
    expected = losses(tmp_path / "one")
    assert len(expected) == 4
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, expected, rtol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_goes_on_only_with_its_own_config(tmp_path):
    config = tiny(tmp_path)
    pretrain.pretrain(parsed(config))
    steps = list_steps(tmp_path / "run" / "checkpoints")
    pretrain.pretrain(parsed(replace(config, mesh=MeshConfig(2, 4, 1))))  # where it runs may change
    assert list_steps(tmp_path / "run" / "checkpoints") == steps


SHORT = [
    "--config.data.max_train_bytes=400000", "--config.data.tokenizer=bytes", "--config.model.num_layers=1",
    "--config.model.width=48", "--config.model.context_length=32", "--config.model.dtype=float32",
    "--config.train.global_batch_size=8", "--config.train.steps=600", "--config.execution.steps_per_dispatch=1",
    "--config.train.log_every_steps=5", "--config.train.eval_every_steps=200", "--config.train.eval_rows=24",
    "--config.optimizer.warmup_steps=5", "--config.checkpoint.save_every_steps=40",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_tiny", "bert_tiny"])
def test_kills_change_nothing(name, tmp_path):
    """kill -9 at five random moments, started again each time: the last checkpoint equals an undisturbed run's."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_NUM_CPU_DEVICES": "1"}

    def start(workdir: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "experiments.pretrain", f"--config=configs/{name}.py", *SHORT]
        command.append(f"--config.workdir={tmp_path / workdir}")
        with open(tmp_path / f"{workdir}.log", "a") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def reached() -> int:
        path = tmp_path / "killed" / "records.jsonl"
        return max((r["step"] for r in records.load(path)), default=0) if path.exists() else 0

    assert start("undisturbed").wait() == 0, (tmp_path / "undisturbed.log").read_text()[-2000:]
    kill_often(lambda: start("killed"), reached, random.Random(name), kills=5, ahead=15)
    assert start("killed").wait() == 0, (tmp_path / "killed.log").read_text()[-2000:]
    last = Path("checkpoints") / "600" / "meta" / "metadata"
    kept = [leaves(tmp_path / workdir / last) for workdir in ("undisturbed", "killed")]
    assert kept[0] == kept[1]
    assert losses(tmp_path / "undisturbed") == losses(tmp_path / "killed")


def leaves(path: Path) -> dict:
    """Checksums of every array of a checkpoint, optimizer included."""
    return json.loads(path.read_text())["leaves"]

"""A sweep trains each run once, whatever stops it; its runs are those that a command line of their own would make."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_input_cases import TINY

from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.programs import sweep as sweep_program
from jaxformer.runs import grid, sweep_folder, sweeping
from jaxformer.runs.command_line import parse_config, parser

ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(tmp_path):
    """The command line of a tiny config."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat"], k=3000)))
    config = tmp_path / "config.py"
    config.write_text("def get_config():\n    return {'data': {}}\n")
    cache = f"--config.data.cache_dir={tmp_path / 'cache'}"
    return [str(config), f"--config.data.files={text}", cache, *TINY, "--config.compilation_cache=true"]


def runs_of(words, *axes, folder):
    parsed = parse_config(parser("", "sweep"), words)
    return grid.grid(parsed, [grid.read_axis(each) for each in axes], folder)


def sweep(words, *flags):
    command = [sys.executable, "-m", "jaxformer", "sweep", *words, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"})  # fmt: skip


def test_the_grid(words, tmp_path):
    axes = ("optimizer.weight_decay=0,1e-2", "model.positions=alibi,rotary", "seed=1..2")
    runs = runs_of(words, *axes, folder=tmp_path / "s")
    assert len(runs) == 8 and runs[0].name == "weight_decay=0,positions=alibi,seed=1"
    assert runs[-1].name == "weight_decay=0.01,positions=rotary,seed=2"
    for run in runs:
        config = run.parsed.config
        assert config.workdir == str(tmp_path / "s" / run.name)
        assert run.values == {"optimizer.weight_decay": config.optimizer.weight_decay, "seed": config.seed,
                              "model.positions": config.model.positions.kind}  # fmt: skip
        given = [f"--config.{name}={text}" for name, text in run.parsed.given.items()]
        assert parse_config(parser("", "pretrain"), [words[0], *given]).config == config


def test_names_tell_fields_apart_that_end_alike(words, tmp_path):
    axes = ("model.dropout=0,0.5", "model.attention.dropout=0,0.5", "data.separator='a/b','c d'")
    names = [run.name for run in runs_of(words, *axes, folder=tmp_path)]
    assert names[0].startswith("model.dropout=0,model.attention.dropout=0,separator=") and len(set(names)) == 8
    assert all("/" not in name and " " not in name for name in names)


def test_what_is_left_to_do_and_how_long_it_takes(words, tmp_path, monkeypatch):
    runs = runs_of(words, "seed=0..3", folder=tmp_path / "s")
    monkeypatch.setattr(sweeping, "pretrain", lambda parsed: (_ for _ in ()).throw(ConfigError("no\nroom")))
    lines: list[str] = []
    sweep_folder.write(tmp_path / "s", runs, {})
    assert sweeping.plan(runs, tmp_path / "s", lines.append) == runs
    assert lines[0].endswith("4 to do: 2,048 of 2,048 tokens") and lines[-1] == "time left: known after the first run"
    assert sweeping.run(runs, runs[:2], tmp_path / "s", lines.append)
    assert [end.status for end in sweep_folder.ends(tmp_path / "s")] == ["failed"] * 2 + ["not started"] * 2
    assert sweep_folder.failures(tmp_path / "s") == {"seed=0": "no room", "seed=1": "no room"}
    for run, loss in zip(runs[:3], (3.0, 3.1, None), strict=True):
        Path(run.parsed.config.workdir).mkdir()
        ended = {"kind": "event", "step": 2, "event": "diverged"} if loss is None else {
            "kind": "final", "step": 4, "tokens": 512, "loss": loss, "loss_stderr": 0.1, "params": 1,
            "params_non_embedding": 1, "flops": None, "wall_seconds": 6.0}  # fmt: skip
        records.append(f"{run.parsed.config.workdir}/records.jsonl", ended)
    lines.clear()
    assert sweeping.plan(runs, tmp_path / "s", lines.append) == runs[3:]
    assert lines[-1] == "time left: about 6 s, from 2 finished"


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_repeats_nothing(words, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    flags = ["--over=optimizer.learning_rate=0.001,1e30", "--over=seed=0..1", f"--workdir={folder}",
             "--config.optimizer.clip_norm=none", "--config.train.max_bad_steps=2",
             "--config.train.steps=12"]  # fmt: skip
    names = [f"learning_rate={rate},seed={seed}" for rate in ("0.001", "1e+30") for seed in (0, 1)]
    process = sweep(words, *flags)
    until = time.monotonic() + 120
    while not (folder / names[1] / "records.jsonl").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    first = (folder / names[0] / "records.jsonl").read_bytes()
    process = sweep(words, *flags)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert (folder / names[0] / "records.jsonl").read_bytes() == first
    assert "4 runs in" in said and "3 to do" in said
    assert [end.status for end in sweep_folder.ends(folder)] == ["finished"] * 2 + ["diverged"] * 2
    assert f"- {names[2]}: diverged at step" in said and "figures/loss.png" in said
    assert (folder / "sweep.md").read_text().startswith("# Sweep sweep\n\n| optimizer.learning_rate | runs | loss ")
    for given, told in (([*words, *flags], "0 to do"), (["--report-only", f"--workdir={folder}"], f"- {names[3]}: d")):
        monkeypatch.setattr(sys, "argv", ["sweep", *given])  # nothing is trained, so in this process
        assert not sweep_program.main()
        assert told in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_a_sweep_is_the_run_alone(words, tmp_path):
    """And a second seed compiles nothing that the first has compiled."""
    folder = tmp_path / "sweep"
    process = sweep(words, "--over=seed=3..4", f"--workdir={folder}")
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    own = ["--config.seed=4", f"--config.workdir={tmp_path / 'alone'}"]
    alone = subprocess.run(
        [sys.executable, "-m", "jaxformer", "pretrain", *words, *own],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    finals = [records.load(path / "records.jsonl", "final")[0] for path in (folder / "seed=4", tmp_path / "alone")]
    assert finals[0]["loss"] == finals[1]["loss"]
    spent = [records.load(folder / name / "records.jsonl", "final")[0] for name in ("seed=3", "seed=4")]
    assert spent[1]["compilation_seconds"] < spent[0]["compilation_seconds"]

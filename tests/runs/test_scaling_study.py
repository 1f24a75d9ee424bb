"""A whole study, small: plan, run, fit, report; what is finished is never run again; bad input is one line."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from file_formats import record_line
from quick_runs import one_device

from jaxformer import records
from jaxformer.config import from_mapping
from jaxformer.data.markov import Floor
from jaxformer.errors import ConfigError
from jaxformer.programs import scaling
from jaxformer.runtime.cluster import Membership
from jaxformer.runtime.program import program
from jaxformer.scaling.ladder import StudyConfig

ROOT = Path(__file__).parents[2]
CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({
        "model": {"context_length": 32, "positions": "rotary"},
        "data": {"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 2_000_000},
        "optimizer": {"schedule": "wsd", "warmup_steps": 5, "learning_rate": 1e-2},
        "train": {"batch_rows": 8, "steps_per_dispatch": 5, "eval_rows": 64},
        "ladder": {"widths": (8, 16, 24), "head_width": 8, "budgets": (4e8, 1.2e9, 4e9), "min_steps": 5,
                   "max_tokens_per_parameter": 1e4, "learning_rates": (1.0, 2.0), "learning_rate_extensions": 0,
                   "seeds": 2, "seeded_sizes": 1},
    })
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.py").write_text(CONFIG)
    return folder


def command(place, workdir, *flags):
    config = [f"--config={place / 'study.py'}", f"--config.workdir={workdir}"]
    cache = [f"--config.data.cache_dir={place / 'corpora'}", "--bootstrap=100"]
    return [sys.executable, "-m", "experiments.scaling", *config, *cache, *flags]


def start(place, workdir, *flags):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.Popen(
        command(place, workdir, *flags), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def finish(place, workdir, *flags):
    process = start(place, workdir, *flags)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.fixture
def within(place, monkeypatch, capsys):
    """`finish` in this process, on one device: for what trains nothing, or nothing that is compared."""
    one_device(monkeypatch)

    def run(workdir, *flags):
        monkeypatch.setattr(sys, "argv", command(place, workdir, *flags)[2:])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            program(scaling.main)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def told(workdir):
    """The records without what the clock says."""
    found = records.load(workdir / "records.jsonl")
    return [{k: v for k, v in record.items() if k != "seconds"} for record in found]


@pytest.fixture(scope="module")
def done(place):
    code, out, err = finish(place, place / "done")
    assert code == 0, err[-2000:]
    return out


@pytest.mark.slow
def test_from_one_command_to_the_report(place, done):
    lines = done.splitlines()
    assert re.match(r"\d+ runs on \d+ trunks, 3 programs to compile; 0 finished", lines[0])
    assert str(place / "done" / "report.html") in lines
    told_last = lines[lines.index(str(place / "done" / "report.html")) + 1 :]
    assert told_last[0].startswith("law that fits best: not determined. 9 runs are too few to compare laws")
    assert any(re.match(r"best N at (4|3\.9)\S*e9 FLOP, by [^:]*: ", line) for line in told_last)
    assert any(line.startswith("error of predicting the largest budget: not determined") for line in told_last)
    found = [r for r in told(place / "done") if r["kind"] == "final"]
    planned, trunk_count = (int(n) for n in re.findall(r"\d+", lines[0])[:2])
    assert len(found) >= planned and len({r["trunk"] for r in found}) >= trunk_count
    assert all(r["status"] == "finished" and r["epochs"] <= 1 for r in found)
    assert {r["seed"] for r in found if r["width"] == 8} == {0, 1}
    fit = json.loads((place / "done" / "fit.json").read_text())
    assert fit["parametric"].keys() >= {"E", "A", "B", "alpha", "beta"}
    manifest = json.loads((place / "done" / "manifest.json").read_text())
    assert manifest["config"]["ladder"]["widths"] == [8, 16, 24]


@pytest.mark.slow
def test_what_is_finished_is_never_run_again(place, done, within, tmp_path):
    before = {path: path.stat().st_mtime for path in (place / "done" / "runs").iterdir()}
    code, out, _ = within(place / "done", "--stage=run")
    assert code == 0 and "0 TFLOP" in out
    assert before == {path: path.stat().st_mtime for path in (place / "done" / "runs").iterdir()}
    # The records alone are as good: a study goes on from them where its working files were not kept.
    shutil.copytree(place / "done", tmp_path / "kept", ignore=shutil.ignore_patterns("runs", "trunks"))
    code, out, _ = within(tmp_path / "kept", "--stage=run")
    assert code == 0 and "0 TFLOP" in out and told(tmp_path / "kept") == told(place / "done")


@pytest.mark.slow
def test_more_budgets_go_on_from_the_trunks(place, done, within, tmp_path):
    shutil.copytree(place / "done", tmp_path / "more")
    code, _, err = within(
        tmp_path / "more", "--stage=run", "--config.ladder.budgets=4e8,1.2e9,4e9,8e9",
        "--config.ladder.widths=8,16,24", "--config.ladder.learning_rates=1.0,2.0",
    )  # fmt: skip
    assert code == 0, err[-2000:]
    names = {r["run"] for r in told(place / "done")}
    longer = [r for r in told(tmp_path / "more") if r["kind"] == "final" and r["run"] not in names]
    assert longer and all(r["flops"] > 4.1e9 or r["role"] == "learning rate" for r in longer)


@pytest.mark.slow
def test_sizes_trained_apart_are_one_study(place, done, within, tmp_path):
    for widths in ("8", "16,24"):
        code, out, err = within(tmp_path / widths, "--stage=run", f"--only={widths}")
        assert code == 0, err[-2000:]
        assert {r["width"] for r in told(tmp_path / widths) if r["kind"] == "final"} == set(map(int, widths.split(",")))
    for path in (tmp_path / "16,24" / "runs").iterdir():
        shutil.copy(path, tmp_path / "8" / "runs")
    code, out, _ = within(tmp_path / "8", "--stage=run")
    assert code == 0 and "0 TFLOP" in out
    final = [r for r in told(tmp_path / "8") if r["kind"] == "final"]
    known = {r["run"]: r for r in told(place / "done") if r["kind"] == "final"}
    assert {r["run"]: r["role"] for r in final} == {name: r["role"] for name, r in known.items()}
    assert all(abs(r["loss"] - known[r["run"]]["loss"]) < 1e-5 for r in final)


@pytest.mark.slow
def test_kill_minus_nine_changes_nothing(place, done):
    count = len(list((place / "done" / "runs").iterdir()))
    dice = random.Random(1)
    for goal in (0, 1, count // 2):  # so many runs had finished
        process = start(place, place / "killed")
        while process.poll() is None and len(list((place / "killed").glob("runs/*.jsonl"))) < goal:
            time.sleep(0.05)
        time.sleep(dice.uniform(0.0, 0.3))
        alive = process.poll() is None
        process.kill()
        _, err = process.communicate()
        assert alive, f"over before it was killed at {goal} runs: {err[-2000:]}"
    code, _, err = finish(place, place / "killed", "--stage=run")
    assert code == 0, err[-2000:]
    assert told(place / "killed") == told(place / "done")


@pytest.mark.slow
def test_one_clear_line(place, done, within, tmp_path):
    def line(*flags, workdir=tmp_path / "new"):
        code, out, err = within(workdir, *flags)
        assert code == 2 and "Traceback" not in err, (out, err)
        (found,) = [text for text in err.splitlines() if text.startswith("error:")]
        assert err.splitlines()[-1] == found
        return found

    assert "needs 21760 tokens, 1.09 epochs" in line("--config.data.language_tokens=20000")
    assert not (tmp_path / "new" / "runs").exists()
    assert "config.ladder.budgets: '4e8,much' is not a comma-separated list" in line("--config.ladder.budgets=4e8,much")
    assert "holds no run" in line("--stage=fit")
    changed = line("--config.model.positions=none", workdir=place / "done")
    assert "holds a run of another config (model.positions.kind: 'rotary' -> 'none')" in changed
    # What a width stands for is not in a run's name, so it must not change under finished runs.
    changed = line("--config.ladder.layer_width=8", workdir=place / "done")
    assert "another config (ladder.layer_width: 32 -> 8)" in changed
    assert line("--at-once=0") == "error: --at-once: 0; accepted: at least 1"
    assert "--bootstrap: 5; accepted: 100 to 100000" in line("--bootstrap=5")
    few = line("--config.ladder.widths=8", "--config.ladder.budgets=4e8")
    assert "needs" in few and "rows" in few
    shutil.copytree(place / "done", tmp_path / "cut", ignore=shutil.ignore_patterns("runs", "trunks"))
    path = tmp_path / "cut" / "records.jsonl"
    # As an earlier version would have written it, whose lines have no checksum.
    path.write_text(re.sub(r', "crc": "\w+"', "", path.read_text()).replace('"flops"', '"flips"'))
    assert "final record lacks flops" in line("--stage=fit", workdir=tmp_path / "cut")


@pytest.mark.slow
def test_the_plan_says_what_no_fit_will_say(within, tmp_path):
    code, out, error = within(tmp_path / "new", "--stage=plan")
    assert code == 0, error
    warned = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert warned == [
        "warning: 9 runs are too few to compare laws; at least 14 are needed",
        "warning: iso-FLOP minima need 4 sizes at each of 3 budgets; 0 of 3 will have them; add to ladder.widths or "
        "ladder.budgets, or widen the tokens per parameter",
        "warning: the largest budget will not be predicted: 5 runs below it, and 8 are needed; add to ladder.budgets, "
        "ladder.widths or ladder.seeds",
    ]
    enough = ["--config.ladder.widths=8,16,24,32,40", "--config.ladder.budgets=1e9,2e9,4e9,8e9", "--stage=plan",
              "--config.ladder.min_steps=1", "--config.ladder.min_tokens_per_parameter=0"]  # fmt: skip
    _, out, error = within(tmp_path / "new", *enough)
    assert "to do: " in out and "warning: " not in out, out + error


@pytest.mark.slow
def test_a_plan_by_trial_says_how_long_and_writes_nothing(within, tmp_path):
    code, out, error = within(tmp_path / "new", "--stage=plan", "--trial")
    assert code == 0, error
    pattern = r"here, from a few updates of each size: updates .+, evaluations .+; making the programs took "
    assert re.search(pattern, out.splitlines()[-1]) and not list((tmp_path / "new").iterdir())


def test_a_study_is_not_started_by_several_processes(place, monkeypatch):
    from jaxformer.runs import scaling_study

    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node1:8476")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    ladder = {"widths": [8], "head_width": 8, "tokens": [1000]}
    one = from_mapping({"data": {"files": ["nothing/there"]}, "ladder": ladder}, cls=StudyConfig)
    with pytest.raises(ConfigError, match="reports 2 processes, and each would train the whole study; accepted: one"):
        scaling_study.open_study(one)
    # A TPU VM may well be alone, and nobody has asked it yet: the text is what is opened next.
    monkeypatch.setattr(scaling_study.cluster, "detect", lambda *_: Membership("TPU VM"))
    with pytest.raises(ConfigError, match="nothing/there"):
        scaling_study.open_study(one)


def test_what_is_not_here_is_said_before_anything_is_trained(place, tmp_path, monkeypatch):
    """A library that only the last stage needs, an attention kernel of another platform."""
    monkeypatch.setattr(sys, "argv", command(place, tmp_path / "run")[2:])
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match=r"fits need scipy: pip install 'jaxformer\[scaling\]'"):
        scaling.main()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", [*command(place, tmp_path / "run")[2:], "--config.execution.attention=splash"])
    with pytest.raises(ConfigError, match=r"config.execution.attention: splash needs a TPU, which is not here"):
        scaling.main()
    assert not (tmp_path / "run").exists()


def test_a_run_below_the_floor_is_a_leak(monkeypatch):
    from jaxformer.runs import scaling_study

    config = from_mapping({"data": {"source": "markov"}, "ladder": {"budgets": [1e12]}}, cls=StudyConfig)
    monkeypatch.setattr(scaling_study.languages, "floor", lambda *_: Floor(2.0, 0.0, True, 0.0))
    scaling_study.check_floor(config, {"honest": {"loss": 1.99, "loss_stderr": 0.01}})
    with pytest.raises(ConfigError, match=r"leaky: .*1\.9000.*2\.0000"):
        scaling_study.check_floor(config, {"leaky": {"loss": 1.9, "loss_stderr": 0.01}})


@pytest.mark.slow
def test_a_damaged_run_file_is_told_and_records_serve(place, done, within, tmp_path):
    """Empty, or without its final record: an IndexError before, though records.jsonl holds that run."""
    shutil.copytree(place / "done", tmp_path / "hurt")
    runs = sorted((tmp_path / "hurt" / "runs").iterdir())
    runs[0].write_text("")
    runs[1].write_text("".join(runs[1].read_text().splitlines(keepends=True)[:-1]))
    path = tmp_path / "hurt" / "records.jsonl"
    path.write_text("garbage\n" + path.read_text())
    code, out, err = within(tmp_path / "hurt", "--stage=run")
    assert code == 0 and "0 TFLOP" in out, err[-2000:]
    for run in runs[:2]:
        why = "is damaged, has no final record or is another run's; set aside as"
        assert f"note: {run} {why} {run.stem}.damaged" in out
        again, before = records.load(run), records.load(place / "done" / "runs" / run.name)
        # A run's role is what is known of it in the end, as the records of all say.
        assert [{**r, "role": ""} for r in again] == [{**r, "role": ""} for r in before]
    note = "not a JSON object; 1 line is set aside in records.damaged.jsonl, and the run goes on"
    assert f"note: {path}:1: {note}" in out
    assert told(tmp_path / "hurt") == told(place / "done")
    # Where the records do not hold it either, the run is made again.
    runs[0].write_text("")
    mine = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["run"] != runs[0].stem]
    path.write_text("".join(mine))
    code, out, err = finish(place, tmp_path / "hurt", "--stage=run")
    # Its stretch of the trunk may be gone: the trunk's kept state is further on.
    finals = [[r for r in told(tmp_path / name) if r["kind"] == "final"] for name in ("hurt", place / "done")]
    assert code == 0 and finals[0] == finals[1], err[-2000:]


@pytest.mark.slow
def test_a_study_in_use_a_link_in_it_and_another_studys_trunk(place, done, within, tmp_path):
    from jaxformer.runs.workdir_lock import WorkdirLock

    shutil.copytree(place / "done", tmp_path / "mine")
    with WorkdirLock(tmp_path / "mine"):
        code, _, err = within(tmp_path / "mine", "--stage=run")
        assert code == 2 and f"config.workdir: {tmp_path / 'mine'} is in use by process {os.getpid()} on" in err
        assert within(tmp_path / "mine", "--stage=plan")[0] == 0  # writes nothing
    for name in ("figures", "report.html", "runs/a.jsonl"):
        victim = tmp_path / "victim"
        victim.mkdir(exist_ok=True)
        link = tmp_path / "mine" / name
        aside = link.with_name("aside")
        if link.exists():
            link.rename(aside)
        link.symlink_to(victim)
        for stage in ("fit", "report", "run"):
            code, _, err = within(tmp_path / "mine", f"--stage={stage}")
            assert code == 2 and f"config.workdir: {link} is a symbolic link, which is not followed" in err, err
        link.unlink()
        if aside.exists():
            aside.rename(link)
        assert not list(victim.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../victim/run", "a\0b", 300 * "n", "\ud800"])
def test_the_name_of_a_run_leads_nowhere_else(place, done, within, tmp_path, name):
    """Of a study from elsewhere, whose records know their checksums: the files of its runs are made from those."""
    study, victim = tmp_path / "study", tmp_path / "victim"
    shutil.copytree(place / "done", study, ignore=shutil.ignore_patterns("runs"))
    victim.mkdir()
    found = records.load(study / "records.jsonl")
    other = [{**each, "run": name} if each["run"] == found[0]["run"] else each for each in found]
    (study / "records.jsonl").write_text("".join(map(record_line, other)))
    code, _, err = within(study, "--stage=fit")
    assert code == 2 and "records.jsonl:1: train record: run: " in err and "Traceback" not in err
    if "victim" in name:  # where the line is read as in the other stages, and set aside
        code, out, err = within(study, "--stage=run")
        assert code == 0 and "set aside" in err + out
    assert not list(victim.iterdir())

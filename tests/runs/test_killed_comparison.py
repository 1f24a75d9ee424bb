"""A comparison that is killed goes on to the records of one that was not."""

import os
import subprocess
import sys
import time

import pytest

from jaxformer import records

CONFIG = """
def get_config():
    return {
        "model": {"context_length": 16, "positions": "rotary"},
        "data": {"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 500_000},
        "optimizer": {"schedule": "wsd", "warmup_steps": 5, "learning_rate": 1e-2},
        "train": {"global_batch_size": 8, "eval_rows": 32},
        "execution": {"steps_per_dispatch": 5},
        "ladder": {"widths": (8, 16), "head_width": 8, "min_layers": 1, "min_steps": 5, "budgets": (4e7, 4e8),
                   "max_tokens_per_parameter": 1e4, "min_tokens_per_parameter": 0.01, "learning_rates": (1.0, 2.0),
                   "learning_rate_extensions": 0},
        "variants": {"learned": {"model.positions": "learned"}},
    }
"""
ENTRANTS = "baseline", "learned"


def start(folder, study):
    flags = [f"--config={folder / 'ladder.py'}", f"--config.workdir={study}", "--stage=run",
             f"--config.data.cache_dir={folder / 'cache'}", "--at-once=1"]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "jaxformer", "compare", *flags], env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def told(study):
    """The records of all entrants without what the clock says."""
    found = {name: records.load(study / name / "records.jsonl", more=records.STUDY) for name in ENTRANTS}
    return {name: [{k: v for k, v in each.items() if k != "seconds"} for each in mine] for name, mine in found.items()}


@pytest.mark.slow
def test_kills_change_nothing(tmp_path):
    (tmp_path / "ladder.py").write_text(CONFIG)
    undisturbed = start(tmp_path, tmp_path / "whole")
    out, _ = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, out[-2000:]
    whole = told(tmp_path / "whole")
    assert all(sum(each["kind"] == "final" for each in mine) >= 4 for mine in whole.values())
    for name, runs in (("baseline", 2), ("learned", 1)):  # so many runs of it had finished
        process = start(tmp_path, tmp_path / "killed")
        folder = tmp_path / "killed" / name / "runs"
        while process.poll() is None and not (folder.exists() and len(list(folder.glob("*.jsonl"))) >= runs):
            time.sleep(0.02)
        process.kill()
        out, _ = process.communicate()
        assert process.returncode == -9, f"over before it was killed: {out[-2000:]}"
    last = start(tmp_path, tmp_path / "killed")
    out, _ = last.communicate(timeout=600)
    assert last.returncode == 0, out[-2000:]
    assert told(tmp_path / "killed") == whole

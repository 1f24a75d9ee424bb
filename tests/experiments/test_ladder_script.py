"""Sizes of a study in processes of their own: stopped by the clock, going on, and one study in the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer import records

ROOT = Path(__file__).parents[2]
CONFIG = """
def get_config():
    return {
        "model": {"context_length": 16, "positions": "rotary"},
        "data": {"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 200_000},
        "optimizer": {"schedule": "wsd", "warmup_steps": 5, "learning_rate": 1e-2},
        "train": {"global_batch_size": 8, "eval_rows": 16},
        "ladder": {"widths": (8, 16), "head_width": 8, "tokens": (2560, 5120), "learning_rates": (1.0,)},
    }
"""


@pytest.mark.slow
def test_a_ladder_stopped_by_the_clock_goes_on_and_becomes_one_study(tmp_path):
    (tmp_path / "mine.py").write_text(CONFIG)
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def ladder(seconds, widths="8,16"):
        command = ["experiments/ladder.sh", str(tmp_path / "out"), seconds, widths, str(tmp_path / "mine.py")]
        command += [f"--config.data.cache_dir={tmp_path / 'cache'}"]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    early = ladder("1")
    assert (early.returncode, early.stdout) == (75, f"0 runs in {tmp_path / 'out' / 'study'}\n"), early.stderr
    done = ladder("500")
    assert (done.returncode, done.stdout) == (0, f"4 runs in {tmp_path / 'out' / 'study'}\n"), done.stderr
    command = [sys.executable, "-m", "jaxformer", "scaling", str(tmp_path / "mine.py"), "--stage=run"]
    command += [f"--config.data.cache_dir={tmp_path / 'cache'}", f"--config.workdir={tmp_path / 'out' / 'study'}"]
    whole = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert whole.returncode == 0 and "to do: 0 TFLOP" in whole.stdout, whole.stderr
    found = records.load(tmp_path / "out" / "study" / "records.jsonl")
    assert sorted((r["width"], r["tokens"]) for r in found if r["kind"] == "final") == [
        (8, 2560), (8, 5120), (16, 2560), (16, 5120)
    ]  # fmt: skip
    wrong = ladder("500", "9")
    assert wrong.returncode == 1 and wrong.stderr.startswith("width 9 failed; see ")
    before = sorted((tmp_path / "out" / "study" / "runs").iterdir())
    (tmp_path / "mine.py").write_text(CONFIG.replace("(8, 16)", "(8, 16, 24)"))
    other = ladder("500", "24")
    assert other.returncode == 1 and "holds runs of another config or text than" in other.stderr
    assert sorted((tmp_path / "out" / "study" / "runs").iterdir()) == before


@pytest.mark.parametrize(("seconds", "widths", "flag", "said"), [
    ("soon", "8", "--log", "SECONDS: soon; accepted: a whole number from 1 on\n"),
    ("9", "", "--log", "WIDTH,...: ; accepted: widths with commas between, as 64,128\n"),
    ("9", "8,16,8", "--log", "WIDTH,...: 8,16,8; accepted: each once\n"),
    ("9", "8", "--config.workdir=a", "FLAGS: --config.workdir=a; this program sets it\n"),
    ("9", "8", "--stage=plan", "FLAGS: --stage=plan; this program sets it\n"),
])  # fmt: skip
def test_a_ladder_that_cannot_be_is_one_line(tmp_path, seconds, widths, flag, said):
    command = ["experiments/ladder.sh", str(tmp_path / "out"), seconds, widths, "scaling_tiny", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, said) and not (tmp_path / "out").exists()

"""The fault suite's first trials of one seed, a minute's worth; `python -m tests.faults` goes on from there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_minute_of_faults(tmp_path):
    command = [sys.executable, "-m", "tests.faults", "--minutes=10", "--trials=10", "--seed=27"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    rows = [line for line in found.stdout.splitlines() if re.match(r"all +[0-9]", line)]
    assert len(rows) == 2, found.stdout + found.stderr
    assert found.returncode == 0, found.stdout[found.stdout.index(" failed:") - 4 :]
    tried, *counts = (0 if word == "." else int(word) for word in rows[0].split()[1:])
    right, noticed, refused, silent, traceback, touched = counts
    assert tried >= 5 and right + noticed + refused == tried and silent == traceback == touched == 0

"""Plans for TPUs, made in processes of their own, because each sets libtpu up once."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra `plan` (libtpu)")
PROGRAM = """
import json, sys
from jaxformer.config import from_mapping
from jaxformer.plan import measures, topology
topology.prepare(sys.argv[1])
target = topology.make(sys.argv[1])
print(json.dumps([measures.make_plan(from_mapping(config), target) for config in json.loads(sys.argv[2])]))
"""


def printed(*arguments):
    """The last line that Python prints, called with these."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def plans_on(topology, configs):
    """The plans of some configs, all of one process."""
    return json.loads(printed("-c", PROGRAM, topology, json.dumps(configs)))

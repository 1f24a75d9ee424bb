"""Every block of code in docs/ runs, in an empty folder; what a page says about files and commands exists."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.__main__ import COMMANDS
from jaxformer.config.loading import shipped
from tests.docs.pages import ROOT, blocks

PAGES = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))}
CODE = {name: [block for block in blocks(path) if block.language in ("python", "sh")] for name, path in PAGES.items()}
TRAINS = {name for name, found in CODE.items() if any("jaxformer" in b.text for b in found if b.language == "sh")}
# What stands in ```console, which nothing runs: it needs a cluster, another machine, the network or hours.
NOT_RUN = ("pip", "python3 -m venv", "mkdocs", "sbatch", "scontrol", "kubectl", "TPU=", "launch/", "jaxformer", "python -m http.server")


def slow_if_it_trains(name):
    return pytest.param(name, marks=pytest.mark.slow if name in TRAINS else ())


@pytest.mark.parametrize("name", [slow_if_it_trains(name) for name, found in CODE.items() if found])
def test_its_code_runs(name, tmp_path):
    folder, commands = tmp_path / "empty", tmp_path / "bin"
    folder.mkdir()
    commands.mkdir()
    # The command of this checkout and this Python, whatever else is installed.
    shim = commands / "jaxformer"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jaxformer "$@"\n', encoding="utf-8")
    shim.chmod(0o755)
    own = {"PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "tests.docs.pages", str(PAGES[name])]
    done = subprocess.run(words, cwd=folder, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", PAGES)
def test_what_it_names_exists(name):
    text = PAGES[name].read_text(encoding="utf-8")
    for path in re.findall(r"`((?:jaxformer|tests|launch|experiments|configs|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    for command in re.findall(r"^(?:\$ )?(?:\w+=\S+ )*jaxformer ([\w-]+)", text, re.MULTILINE):
        assert command in COMMANDS or command == "PROGRAM", command
    for config in re.findall(r"jaxformer (?:pretrain|scaling|plan) (\w+_\w+)(?![\w.])", text):
        assert config in shipped(), config


def test_every_language_is_one_that_is_run_or_read():
    for name, path in PAGES.items():
        for block in blocks(path):
            assert block.language in ("python", "sh", "console", "text", "json"), f"{name}:{block.line}"
            if block.language == "console":
                for line in block.text.replace("\\\n", " ").splitlines():
                    assert line.startswith(NOT_RUN), f"{name}: {line}"
            if block.language == "text":
                assert not re.match(r"\$ |jaxformer |pip ", block.text), f"{name}:{block.line}"

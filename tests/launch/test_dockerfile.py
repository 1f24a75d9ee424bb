"""launch/Dockerfile, followed line by line in an empty folder: Docker itself is not at hand."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.launch.test_scripts import MANIFESTS, ROOT, jobs

TEXT = (ROOT / "launch" / "Dockerfile").read_text()
LINES = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def lines(word):
    return [rest for first, rest in LINES if first == word]


def test_the_manifests_start_in_its_folder_what_it_holds():
    (folder,) = lines("WORKDIR")
    for path in MANIFESTS:
        (job,) = jobs(path)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["workingDir"] == folder
        config = re.search(r"--config=(\S+?)/", yaml.safe_dump(container["args"]))[1]
        assert any(line.split()[0] == config for line in lines("COPY"))


def test_its_default_extra_is_one_of_ours():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"cuda", "tpu"} <= set(extras) and "ARG EXTRAS=cuda" in TEXT


@pytest.mark.slow
def test_its_lines_give_a_command_that_runs(tmp_path):
    image = tmp_path / "image"
    image.mkdir()
    for line in lines("COPY"):
        *sources, target = line.split()
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                shutil.copytree(path, image / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, image / target)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    (folder,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # What jaxformer needs is found here: to find it again and copy it takes pip two minutes.
    (folder / "installed.pth").write_text(sysconfig.get_path("purelib"))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    env |= {"PATH": f"{tmp_path / 'venv' / 'bin'}:{env['PATH']}", "EXTRAS": "", "JAX_PLATFORMS": "cpu"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    for command in lines("RUN"):
        done = subprocess.run(["sh", "-c", command], cwd=image, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (entry,) = (yaml.safe_load(line) for line in lines("ENTRYPOINT"))
    few = ["model.num_layers=1", "train.steps=2", "train.eval_rows=12", "optimizer.warmup_steps=1"]
    few += ["data.source=files", "data.files=text.txt", "data.tokenizer=bytes"]
    (image / "text.txt").write_text("All happy families are alike. " * 2000)
    words = [*entry, "pretrain", "configs/gpt_tiny.py", *(f"--config.{field}" for field in few)]
    done = subprocess.run(words, cwd=image, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and Path(image / "runs" / "gpt_tiny" / "manifest.json").exists(), done.stderr

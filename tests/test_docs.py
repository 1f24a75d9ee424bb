"""What the README says is true: its examples run, its commands parse, its links and programs exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_examples_run():
    """All python blocks, one after another in one fresh process, as a reader would paste them."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_commands_name_what_exists():
    for name in set(re.findall(r"python -m experiments\.(\w+)", README)):
        assert (ROOT / "experiments" / f"{name}.py").is_file(), name
    for path in set(re.findall(r"configs/\w+\.py", README)) | set(re.findall(r"\]\(([\w/]+\.[\w/.]+)\)", README)):
        assert (ROOT / path).exists(), path


def test_setup_commands_are_verbatim():
    assert "\n    pip install -e . && python -m experiments.pretrain --config=configs/gpt_tiny.py\n" in README
    assert "\n    pip install -e '.[test]' && pytest\n" in README


def test_every_config_says_its_command():
    for path in (ROOT / "configs").glob("*.py"):
        if path.name == "__init__.py":
            continue
        text = path.read_text(encoding="utf-8")
        program = "scaling" if path.name.startswith("scaling_") else "pretrain"
        assert f"python -m experiments.{program} --config=configs/{path.name}" in text, path.name
        assert len(text.splitlines()) <= 70, path.name


PROGRAMS = [
    "pretrain", "evaluate", "generate", "fill_mask", "curves", "fit", "scaling", "benchmark", "plan", "weak_scaling",
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, monkeypatch, capsys):
    """--help answers without loading jax's backends, and shows the command."""
    module = __import__(f"experiments.{name}", fromlist=["main"])
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert f"python -m experiments.{name}" in capsys.readouterr().out

"""The command `jaxformer`: what it lists, which config a name stands for, and a wheel in an empty folder."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jaxformer
from jaxformer import __main__ as command
from jaxformer.config import from_mapping, load
from jaxformer.config.loading import shipped, split
from jaxformer.errors import ConfigError

ROOT = Path(__file__).parents[2]


def said(monkeypatch, capsys, *words):
    """Exit code, standard output and error of `jaxformer WORDS`."""
    monkeypatch.setattr("sys.argv", ["jaxformer", *words])
    try:
        command.main()
        code = 0
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_it_lists_its_programs(monkeypatch, capsys):
    code, out, _ = said(monkeypatch, capsys)
    files = {path.stem.replace("_", "-") for path in (ROOT / "jaxformer" / "programs").glob("*.py")} - {"--init--"}
    assert code == 0 and set(re.findall(r"^  ([a-z-]+)  ", out, re.MULTILINE)) == files == set(command.COMMANDS)
    assert said(monkeypatch, capsys, "--version")[1] == f"jaxformer {jaxformer.__version__}\n"


def test_a_program_that_is_not_there(monkeypatch, capsys):
    near = "error: 'pretrian': no such program; did you mean pretrain?\n"
    assert said(monkeypatch, capsys, "pretrian") == (2, "", near)
    far = f"error: 'x': no such program; accepted: {', '.join(command.COMMANDS)}\n"
    assert said(monkeypatch, capsys, "x") == (2, "", far)


def test_doors_in_experiments():
    """`python -m experiments.NAME` for every program that stood there before the command."""
    for name in ("pretrain", "evaluate", "generate", "fill_mask", "scaling", "fit", "plan", "benchmark", "curves"):
        door = (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(r'run\("(.*)"\)', door)[1] == name.replace("_", "-") in command.COMMANDS


@pytest.mark.slow
def test_a_door_in_experiments_opens():
    words = [sys.executable, "-m", "experiments.configs"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 1
    words = [sys.executable, "-m", "experiments.fill_mask", "--help"]
    assert "usage: jaxformer fill-mask" in subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout


def test_configs_that_come_with_it(monkeypatch, capsys):
    _, out, _ = said(monkeypatch, capsys, "configs")
    assert [line.split()[0] for line in out.splitlines()] == list(shipped()) and "gpt_tiny" in shipped()
    _, out, _ = said(monkeypatch, capsys, "configs", "gpt_tiny")
    assert out == (ROOT / "configs" / "gpt_tiny.py").read_text(encoding="utf-8")
    assert split("scaling_entropy:markov") == (ROOT / "configs" / "scaling_entropy.py", "markov")


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert from_mapping(load("gpt_tiny")).model.num_layers == 4
    shutil.copy(ROOT / "configs" / "bert_tiny.py", "gpt_tiny")
    with pytest.raises(ConfigError, match="gpt_tiny; accepted: a Python file"):
        load("gpt_tiny")


def test_a_config_imports_files_beside_it(tmp_path):
    (tmp_path / "own_base_xyz.py").write_text("LAYERS = 7\n")
    config = tmp_path / "mine.py"
    config.write_text(
        "import own_base_xyz\ndef get_config():\n    return {'model': {'num_layers': own_base_xyz.LAYERS}}\n"
    )
    assert load(str(config)) == {"model": {"num_layers": 7}}


def test_a_config_that_starts_from_another():
    large = from_mapping(load("gpt2_350m")).model
    assert (large.num_layers, large.context_length, large.attention.num_heads) == (24, 1024, 16)


@pytest.mark.slow
def test_log_says_everything_once(tmp_path):
    """Libraries give the root logger a handler, which repeated it."""
    config = tmp_path / "c.py"
    model = {"num_layers": 1, "width": 16, "attention": {"num_heads": 1}, "context_length": 8}
    data = {"source": "markov", "language_tokens": 5000}
    rest = {"model": model, "data": data, "optimizer": {"warmup_steps": 0}, "train": {"steps": 1}}
    config.write_text(f"def get_config():\n    return {rest!r}\n")
    words = [
        sys.executable,
        "-m",
        "jaxformer",
        "pretrain",
        str(config),
        "--log",
        f"--config.workdir={tmp_path / 'run'}",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.count("attention: auto is") == 1


@pytest.mark.slow
def test_a_wheel_in_an_empty_folder(tmp_path):
    """Trains by name, and every hint that is printed runs as it is printed."""
    wheel, home = tmp_path / "wheel", tmp_path / "home"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheel), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0 and "deprecat" not in (done.stdout + done.stderr).lower(), done.stderr
    (file,) = wheel.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(file).extractall(site)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"jaxformer"}
    assert (site / "jaxformer" / "py.typed").exists() and (site / "jaxformer" / "configs" / "gpt_tiny.py").exists()
    home.mkdir()
    (tmp_path / "bin").mkdir()
    # What pip would make of the entry point.
    (tmp_path / "bin" / "jaxformer").write_text(
        f"#!{sys.executable}\nimport sys\nfrom jaxformer.__main__ import main\nsys.exit(main())\n"
    )
    (tmp_path / "bin" / "jaxformer").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    env |= {"PYTHONPATH": str(site), "PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "c")}

    def run(*words):
        done = subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (words, done.stderr[-2000:])
        return done.stdout

    assert str(site) in run(sys.executable, "-c", "import jaxformer; print(jaxformer.__file__)")
    assert len(run("jaxformer", "configs").splitlines()) == len(shipped())
    few = ["--config.train.steps=20", "--config.data.max_train_bytes=300000"]
    out = run("jaxformer", "pretrain", "gpt_tiny", *few)
    hints = re.findall(r"^\w[\w ]*: +(jaxformer .*)$", out, re.MULTILINE)
    assert len(hints) == 2, out
    for hint in hints:
        assert run(*shlex.split(hint))
    (home / "user.py").write_text(
        "import jax.numpy as jnp\nfrom jaxformer import attention\nx = jnp.ones((1, 3, 2, 4))\n"
        "reveal_type(attention(x, x, x))\nreveal_type(attention(x, x, x, return_weights=True))\n"
    )
    env["MYPYPATH"] = str(site)
    one, both = re.findall('Revealed type is "(.*)"', run(sys.executable, "-m", "mypy", "user.py"))
    assert one.endswith("Array") and not one.startswith("Union") and both == f"tuple[{one}, {one}]"


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_needs_no_extra(name, monkeypatch, capsys):
    for extra in ("matplotlib", "scipy", "apache_beam", "fsspec", "wandb", "mlflow", "tensorboardX", "pyarrow"):
        monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.setattr(sys, "argv", ["jaxformer", name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"jaxformer.programs.{name.replace('-', '_')}").main()
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out

"""What tests of bad input share: the table of lines, a folder to run programs in, and which rows tests provoke.

A row of bad_input.md is provoked by a test in a file named test_bad_input*.py which asserts
`place.run(...) == (2, expected()[case])`, the case being written in the test or one of its parameters.
"""

import ast
import importlib
import re
from pathlib import Path

import jax
import pytest
from quick_runs import one_device

from jaxformer.runtime.program import program

TABLE = Path(__file__).parent / "bad_input.md"
TINY = [
    "--config.model.num_layers=1", "--config.model.width=16", "--config.model.num_heads=2",
    "--config.model.context_length=16", "--config.data.tokenizer=bytes", "--config.train.steps=4",
    "--config.train.global_batch_size=8", "--config.execution.steps_per_dispatch=2",
    "--config.optimizer.warmup_steps=0",
    "--config.compilation_cache=false",
]  # fmt: skip


def expected() -> dict[str, str]:
    """case -> line, from the table."""
    rows = re.findall(r"^\| ([^|]+?) \| `(.+)` \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 20 and len(rows) == len(dict(rows))
    return dict(rows)


class Place:
    """A folder with a text file, and the programs run inside it."""

    def __init__(self, folder: Path, monkeypatch, capsys):
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        self.text = folder / "text.txt"
        self.text.write_text("All happy families are alike. " * 100)
        self.config = folder / "config.py"
        self.config.write_text(
            "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'data': {}})\n"
        )

    def run(self, name: str, *flags: str) -> tuple[int, str]:
        """Runs experiments/NAME.py; its exit code and the last line of standard error, the folder's name left out."""
        module = __import__(f"jaxformer.programs.{name}", fromlist=["main"])
        self.monkeypatch.setattr("sys.argv", [f"{name}.py", *flags])
        with pytest.raises(SystemExit) as end:
            program(module.main)
        captured = self.capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("error:")]
        assert len(lines) <= 1 and "Traceback" not in captured.err
        line = (lines or [""])[0].replace(str(self.folder), "DIR").replace(str(Path.cwd()), "HERE")
        return int(end.value.code or 0), line.replace(str(Path.home()), "HOME")

    def pretrain(self, *flags: str, workdir: str = "run") -> tuple[int, str]:
        """Runs pretrain on the folder's text in a tiny size."""
        given = any("data.files" in flag or "data.source" in flag for flag in flags)
        files = [] if given else [f"--config.data.files={self.text}"]
        cache = f"--config.data.cache_dir={self.folder / 'cache'}"
        base = [f"--config={self.config}", f"--config.workdir={self.folder / workdir}", cache, *files, *TINY]
        return self.run("pretrain", *base, *flags)


class Nothing:
    """A capsys for a Place whose output nobody reads."""

    def readouterr(self):
        return type("Captured", (), {"err": "", "out": ""})


@pytest.fixture
def place(tmp_path, monkeypatch, capsys, request):
    """A Place of the test's own; what is slow trains, which should compile quickly."""
    if request.node.get_closest_marker("slow"):
        one_device(monkeypatch)
        jax.config.update("jax_disable_most_optimizations", True)  # until conftest.py sets it again, after the test
    return Place(tmp_path, monkeypatch, capsys)


def provoked(file: Path) -> set[str]:
    """Texts that the tests of a file, which is in this folder, speak of in what they run, and texts that they get as
    parameters. Comments, docstrings, data that no test takes and tests that are always skipped do not count."""
    module = importlib.import_module(file.stem)
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        marks = getattr(getattr(module, node.name), "pytestmark", [])
        if any(mark.name == "skip" for mark in marks) or not _asserts_a_row(node):
            continue
        inside = [each for statement in node.body for each in ast.walk(statement)]  # not the decorators
        bare = {id(each.value) for each in inside if isinstance(each, ast.Expr)}
        constants = [each.value for each in inside if isinstance(each, ast.Constant) and id(each) not in bare]
        found.update(text for text in constants if isinstance(text, str))
        for mark in marks:
            if mark.name == "parametrize":
                for values in mark.args[1]:
                    values = values if isinstance(values, list | tuple) else [values]
                    found.update(value for value in values if isinstance(value, str))
    return found


def _asserts_a_row(test: ast.FunctionDef) -> bool:
    names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    return "expected" in names and any(isinstance(each, ast.Assert) for each in ast.walk(test))

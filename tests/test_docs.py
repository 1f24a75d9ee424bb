"""What the README says is true: its examples run, its commands parse, its links and programs exist."""

import importlib
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxformer.__main__ import COMMANDS
from jaxformer.config import from_mapping
from jaxformer.config.loading import shipped
from jaxformer.errors import ConfigError
from jaxformer.programs.benchmark import SUITES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_examples_run():
    """All python blocks, one after another in one fresh process, as a reader would paste them."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_commands_name_what_exists():
    assert {name for name in re.findall(r"^ *(?:\| `|.*&& )?jaxformer ([a-z-]+)", README, re.MULTILINE)} == set(
        COMMANDS
    )
    assert (
        {"gpt_tiny", "bert_tiny"}
        <= set(re.findall(r"jaxformer (?:pretrain|scaling|plan) (\w+_\w+)", README))
        <= set(shipped())
    )
    for path in set(re.findall(r"configs/\w+\.py", README)) | set(re.findall(r"\]\(([\w/]+\.[\w/.]+)\)", README)):
        assert (ROOT / path).exists(), path


def test_its_fields_exist():
    """Every --config.section.field that it shows, with the value that stands there."""
    found = set(re.findall(r"--config\.([a-z_]+(?:\.[a-z_]+)*)(?:=('[^']*'|[\w./-]+))?", README))
    assert {"model.num_layers", "data.separator", "mesh.fsdp"} <= {field for field, _ in found}
    for field, value in found:
        try:
            from_mapping({}, {field: value.strip("'")})
        except ConfigError as error:
            # A value that needs more beside it, or is not shown, is no wrong name.
            assert not re.search("no such field|is a value|not one of", str(error)), error


def commands(text):
    """The commands of a script, or of lines that a page shows, each as words; without what only makes them quiet."""
    lines = text.replace("\\\n", " ").splitlines()
    words = (shlex.split(part, comments=True) for line in lines for part in line.split("&&"))
    return [[word for word in command if word != "-q"] for command in words if command]


def shown(page, heading):
    """The lines of a section that are set off as commands."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^ {4}(\S.*)$", section, re.MULTILINE)


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
START = shown(README, "Start")
(MAIN,) = [each for each in commands("\n".join(START)) if each[:2] == ["jaxformer", "pretrain"]]


def extras(command):
    """The extras of a `pip install -e '.[a,b]'`; None of another command."""
    if command[:3] != ["pip", "install", "-e"]:
        return None
    assert re.fullmatch(r"\.(\[[\w,]+\])?", command[3]), command
    return set(re.findall(r"\w+", command[3]))


def packages(wanted):
    """Names of the packages that these extras name, those of the extras in them too."""
    found = set()
    for line in [each for name in wanted for each in PROJECT["optional-dependencies"][name]]:
        need = Requirement(line)
        found |= packages(need.extras) if need.name == "jaxformer" else {canonicalize_name(need.name)}
    return found


def everything(names):
    """These packages and all that they need, as installed here."""
    todo, found = list(names), set()
    while todo:
        if (name := canonicalize_name(todo.pop())) not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def test_what_is_to_be_installed_exists():
    """Wherever it is told how: the extras are pyproject's."""
    text = README + CONTRIBUTING + CI + (ROOT / "launch" / "README.md").read_text(encoding="utf-8")
    named = {extra for each in re.findall(r"\.\[([\w,]+)\]", text) for extra in each.split(",")}
    assert {"test", "peers", "plan"} <= named <= set(PROJECT["optional-dependencies"])
    lowest = PROJECT["requires-python"].split(",")[0].removeprefix(">=")
    assert f"Python {lowest} or newer" in CONTRIBUTING


def stage(name):
    """The commands of a stage of .ci/run."""
    return commands(CI.split(f"\nif wanted {name}; then\n")[1].split("\nfi\n")[0])


def test_the_commands_to_start_are_those_that_are_run_before_every_change():
    """In .ci/run: the one that trains with more behind it, which makes it short; the tests as they are."""
    trains, tests = map(commands, START)
    assert extras(trains[0]) == set() and trains[1:] == [MAIN]
    assert any(each[: len(MAIN)] == MAIN for each in stage("short"))
    assert tests[0] in commands(CI) and {"pytest", "pytest-xdist"} <= packages(extras(tests[0]))
    assert tests[1:] == [["pytest"]] == stage("fast")[1:]


def without_extras(code, *words):
    """Runs Python code where everything is missing that only the extras bring."""
    needed = everything(Requirement(line).name for line in PROJECT["dependencies"])
    missing = packages(PROJECT["optional-dependencies"]) - needed
    modules = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if missing >= set(map(canonicalize_name, owners))
    ]
    assert {"pytest", "matplotlib"} <= set(modules) and not {"jax", "numpy", "orbax"} & set(modules)
    start = f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocess.run([sys.executable, "-c", start + code, *words], cwd=ROOT, capture_output=True, text=True)


PROGRAM = "import jaxformer.runs.pretrain\nfrom jaxformer.__main__ import main\nmain()"


@pytest.mark.slow
def test_the_main_command_starts_with_what_it_installs():
    done = without_extras(PROGRAM, *MAIN[1:], "--newest-step", "--config.workdir=none")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr[-2000:]


@pytest.mark.slow
def test_the_main_command_ends_with_what_it_installs(tmp_path):
    few = ["--config.data.max_train_bytes=300000", "--config.data.tokenizer=bytes", "--config.model.num_layers=1",
           "--config.optimizer.warmup_steps=2", "--config.train.steps=4", "--config.train.eval_rows=12"]  # fmt: skip
    done = without_extras(PROGRAM, *MAIN[1:], *few, f"--config.workdir={tmp_path / 'run'}")
    assert done.returncode == 0 and "finished at step 4" in done.stdout, done.stderr[-2000:]


def test_the_stages_of_ci_are_those_that_are_told():
    accepted = set(re.search(r'^case "\$stage" in all \| ([\w |]+)\)', CI, re.MULTILINE)[1].split(" | "))
    assert accepted == set(re.findall(r"wanted (\w+); then", CI))
    told = CONTRIBUTING.split("one stage of it:")[1].split("\n## ")[0]
    assert accepted == set(re.findall(r"`(\w+)`", told))


def test_every_config_says_its_command():
    for path in (ROOT / "configs").glob("*.py"):
        if path.name == "__init__.py":
            continue
        text = path.read_text(encoding="utf-8")
        program = {"scaling": "scaling", "compare": "compare"}.get(path.name.split("_")[0], "pretrain")
        assert f"jaxformer {program} {path.stem}" in text, path.name
        assert len(text.splitlines()) <= 70, path.name


def anchor(heading):
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_log_is_found_by_topic():
    """Its index names every entry, by a link that leads there."""
    log = (ROOT / "experiments" / "LOG.md").read_text(encoding="utf-8")
    index, entries = log.split("\n## By topic\n")[1].split("\n## ", 1)
    headings = re.findall(r"^## (.*)$", f"## {entries}", re.MULTILINE)
    assert len(headings) > 40 and len(set(headings)) == len(headings)
    links = re.findall(r"^- \[(.*)\]\(#(.*)\): \S", index, re.MULTILINE)
    assert len(links) == index.count("\n- ") and {name for name, _ in links} == set(headings)
    assert [to for _, to in links] == [anchor(name) for name, _ in links]


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, monkeypatch, capsys):
    """--help answers without loading jax's backends, and shows the command."""
    module = importlib.import_module(f"jaxformer.programs.{name.replace('-', '_')}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert f"usage: jaxformer {name}" in capsys.readouterr().out


def test_what_there_is_of_each_kind_is_listed():
    """Extras, suites of benchmarks and pages of the documentation."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert extras <= set(re.findall(r"`(\w+)`", README.partition("Optional extras:")[2]))
    install = pages["quickstart.md"].partition("## Install")[2].partition("## Train")[0]
    assert extras - {"services"} <= set(re.findall(r"\w+", install))
    suites = re.search(r"--suite=([\w\\|]+)", README)
    assert suites is not None and set(suites[1].split("\\|")) == set(SUITES)
    assert set(SUITES) <= set(re.findall(r"`(\w+)`", pages["results.md"].partition("| `--suite` |")[2]))
    assert pages.keys() - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\)", pages["index.md"]))

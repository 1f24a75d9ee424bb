"""Every block of code in docs/ runs, in an empty folder; what a page says about files, commands and kinds exists."""

import dataclasses
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxformer.__main__ import COMMANDS
from jaxformer.config import AttentionConfig, FeedForwardConfig, Parametrization, PositionsConfig, from_mapping, load
from jaxformer.config.loading import shipped
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.scaling.ladder import StudyConfig
from tests.docs.pages import ROOT, blocks
from tests.forks import QUICK

PAGES = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))}
RUN = {name for name, path in PAGES.items() if any(block.language in ("python", "sh") for block in blocks(path))}
NEEDS = {"token_shards": "apache_beam"}  # page -> a package of the extra `services`
# What a ```console block, which nothing runs, may begin with: what needs the network, another machine or minutes.
NOT_RUN = ("pip install ", "python3 -m venv ", "jaxformer plan llama_7b ", "jaxformer tokenize corpus.py ",
           "jaxformer pretrain gpt2_124m --config.data.tokens=")  # fmt: skip


def test_pages_with_code_are_there():
    assert {"quickstart", "functions", "data", "config", "extend", "scaling", "clusters", "plans", "results"} <= RUN


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUN))
def test_its_code_runs(name, reader, tmp_path):
    """Pages and their commands are forks of one process: a third of the time went into imports."""
    if find_spec(NEEDS.get(name, "jax")) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    own, code = {}, "".join(block.text for block in blocks(PAGES[name]) if block.language in ("python", "sh"))
    if not re.search(r"_tiny|benchmark", code):  # a few numbers through many programs: most of its time is XLA's
        own[QUICK] = "1"
    if "scaling_tiny" in code:
        own["EVERY_FILE"] = "1"
    words = ["forked", "tests.docs.pages", str(PAGES[name])]
    done = subprocess.run(words, cwd=tmp_path, env=reader | own, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    if name == "config":  # what it prints is the same everywhere
        (printed,) = [block.text for block in blocks(PAGES[name]) if block.language == "text"]
        assert printed in done.stdout


def test_a_block_that_fails_ends_the_page(tmp_path):
    for language, wrong in (("python", "assert 1 == 2"), ("sh", "false | cat\ntrue")):
        page = tmp_path / "page.md"
        page.write_text(f"# Page\n\n```{language}\n{wrong}\n```\n\n```python\nprint('went on')\n```\n")
        words = [sys.executable, "-m", "tests.docs.pages", str(page)]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
        assert done.returncode == 1 and b"page.md:4" in done.stderr and b"went on" not in done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_says_why_not(name):
    """And its lines fit into the page's column, if the block is the page's own."""
    for block in blocks(PAGES[name]):
        where = f"{name}.md:{block.line}"
        assert block.language in ("python", "sh", "console", "text"), where
        if block.language == "console":
            for line in block.text.splitlines():
                assert line.startswith(NOT_RUN) or "://my-bucket/" in line, f"{where}: {line}"
        if block.language in ("python", "sh") and block.title is None:
            assert max(map(len, block.text.splitlines())) <= 80, where


@pytest.mark.parametrize("name", PAGES)
def test_what_it_names_exists(name):
    text = PAGES[name].read_text(encoding="utf-8")
    for path in re.findall(r"`((?:jaxformer|tests|launch|experiments|configs|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    assert {found for found in re.findall(r"^jaxformer ([a-z-]+)", text, re.MULTILINE)} <= set(COMMANDS)
    for config in re.findall(r"(?:jaxformer (?:pretrain|scaling|plan)|launch/\S+) ([a-z0-9]+_\w+)(?![\w.])", text):
        assert config in shipped(), config


@pytest.mark.parametrize("name", PAGES)
def test_its_fields_exist(name):
    """Every --config.section.field that a page shows; a value that needs more beside it is no error."""
    text = PAGES[name].read_text(encoding="utf-8")
    for field, value in re.findall(r"--config\.([a-z_]+(?:\.[a-z_]+)+)=('[^']*'|[\w./,-]+)", text):
        words = ["gpt_tiny", f"--config.{field}={value.strip(chr(39))}"]
        try:
            parse_config(parser("", "pretrain"), words, cls=StudyConfig)
        except ConfigError as error:
            assert not re.search("no such field|is a value|not one of", str(error)), error


def test_kinds_are_those_that_there_are():
    page = PAGES["config"].read_text(encoding="utf-8").split("| Section | Kind | Fields |")[1].split("\n\n")[0]
    said = {
        (section, kind): re.findall(r"`(\w+)`", fields)
        for section, kind, fields in re.findall(r"^\| `(model\.\w+)` \| `(\w+)` \| (.*?) \|", page, re.MULTILINE)
    }
    assert said == {
        (group._where.removeprefix("config."), name): [field.name for field in dataclasses.fields(each)]
        for group in (AttentionConfig, PositionsConfig, FeedForwardConfig, Parametrization)
        for name, each in group.registered.items()
        if each.__module__.startswith("jaxformer.")
    }


def test_the_published_shapes_are_told():
    """The table of GPT-2, Llama and BERT, against the configs that come with jaxformer."""
    page = PAGES["config"].read_text(encoding="utf-8").split("| | GPT-2 | Llama | BERT |")[1].split("\n\n")[0]
    configs = [from_mapping(load(name)) for name in ("gpt2_124m", "llama_7b", "bert_base")]
    rows = re.findall(r"^\| `(model[\w.]+)` \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for field, *said in rows:
        for config, word in zip(configs, said, strict=True):
            value = config
            for part in field.split("."):
                value = getattr(value, part)
            assert word == {True: "yes", False: "no"}.get(value, f"`{value}`"), field


def test_the_readme_leads_here():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"\]\((docs/[\w/.]+)\)", readme):
        assert Path(ROOT / path).exists(), path
    assert "docs/index.md" in readme

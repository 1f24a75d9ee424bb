"""What `--help` and `--print-config` show of a config is the config."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.config import AttentionConfig, Choice, Config, from_mapping, load, registry
from jaxformer.config.denoising import READ_BY_OBJECTIVE
from jaxformer.config.fields import field_types, is_section, options
from jaxformer.config.loading import shipped
from jaxformer.config.named import Named
from jaxformer.config.reference import as_file, help_text, reference
from jaxformer.errors import ConfigError
from jaxformer.functional.sublayers import MIXERS
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.scaling.ladder import StudyConfig
from jaxformer.tracking.trackers import TRACKERS

# Kind -> what else a config with it says.
NEEDED_BY_KIND = {
    "alignment": {
        "model.family": "recurrent_seq2seq", "model.encoder.source_length": "64", "data.objective": "span_corruption",
    },
    "funnel": {
        "model.family": "funnel", "model.positions": "none", "model.block": "post_norm", "model.num_layers": "5",
        "data.objective": "masked", "model.funnel.separate_cls": "false",
    },
    "linformer": {
        "model.family": "bert", "data.objective": "masked", "data.pairs": "true", "model.bert.next_sentence": "true",
    },
}  # fmt: skip
# Sections that are there only where they are read.
NONE = ("model.bert", "model.encoder", "model.funnel", "model.head", "data.labelled", "data.mixture.NAME")


def fields(cls, prefix=""):
    """Paths of all fields, by walking the dataclasses; a section's own kinds each."""
    for each in dataclasses.fields(cls):
        inside = next((kind for kind in options(field_types(cls)[each.name]) if is_section(kind)), None)
        if inside is None:
            yield f"{prefix}{each.name}"
        elif issubclass(inside, Choice):
            yield f"{prefix}{each.name}.kind"
            for kind in inside.registered.values():
                yield from fields(kind, f"{prefix}{each.name}.")
        elif issubclass(inside, Named):
            yield f"{prefix}{each.name}"
            yield from fields(inside.of, f"{prefix}{each.name}.NAME.")
        else:
            yield from fields(inside, f"{prefix}{each.name}.")


def test_every_field_is_told_with_its_default_and_meaning():
    told = list(reference(StudyConfig))
    assert [each.path for each in told] == list(fields(StudyConfig)) and len(told) > 120
    assert all(each.meaning and each.accepted and each.default for each in told)


def test_defaults_are_those_that_are_told():
    """Each, typed as it is told beside the kind that it belongs to, changes nothing."""
    for each in reference(Config):
        kind = each.meaning[1:].partition(")")[0] if each.meaning.startswith("(") else ""
        section = each.path.rpartition(".")[0]
        base = ({f"{section}.kind": kind} if kind else {}) | NEEDED_BY_KIND.get(kind, {})
        if section in NONE or section.removeprefix("data.") in READ_BY_OBJECTIVE:
            continue  # none, by default
        try:
            with_default = from_mapping({}, {**base, each.path: each.default})
        except ConfigError as error:
            assert each.default == "()" or "empty" in str(error), (each, error)
            continue
        assert with_default == from_mapping({}, base), each


@pytest.mark.parametrize("name", shipped())
def test_a_printed_config_loads_to_an_equal_one(name, tmp_path):
    source = "scaling_entropy:markov" if name == "scaling_entropy" else name
    mapping = load(source)
    mapping.pop("variants", None)  # stand beside a config, see `runs.comparing`
    cls = StudyConfig if "ladder" in mapping else Config
    config = from_mapping(mapping, {"data.separator": r"\f\n'"} if name.startswith("gpt2") else {}, cls)
    (tmp_path / "printed.py").write_text(as_file(config, "a\ncommand"))
    assert from_mapping(load(str(tmp_path / "printed.py")), cls=cls) == config


def test_print_config_prints_what_the_command_line_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jaxformer pretrain"])
    words = ["gpt_tiny", "--config.train.steps=60", "--config.model.positions=alibi"]
    with pytest.raises(SystemExit) as end:
        parse_config(parser("", "pretrain"), [*words, "--print-config"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and printed.startswith(
        "# Printed by jaxformer pretrain gpt_tiny --config.train.steps=60"
    )
    (tmp_path / "printed.py").write_text(printed)
    assert (
        parse_config(parser("", "pretrain"), [str(tmp_path / "printed.py")]).config
        == parse_config(parser("", "pretrain"), words).config
    )


@pytest.fixture
def printed(capsys):
    """What --print-config prints of a file; what the file brings is taken back at the end."""
    tables = (MIXERS, AttentionConfig.registered, TRACKERS, registry.TRACKERS)
    before = [set(table) for table in tables]

    def of(file):
        with pytest.raises(SystemExit):
            parse_config(parser("", "pretrain"), [str(file), "--print-config"])
        return capsys.readouterr().out

    yield of
    for table, names in zip(tables, before, strict=True):
        for name in set(table) - names:
            dict.pop(table, name)


def test_a_printed_config_brings_what_its_file_brought(printed):
    file = Path(__file__).parent / "extensions" / "gated_conv.py"
    assert f"load({str(file)!r})" in printed(file)


@pytest.mark.slow
def test_a_printed_config_brings_a_tracker_of_its_file(printed, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxformer.tracking.tracker import TrackerKind\nfrom jaxformer.tracking.trackers import TRACKERS\n"
        "TRACKERS['mine'] = TrackerKind(print)\n"
        "def get_config():\n    return {'tracking': {'trackers': ('mine',)}}\n"
    )
    first = printed(file)
    (tmp_path / "printed.py").write_text(first)
    # Printed once more where nothing has been brought yet.
    words = [sys.executable, "-m", "jaxformer", "pretrain", "--print-config", str(tmp_path / "printed.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for each, out in ((file, first), (tmp_path / "printed.py", done.stdout)):
        assert f"load({str(each)!r})" in out and "'trackers': ['mine']" in out


def test_help_names_every_field(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse_config(parser("", "scaling"), ["--help"], StudyConfig)
    out = capsys.readouterr().out
    assert help_text(StudyConfig) in out
    every = list(reference(StudyConfig))
    one = [each for each in every if f"--config.{each.path}={each.default}   {each.accepted}\n" in out]
    others = [each for each in every if each not in one]  # as in the section around, and told as one entry
    assert all(each.path.startswith("data.mixture.NAME.") for each in others) and 20 < len(others) < len(one) / 4
    _, _, entry = out.partition("  --config.data.mixture.NAME.FIELD   as --config.data.FIELD\n")
    entry = entry.partition("  --config.")[0]
    names = [each.path.rpartition(".")[2] for each in others]
    assert re.findall(r"\w+(?=[,.])", entry) == names and "files" in names and "weight" not in names

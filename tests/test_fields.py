"""No config object exists that its annotations deny: every field of every section, made in Python or read from text."""

import dataclasses
import inspect
import re
import typing
from typing import Literal

import numpy as np
import pytest
from test_config import sections

from jaxformer import config as configs
from jaxformer.config import (
    Config,
    DataConfig,
    DistributedConfig,
    Execution,
    LossConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    fields,
    from_mapping,
    suggestions,
)
from jaxformer.config.aliases import ALIASES
from jaxformer.config.fields import MOST_INTEGER, at_home, field_types, from_text
from jaxformer.config.reference import reference
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError
from jaxformer.scaling.ladder import LadderConfig, StudyConfig

SECTIONS = {cls: f"{where}." for where, cls in [("config", StudyConfig), *sections(StudyConfig)]}
NEEDED = {
    LadderConfig: {"tokens": (1000,)},
    DistributedConfig: {"coordinator_address": "node1:8476", "num_processes": 2, "process_id": 0},
}
# A value of each kind that Python has and configs are given.
VALUES = {
    "text": "nonsense", "an integer": 3, "a number": 2.5, "true": True, "none": None, "a list": [1.5, "a"], 
    "a set": {1},
    "a dict": {"a": 1}, "bytes": b"a", "an object": object(), "a class": ModelConfig, "an array": np.ones(2),
    "a function": len, "a section": LossConfig(),
}  # fmt: skip


def allowed(value, kind):
    """Written out again, so that a fault of `fields.convert` is not its own judge."""
    for option in (
        typing.get_args(kind) if not isinstance(kind, type) and Literal != typing.get_origin(kind) else [kind]
    ):
        origin = typing.get_origin(kind) if typing.get_origin(kind) is tuple else typing.get_origin(option)
        if origin is tuple:
            each = typing.get_args(kind if typing.get_origin(kind) is tuple else option)[0]
            if type(value) is each or (each is float and type(value) is int):
                return True
        elif origin is Literal:
            if any(value is choice for choice in typing.get_args(option)):
                return True
        elif fields.is_section(option) and isinstance(value, option):
            return True
        elif type(value) is option or (option is float and type(value) is int):
            return True
    return False


EVERY = [
    pytest.param(cls, name, kind, id=f"{where}{name}")
    for cls, where in SECTIONS.items()
    for name, kind in field_types(cls).items()
]


def test_every_section_is_walked():
    groups = {fields.Section, configs.Choice, *configs.Choice.__subclasses__()}
    assert set(SECTIONS) == {
        value for value in vars(configs).values() if isinstance(value, type) and issubclass(value, fields.Section)
    } - groups - {Config} | {LadderConfig, StudyConfig}
    assert len(EVERY) > 110


@pytest.mark.parametrize("cls, name, kind", EVERY)
def test_no_field_takes_a_value_of_another_type(cls, name, kind):
    section = any(fields.is_section(option) for option in fields.options(kind))
    refused = 0
    for what, value in VALUES.items():
        if allowed(value, kind):
            continue
        refused += 1
        with pytest.raises(ConfigError) as caught:
            cls(**(NEEDED.get(cls, {}) | {name: value}))
        line = str(caught.value)
        named = f"{SECTIONS[cls]}{name}" + (r"(\.\w+)?: " if section else ": ")
        assert re.match(named, line) and "\n" not in line, what
        assert " is not " in line or (section and ": no such field; " in line), what
    assert refused > 8


@pytest.mark.parametrize("cls, name, kind", EVERY)
def test_no_number_is_too_large_or_none_at_all(cls, name, kind):
    """A number of each size beyond what counters hold: in Python, and as text of a command line."""
    numbers = [option for option in fields.options(kind) if option in (int, float)]
    tuples = [option for option in fields.options(kind) if typing.get_origin(option) is tuple]
    numbers += [each for option in tuples for each in typing.get_args(option)[:1] if each is not str]
    for number in numbers:
        wrong = {int: [2**63, -(2**63), 10**20, 10**400, 10**5000], float: [1e300, -1e300, 10**400]}[number]
        wrong += [float("nan"), float("inf"), -float("inf")]
        for value in wrong:
            with pytest.raises(ConfigError) as caught:
                cls(**(NEEDED.get(cls, {}) | {name: (value,) if tuples else value}))
            line = str(caught.value)
            assert line.startswith(f"{SECTIONS[cls]}{name}: ") and "\n" not in line and len(line) < 250
            assert "; accepted: " in line or " is not " in line


@pytest.mark.parametrize("cls, name, kind", [each for each in EVERY if str in fields.options(each.values[2])])
def test_no_text_is_empty(cls, name, kind):
    with pytest.raises(ConfigError, match=rf"^{SECTIONS[cls]}{name}: ''( is empty|; accepted: host:port)"):
        cls(**(NEEDED.get(cls, {}) | {name: ""}))


@pytest.mark.parametrize("cls, name, kind", EVERY)
def test_every_field_says_what_it_means(cls, name, kind):
    docs = [each.__doc__ or "" for each in cls.__mro__ if name in getattr(each, "__annotations__", {})]
    _, _, attributes = inspect.cleandoc(docs[0]).partition("\nAttributes:\n")
    assert re.search(rf"^  {name}: \S.*\S", attributes, re.MULTILINE)


def test_choices_that_do_not_exist_make_no_model():
    """They made one: positions="rope" had the logits of "none", norm="rmsnorm" of "layer_norm"."""
    wrong = {
        "norm": ("rmsnorm", "; did you mean rms_norm?"),
        "block": ("postnorm", "; did you mean post_norm?"), "family": ("gtp", "; did you mean gpt?"),
        "initializer": ("xavier", ""),
    }  # fmt: skip
    for name, (value, near) in wrong.items():
        choices = ", ".join(FAMILIES if name == "family" else typing.get_args(field_types(ModelConfig)[name]))
        with pytest.raises(ConfigError) as caught:
            ModelConfig(**{name: value})
        assert str(caught.value) == f"config.model.{name}: {value!r} is not one of {choices}{near}"
        with pytest.raises(ConfigError):
            dataclasses.replace(ModelConfig(), **{name: value})
    with pytest.raises(
        ConfigError, match=r"^config.model.positions.kind: 'rope' is not one of .*; did you mean rotary\?$"
    ):
        ModelConfig(positions="rope")
    for name, value in (("remat", "all"), ("layers", "unrolled"), ("attention", "flash")):
        with pytest.raises(ConfigError, match=rf"^config.execution.{name}: '{value}' is not one of "):
            Execution(**{name: value})


def test_what_is_converted_and_into_what():
    made = ModelConfig(num_layers=np.int64(3), dropout=0, use_bias=np.bool_(False), norm_epsilon=np.float32(0.5))
    assert [type(x) for x in (made.num_layers, made.dropout, made.use_bias, made.norm_epsilon)] == [
        int, float, bool, float
    ]  # fmt: skip
    assert DataConfig(source="files", files=["a", "b"]).files == ("a", "b")
    assert LadderConfig(budgets=[1, 2.5]).budgets == (1.0, 2.5) and hash(LadderConfig(widths=[64], tokens=[1]))
    assert configs.to_dict(made)["num_layers"] == 3  # JSON, which knows no numbers of NumPy's


def test_sections_are_sections():
    with pytest.raises(ConfigError, match=r"^config.model: DataConfig\(.* is not a section of fields$"):
        Config(model=DataConfig())
    assert Config(mesh=MeshConfig(1)).mesh.data == 1


def test_a_subclass_s_rules_run_on_checked_values():
    with pytest.raises(ConfigError, match=r"^config.train.steps: '10' is not an integer$"):
        TrainConfig(steps="10", eval_rows=0)


@pytest.mark.parametrize(
    "text, value",
    [("1e6", 10**6), ("1E3", 1000), ("2.5e3", 2500), ("1e+2", 100), ("1_000", 1000), ("-1", -1), ("1e0", 1)],
)
def test_integers_may_be_written_with_an_exponent(text, value):
    assert from_text(text, int, "config.train.steps") == value
    assert type(from_text(text, int | None, "config.train.eval_rows")) is int


@pytest.mark.parametrize("text", ["2.0", "1e-3", "2.55e1", "1e", "e6", "", "0x10", "1 e", "inf", "nan", "1e1.5"])
def test_what_is_no_integer_as_text(text):
    with pytest.raises(ConfigError, match=r"^config.train.steps: .* is not an integer$"):
        from_text(text, int, "config.train.steps")


def test_an_exponent_takes_no_time_and_no_memory():
    for text in ("1e1000000000", "1e99999999999999999999", "9" * 5000):
        with pytest.raises(ConfigError, match=r"^config.train.steps: .* digits; accepted: at most 40$"):
            from_text(text, int, "config.train.steps")
    with pytest.raises(ConfigError, match=rf"^config.train.steps: {10**23}; accepted: at most {MOST_INTEGER}$"):
        configs.from_mapping({}, {"train.steps": "1e23"})


@pytest.mark.parametrize(
    "text, parts",
    [
        ("a.txt", ("a.txt",)),
        ("a.txt, b.txt", ("a.txt", "b.txt")),
        ("(a.txt,b.txt)", ("a.txt", "b.txt")),
        ("['a.txt', 'b.txt']", ("a.txt", "b.txt")),
        ('"a,b.txt",c.txt', ("a,b.txt", "c.txt")),
        ('("a,b.txt", c.txt)', ("a,b.txt", "c.txt")),
        ("(draft).txt", ("(draft).txt",)),
        ("'(a).(b)'", ("(a).(b)",)),
        ("[ab]*.txt", ("[ab]*.txt",)),
        ("data/[ab],c", ("data/[ab]", "c")),
        ("it's.txt,b", ("it's.txt", "b")),
        ('"say ""hi"".txt"', ('say "hi".txt',)),
        ("a.txt,", ("a.txt",)),
        ("a b.txt", ("a b.txt",)),
        ("()", ()),
    ],
)
def test_lists_of_texts_are_read_like_csv(text, parts):
    assert from_text(text, tuple[str, ...], "config.data.files") == parts


def test_a_quotation_mark_that_nothing_closes():
    for text in ('"a,b', 'a,"b', '"a"b', "'a, b\""):
        with pytest.raises(ConfigError, match="has a quotation mark that nothing closes; accepted: "):
            from_text(text, tuple[str, ...], "config.data.files")


def test_the_home_folder_is_put_in_when_a_config_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data = DataConfig(
        source="files", files=("~/a.txt", "b.txt"), validation_files=("~/v.txt",), tfds_dir="~/t",
        tokenizer_file="~/t.json", cache_dir="~",
    )  # fmt: skip
    assert data.files == (f"{tmp_path}/a.txt", "b.txt") and data.validation_files == (f"{tmp_path}/v.txt",)
    assert (data.tfds_dir, data.tokenizer_file) == (f"{tmp_path}/t", f"{tmp_path}/t.json")
    assert data.cache_dir == str(tmp_path) and Config(workdir="~/runs/a").workdir == f"{tmp_path}/runs/a"
    assert DataConfig(text_field="~").text_field == "~"  # no path
    with pytest.raises(
        ConfigError, match=r"^config.workdir: '~nobody-here/a': no home folder is known for ~nobody-here"
    ):
        Config(workdir="~nobody-here/a")
    (tmp_path / "~backup.txt").touch()
    assert at_home("~backup.txt", "config.data.files") == "~backup.txt"


def test_names_of_other_libraries_are_fields_here_and_not_ours():
    """Each means a field that is there, and none is a field of the section that it is proposed in."""
    everywhere = {each.path.removesuffix(".kind") for each in reference(Config)}
    assert set(suggestions.CALLED) <= everywhere
    assert not set(suggestions.SYNONYMS) & {path.rpartition(".")[2] for path in suggestions.CALLED}
    for name, path in suggestions.SYNONYMS.items():
        section, _, rest = path.partition(".")
        for where, near in ((f"{section}.{name}", rest), (name, path)):
            with pytest.raises(ConfigError) as caught:
                Config(**{section: {name: 1}}) if "." in where else from_mapping({name: 1})
            if name not in {old.partition(".")[2] for old in ALIASES}:
                assert str(caught.value) == f"config.{where}: no such field; did you mean {near}?"

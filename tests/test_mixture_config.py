"""`data.mixture` from a config file and from the command line."""

import pytest

from jaxformer.config import DataConfig, Mixture, diff, from_mapping, to_dict
from jaxformer.config.registry import is_built_in
from jaxformer.errors import ConfigError

ENTRIES = {"prose": {"files": ["a.txt"], "weight": 3}, "code": {"source": "stdlib"}}


def made(mapping, **overrides):
    return from_mapping({"data": mapping}, {f"data.{name}": text for name, text in overrides.items()})


def test_it_is_what_it_was_given():
    config = made({"mixture": ENTRIES, "tokenizer": "bytes"})
    mixture = config.data.mixture
    assert config.data.source == "mixture" and mixture["code"].source == "stdlib" and mixture["prose"].source == "files"
    assert mixture.shares() == {"code": 0.25, "prose": 0.75} and is_built_in(config)
    assert (
        from_mapping(to_dict(config))
        == config
        == made({"mixture": dict(reversed(ENTRIES.items())), "tokenizer": "bytes"})
    )
    assert hash(config) == hash(from_mapping(to_dict(config))) and len({config, made({"mixture": ENTRIES})}) == 2
    assert Mixture(**ENTRIES) == mixture != Mixture(code=ENTRIES["code"])


def test_a_part_is_what_that_source_would_be_alone():
    shared = {"tokenizer": "bytes", "cache_dir": "c", "mask_rate": 0.3}
    parts = DataConfig(mixture=ENTRIES, **shared).parts()
    assert parts == {"code": DataConfig(source="stdlib", **shared), "prose": DataConfig(files=("a.txt",), **shared)}
    alone = DataConfig()
    assert alone.parts() == {"": alone}


def test_every_field_of_a_source_can_be_set_on_the_command_line():
    overrides = {"mixture.prose.weight": "0.5", "mixture.prose.separator": r"\n", "mixture.prose.files": "b,c"}
    prose = made({"mixture": ENTRIES}, **overrides).data.mixture["prose"]
    assert (prose.weight, prose.separator, prose.files) == (0.5, "\n", ("b", "c"))
    more = made({"mixture": ENTRIES}, **{"mixture.saved.hf_dir": "~/set"}).data.mixture
    assert list(more.by_name()) == ["code", "prose", "saved"] and more["saved"].source == "huggingface"
    alone = made({}, **{"mixture.only.source": "stdlib"})
    assert alone.data.mixture.shares() == {"only": 1.0}
    weights = (made({"mixture": ENTRIES}, **{"mixture.code.weight": weight}) for weight in ("1", "2"))
    assert diff(*map(to_dict, weights)) == ["data.mixture.code.weight: 1.0 -> 2.0"]


def test_of_a_source_that_the_command_line_adds_only_what_was_said_is_told():
    config, new = made({"mixture": {"prose": ENTRIES["prose"]}}), {"mixture.code.source": "stdlib"}
    more = made({"mixture": {"prose": ENTRIES["prose"]}}, **new, **{"mixture.code.weight": "0.5"})
    told = ["data.mixture.code.source: None -> 'stdlib'", "data.mixture.code.weight: 1.0 -> 0.5"]
    assert diff(to_dict(config), to_dict(more)) == told
    assert diff(to_dict(from_mapping({})), to_dict(made({}, **new))) == [
        told[0], "data.source: 'stdlib' -> 'mixture'",
    ]  # fmt: skip
    assert diff(to_dict(more), to_dict(config))[1] == "data.mixture.code.weight: 0.5 -> 1.0"


def test_the_command_line_chooses_the_source():
    """Whatever the file chose, for the whole and for each part."""
    assert made({"mixture": ENTRIES}, files="b").data == DataConfig(files="b")
    assert made({"mixture": ENTRIES}, source="stdlib").data == DataConfig(source="stdlib")
    assert made({"mixture": ENTRIES}, mixture="none").data == DataConfig()
    assert made({"files": "b"}, **{"mixture.a.source": "stdlib"}).data == DataConfig(
        mixture={"a": {"source": "stdlib"}}
    )
    part = made({"mixture": ENTRIES}, **{"mixture.code.files": "b", "mixture.prose.source": "stdlib"}).data.mixture
    assert (part["code"].source, part["code"].files) == ("files", ("b",))
    assert (part["prose"].source, part["prose"].files) == ("stdlib", ())


def test_errors_name_the_source():
    with pytest.raises(ConfigError, match=r"^config.data.mixture.code.language_order: 0; accepted: 1 to 20$"):
        made({"mixture": {"code": {"source": "markov", "language_order": 0}}})
    data = made({"mixture": ENTRIES}).data
    for line, named in {
        "config.data.files: a.txt:3: not JSON; data.on_error=skip skips it":
            "config.data.mixture.prose.files: a.txt:3: not JSON; data.mixture.prose.on_error=skip skips it",
        "config.data: the train text is empty": "config.data: the train text is empty (data.mixture.prose)",
        "config.data.cache_dir: /data.files is full": "config.data.cache_dir: /data.files is full (data.mixture.prose)",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError) as caught, data.naming("prose"):
            raise ConfigError(line)
        assert str(caught.value) == named
        with pytest.raises(ConfigError) as caught, data.naming(""):
            raise ConfigError(line)
        assert str(caught.value) == line

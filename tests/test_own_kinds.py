"""What the tables of kinds refuse when a config file adds to them; what is checked of a file's own kinds in a run."""

import functools
from dataclasses import dataclass

import jax
import pytest

from jaxformer import AttentionConfig, Dense, decoding, from_mapping
from jaxformer.config import FeedForwardConfig, PositionsConfig, registry
from jaxformer.config.loading import load
from jaxformer.config.registry import FAMILIES as TRAITS
from jaxformer.config.registry import FamilyTraits
from jaxformer.data.objectives import OBJECTIVES
from jaxformer.data.sources import SOURCES
from jaxformer.errors import ConfigError
from jaxformer.functional.sublayers import FEED_FORWARDS, MIXERS
from jaxformer.models import gpt
from jaxformer.models.families import FAMILIES, tasks_of
from jaxformer.specs import init_params

SOFTMAX = MIXERS["softmax"]
TABLES = (MIXERS, FEED_FORWARDS, FAMILIES, OBJECTIVES, SOURCES, AttentionConfig.registered, TRAITS,
          registry.OBJECTIVES, registry.SOURCES, FeedForwardConfig.registered)  # fmt: skip


@pytest.fixture(autouse=True)
def tables_as_they_were():
    before = [dict(table) for table in TABLES]
    yield
    for table, entries in zip(TABLES, before, strict=True):
        for name in set(table) - set(entries):
            dict.pop(table, name)
        for name, entry in entries.items():
            dict.__setitem__(table, name, entry)


def scaled(by):
    """Closures of one factory."""

    def cost(cfg, length, execution):
        return by

    return cost


@pytest.mark.parametrize("group, name", [(PositionsConfig, "Rotary"), (AttentionConfig, "Softmax")])
def test_a_class_of_the_same_name_replaces_no_kind(group, name):
    before = group.registered[name.lower()]
    with pytest.raises(ConfigError, match=rf"^config.model.\w+.kind: '{name.lower()}' is taken by jaxformer.config.*"):
        exec(f"class {name}(group, kind={name.lower()!r}): pass", {"group": group, "__name__": "config_file_mine"})
    assert group.registered[name.lower()] is before


@pytest.mark.parametrize("kind", ["", 3, True, *("auto", "xla", "chunked", "splash", "cudnn", "flash_gpu")])
def test_names_that_no_kind_may_have(kind):
    with pytest.raises(ConfigError, match=rf"^config.model.attention.kind: {kind!r} is the name of a kind; accepted: "):

        class Own(AttentionConfig, kind=kind):
            pass

    assert kind not in AttentionConfig.registered


@pytest.mark.parametrize("way", ["update", "__ior__", "setdefault"])
def test_every_way_into_a_table_is_the_same(way):
    other = SOFTMAX._replace(cost=scaled(1))
    if way != "setdefault":
        with pytest.raises(ConfigError, match=r"^config.model.attention.kind: 'softmax' is taken by jaxformer"):
            getattr(MIXERS, way)({"softmax": other})
        getattr(FAMILIES, way)({"own": FAMILIES["gpt"]})
    else:
        assert MIXERS.setdefault("softmax", other) is SOFTMAX
        assert FAMILIES.setdefault("own", FAMILIES["gpt"]) is FAMILIES["gpt"]
    assert TRAITS["own"] == FAMILIES["gpt"].traits


def test_what_tells_two_entries_apart():
    def taken(entry):
        with pytest.raises(ConfigError, match=r"^config.model.attention.kind: 'own' is taken by "):
            MIXERS["own"] = entry

    first, second = lambda *_: 1, lambda *_: 2  # fmt: skip
    MIXERS["own"] = own = SOFTMAX._replace(cost=scaled(1), apply=functools.partial(scaled, 1))
    MIXERS["own"] = own._replace(cost=scaled(1), apply=functools.partial(scaled, 1))
    taken(own._replace(cost=scaled(2)))
    taken(own._replace(apply=functools.partial(scaled, 2)))
    taken(own._replace(terms=("energy",)))
    OBJECTIVES["own"] = OBJECTIVES["masked"]._replace(prepare=first)
    with pytest.raises(ConfigError, match=r"^config.data.objective: 'masked' is taken by jaxformer"):
        OBJECTIVES["masked"] = OBJECTIVES["masked"]._replace(traits=OBJECTIVES["next_token"].traits)
    assert first.__qualname__ == second.__qualname__


def test_lambdas_of_two_lines_are_two(tmp_path):
    file = tmp_path / "mine.py"
    text = "from jaxformer.data.sources import SOURCES, Source\nSOURCES['own'] = Source(lambda *_: iter('ab'))\n"
    end = "def get_config():\n    return {}\n"
    file.write_text(text + end)
    load(str(file))
    load(str(file))  # read twice
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text("\n" + text + end)
    with pytest.raises(ConfigError, match=rf"^--config: {other}:3: config.data.source: 'own' is taken by .*<lambda>$"):
        load(str(other))


ENTRIES = {
    "config.model.attention.kind: '' is the name of an entry; accepted: ": (MIXERS, "", SOFTMAX),
    "config.model.attention.kind: 'own': 3; accepted: Sublayer": (MIXERS, "own", 3),
    "config.model.attention.kind: 'own': specs: None; accepted: a function": (
        MIXERS, "own", SOFTMAX._replace(specs=None)
    ),
    "config.model.feed_forward.kind: 'own': init_cache: 1; accepted: a function or None": (
        FEED_FORWARDS, "own", FEED_FORWARDS["dense"]._replace(init_cache=1)
    ),
    "config.model.attention.kind: 'own': terms: 'energy'; accepted: a tuple of names": (
        MIXERS, "own", SOFTMAX._replace(terms="energy")
    ),
    "config.data.objective: 'own': traits: share: 0.2; accepted: a function": (
        OBJECTIVES, "own", OBJECTIVES["masked"]._replace(traits=OBJECTIVES["masked"].traits._replace(share=0.2))
    ),
    "config.data.objective: 'own': ahead: -1; accepted: an integer, at least 0": (
        OBJECTIVES, "own", OBJECTIVES["masked"]._replace(ahead=-1)
    ),
    "config.model.family: 'own': traits: None; accepted: FamilyTraits": (
        FAMILIES, "own", FAMILIES["gpt"]._replace(traits=None)
    ),
    "config.model.family: 'own': traits: objectives: 'next_token'; accepted: a tuple of names": (
        FAMILIES, "own", FAMILIES["gpt"]._replace(traits=FamilyTraits(True, "next_token"))
    ),
    "config.data.source: 'own': opens_files: 1; accepted: True or False": (
        SOURCES, "own", SOURCES["stdlib"]._replace(opens_files=1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", ENTRIES)
def test_what_is_no_entry_is_refused_at_once(line):
    table, name, entry = ENTRIES[line]
    with pytest.raises(ConfigError) as caught:
        table[name] = entry
    assert str(caught.value).startswith(line)
    assert name not in table


def test_a_kind_may_be_read_twice(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom jaxformer import AttentionConfig\n@dataclass(frozen=True)\n"
        "class Own(AttentionConfig, kind='own'):\n    taps: int = 1\ndef get_config():\n    return {}\n"
    )
    load(str(file))
    load(str(file))
    assert AttentionConfig.registered["own"]().taps == 1


@pytest.mark.slow
def test_a_feed_forward_layer_need_not_say_that_it_keeps_nothing():
    @dataclass(frozen=True)
    class Own(Dense, kind="own"):
        """As a dense layer."""

    FEED_FORWARDS["own"] = FEED_FORWARDS["dense"]._replace(init_cache=None)
    cfg = from_mapping({"model": {"feed_forward": "own", "num_layers": 1, "width": 16, "vocab_size": 20}}).model
    assert isinstance(cfg.feed_forward, Own) and tasks_of(cfg) == ["generate"]
    params = jax.jit(lambda key: init_params(gpt.specs(cfg), key))(jax.random.key(0))
    out = decoding.generate(params, [[1, 2, 3]], cfg, rng=jax.random.key(1), max_new_tokens=3)
    assert out.lengths.tolist() == [3]


def test_a_family_that_nothing_trains():
    FAMILIES["own"] = FAMILIES["gpt"]._replace(traits=FamilyTraits(True, ()))
    line = "^config.data.objective: next_token; model.family=own; accepted: an objective that names it$"
    with pytest.raises(ConfigError, match=line):
        from_mapping({"model": {"family": "own"}})

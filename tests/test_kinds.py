"""Sections that have kinds, the names that fields had in earlier versions, and what overrides of a kind do."""

import dataclasses

import pytest

from jaxformer.config import (
    Alibi,
    Bert,
    Choice,
    Config,
    Dense,
    EncoderConfig,
    Execution,
    Learned,
    ModelConfig,
    Rotary,
    Softmax,
    aliases,
    diff,
    from_mapping,
    to_dict,
)  # fmt: skip
from jaxformer.errors import ConfigError

# A mapping as the version before had it, and what it is today.
OLD = {
    "family": "gpt", "num_layers": 2, "width": 32, "num_heads": 2, "num_kv_heads": 1, "head_width": None,
    "mlp_width": None, "context_length": 16, "vocab_size": 64, "block": "pre_norm", "norm": "rms_norm",
    "norm_epsilon": 1e-5, "activation": "swiglu", "use_bias": False, "positions": "rotary", "rotary_base": 500.0,
    "rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_original_length": None, "window": 3, "qk_norm": True,
    "attention_soft_cap": 2.0, "attention": "chunked", "dropout": 0.1, "attention_dropout": 0.2, "tie_embeddings": True,
    "token_types": 0, "next_sentence": False, "initializer": "gpt2", "remat": "dots", "layers": "scan",
    "dtype": "bfloat16",
}  # fmt: skip
NEW = ModelConfig(
    num_layers=2, width=32, context_length=16, vocab_size=64, norm="rms_norm", use_bias=False, dropout=0.1,
    dtype="bfloat16", attention=Softmax(2, 1, window=3, qk_norm=True, soft_cap=2.0, dropout=0.2),
    positions=Rotary(500.0, "yarn", 2.0), feed_forward=Dense(activation="swiglu"),
)  # fmt: skip


def test_a_whole_model_of_the_version_before():
    old = {
        "model": OLD,
        "train": {"batch_rows": 8, "micro_batches": 2, "steps_per_dispatch": 5},
        "mesh": {"shard_norms": True},
    }
    made = from_mapping(old)
    assert made.model == NEW
    assert made.execution == Execution("dots", "scan", "chunked", 5, 2)
    assert made.train.global_batch_size == 8 and made.mesh.sequence_parallel
    assert old["model"] is OLD and "num_heads" in OLD  # the mapping is left alone
    assert from_mapping(to_dict(made)) == made


def test_every_old_field_has_a_new_one():
    fields = {f"model.{name}" for name in OLD} - {"model.attention"}
    today = {f"model.{each.name}" for each in dataclasses.fields(ModelConfig)}
    assert fields - today <= set(aliases.ALIASES)
    for new in aliases.ALIASES.values():
        tree = to_dict(from_mapping({"model": {"positions": "rotary", "family": "bert", "bert": {}},
                                     "data": {"objective": "masked"}}))  # fmt: skip
        tree["model"]["encoder"] = vars(EncoderConfig())  # which a bert has not
        for name in new.split("."):
            tree = tree[name]


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "alibi", "t5", "none"])
def test_old_fields_that_meant_nothing(positions):
    """A manifest holds every field, those of rotary positions too where there are none."""
    made = from_mapping({"model": {**OLD, "positions": positions, "rotary_scaling": "none", "rotary_factor": 1.0}})
    assert made.model.positions.kind == positions
    with pytest.raises(ConfigError, match=r"^config.model.positions.scaling: no such field; accepted with "):
        from_mapping({"model": {**OLD, "positions": positions, "rotary_factor": 1.0}})


def test_sentence_types_of_the_version_before():
    def made(**model):
        return from_mapping({"model": {"family": "bert", **model}, "data": {"objective": "masked"}}).model.bert

    assert made(token_types=0, next_sentence=False) is None
    assert made(token_types=3) == Bert(3, False)
    assert made() is None and made(bert={}) == Bert()
    assert from_mapping({}, {"model.token_types": "0", "model.next_sentence": "False"}).model.bert is None
    assert from_mapping({"model": {"family": "bert", "bert": {}}, "data": {"objective": "masked"}},
                        {"model.token_types": "0"}).model.bert == Bert(0)  # fmt: skip


def test_old_names_on_the_command_line():
    config = from_mapping(
        {"model": {"positions": "rotary"}},
        {"model.num_heads": "2", "model.attention": "xla", "model.rotary_base": "100", "train.batch_rows": "32",
         "train.micro_batches": "4", "model.remat": "full", "mesh.shard_norms": "true", "model.mlp_width": "7"},
    )  # fmt: skip
    assert config.model.attention == Softmax(2) and config.model.positions == Rotary(100.0)
    assert config.execution == Execution(remat="full", attention="xla", gradient_accumulation_steps=4)
    assert (config.train.global_batch_size, config.mesh.sequence_parallel) == (32, True)
    assert config.model.feed_forward == Dense(7)


def test_the_diff_of_two_kinds_is_their_names():
    old, new = (to_dict(from_mapping({"model": {"positions": kind}})) for kind in ("rotary", "alibi"))
    assert diff(old, new) == ["model.positions.kind: 'rotary' -> 'alibi'"]
    assert diff({}, {"kind": "a", "b": 1}) == ["b: None -> 1", "kind: None -> 'a'"]


def test_a_field_under_both_names():
    line = r"^config.model.num_heads: 2; it is config.model.attention.num_heads now, which is given as well$"
    with pytest.raises(ConfigError, match=line):
        from_mapping({"model": {"num_heads": 2, "attention": {"num_heads": 4}}})


@pytest.mark.parametrize("texts", [
    {"model.num_heads": "2", "model.attention.num_heads": "4"},
    {"model.attention.num_heads": "4", "model.num_heads": "2"},
])  # fmt: skip
def test_a_field_under_both_names_on_the_command_line(texts):
    line = r"^config.model.num_heads: '2'; it is config.model.attention.num_heads now, which is given as well$"
    with pytest.raises(ConfigError, match=line):
        from_mapping({}, texts)
    same = dict.fromkeys(texts, "2")
    assert from_mapping({}, same).model.attention.num_heads == 2
    with pytest.raises(ConfigError, match=r"^config.model.positions: 'rotary'; it is config.model.positions.kind now"):
        from_mapping({}, {"model.positions": "rotary", "model.positions.kind": "alibi"})


def test_a_section_that_is_null_is_none_with_overrides_too():
    for mapping, where in (({"model": None}, "model"), ({"model": {"positions": None}}, "model.positions")):
        for texts in ({}, {"model.positions.base": "3"}):
            with pytest.raises(ConfigError, match=rf"^config.{where}: None is not "):
                from_mapping(mapping, texts)


@pytest.mark.parametrize("dotted", ["model.positions", "model.positions.kind"])
def test_a_kind_on_the_command_line(dotted):
    """It comes first, whatever the order, and takes along only what it has."""
    file = {"model": {"positions": {"kind": "rotary", "base": 500.0}}}
    assert from_mapping(file, {dotted: "alibi"}).model.positions == Alibi()
    assert from_mapping(file, {dotted: "rotary"}).model.positions == Rotary(500.0)
    wanted = Rotary(500.0, "linear", 2.0)
    texts = {"model.positions.scaling": "linear", dotted: "rotary", "model.positions.factor": "2"}
    assert from_mapping(file, texts).model.positions == wanted
    assert from_mapping({}, texts | {"model.positions.base": "500"}).model.positions == wanted
    with pytest.raises(ConfigError, match=r"^config.model.positions.kind: 'rotery' is not one of .*; did you mean rot"):
        from_mapping(file, {dotted: "rotery"})


def test_a_field_of_another_kind():
    line = r"^config.model.positions.base: no such field; accepted with config.model.positions.kind=rotary$"
    for mapping, texts in (
        ({"model": {"positions": {"base": 3.0}}}, {}),
        ({}, {"model.positions.base": "3"}),
        ({"model": {"positions": "alibi"}}, {"model.rotary_base": "3"}),
    ):
        with pytest.raises(ConfigError, match=line):
            from_mapping(mapping, texts)
    with pytest.raises(ConfigError, match=r"^config.model.attention.windw: no such field; did you mean window\?$"):
        from_mapping({}, {"model.attention.windw": "3"})


def test_a_section_that_may_be_absent():
    bert = {"model": {"family": "bert"}, "data": {"objective": "masked"}}
    assert from_mapping(bert, {"model.bert.token_types": "3"}).model.bert == Bert(3)
    assert from_mapping({**bert, "model": {"family": "bert", "bert": {}}}, {"model.bert": "none"}).model.bert is None
    line = r"^config.model.bert: 'true' is not a section; set one of token_types, next_sentence, mask_decoder "
    with pytest.raises(ConfigError, match=line):
        from_mapping(bert, {"model.bert": "true"})


def test_values_in_python():
    assert ModelConfig(positions="alibi").positions == Alibi() and ModelConfig().positions == Learned()
    assert ModelConfig(attention={"num_heads": 2}).attention == Softmax(2)
    assert Config(model={"width": 64, "positions": {"kind": "rotary"}}).model.positions == Rotary()
    assert hash(NEW) == hash(dataclasses.replace(NEW)) and to_dict(NEW)["positions"]["kind"] == "rotary"
    with pytest.raises(
        ConfigError,
        match=r"^config.model.attention: Alibi\(\) is not one of softmax, alignment, [a-z_, ]+, or a section ",
    ):
        ModelConfig(attention=Alibi())


def test_kinds_of_one_s_own():
    class Tea(Choice, group="tea", default="green"):
        pass

    @dataclasses.dataclass(frozen=True)
    class Green(Tea, kind="green"):
        pass

    assert Tea.accept("green", "config.tea") == Green()
    with pytest.raises(ConfigError, match=r"^config.tea.kind: 'green' is taken by .*Green$"):

        class Other(Tea, kind="green"):
            pass

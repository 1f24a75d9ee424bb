"""One override puts another mechanism into a config that comes with jaxformer: sizes that are not given follow from the
row's length, and positions are the first of those that the config names which the mechanism can have."""

from dataclasses import replace

import pytest

from jaxformer.config import BigBird, Dilated, Fixed, Longformer, ModelConfig, Strided, from_mapping, load
from jaxformer.config.reading import to_dict
from jaxformer.errors import ConfigError

WITH_SCORES = ("softmax", "longformer", "bigbird", "strided", "fixed", "dilated")
WITHOUT = {"linear": "rotary", "performer": "rotary", "lsh": "sinusoidal", "lstm": "none", "gru": "none"}


@pytest.mark.parametrize("kind", [*WITH_SCORES, *WITHOUT])
def test_configs_by_one_override(kind):
    study = {name: section for name, section in load("scaling_tiny").items() if name != "ladder"}
    scores = kind in WITH_SCORES
    small = from_mapping(study, {"model.attention": kind}).model
    assert small.attention.kind == kind
    assert small.positions.kind == ("t5" if scores else WITHOUT[kind].replace("rotary", "sinusoidal"))
    gpt = from_mapping(load("gpt_tiny"), {"model.attention": kind})
    assert gpt.model.positions.kind == ("rotary" if scores else WITHOUT[kind])
    assert from_mapping(to_dict(gpt)) == gpt  # a manifest holds what was chosen
    if kind not in ("lstm", "gru"):
        assert from_mapping(load("bert_tiny"), {"model.attention": kind}).model.positions == gpt.model.positions


def test_positions_are_the_first_that_suit():
    def of(kinds, **more):
        data = {"objective": "masked"} if more.get("family") == "bert" else {}
        return from_mapping({"model": {"positions": kinds, **more}, "data": data}).model.positions

    assert of("alibi or rotary").kind == "alibi"
    assert of("alibi or rotary", attention="linear").kind == "rotary"
    assert of("rotary or learned", attention={"kind": "lsh", "chunk": 16}).kind == "learned"
    assert of("disentangled or rotary", attention="strided").kind == "rotary"
    assert of("disentangled or rotary", family="bert").kind == "disentangled"
    assert of("learned or none", attention="gru").kind == "none" and of("learned", attention="gru").kind == "learned"
    assert of({"kind": "rotary or none", "base": 500.0}).base == 500
    assert of({"kind": "rotary or none", "base": 500.0}, attention="gru").kind == "none"  # a base means nothing there
    assert of(" rotary  or  none ").kind == "rotary"
    overridden = from_mapping(load("gpt_tiny"), {"model.positions.base": "500", "model.positions": "alibi or rotary",
                                                 "model.attention": "linear"})  # fmt: skip
    assert overridden.model.positions.base == 500
    family = {"model": {"family": "xlnet", "positions": "sinusoidal or rotary"}, "data": {"objective": "permutation"}}
    assert from_mapping(family).model.positions.kind == "rotary"  # xlnet needs positions beside the embeddings


@pytest.mark.parametrize(("fields", "line"), [
    ({"bsae": 500.0}, "bsae: no such field; did you mean base"),
    ({"base": -5.0}, "base: -5.0; accepted: a finite number above 1"),
    ({"base": "x"}, "base: 'x' is not a number"),
])  # fmt: skip
@pytest.mark.parametrize("attention", ["softmax", "gru"])
def test_fields_are_those_of_one_of_the_kinds(fields, line, attention):
    """A wrong one is refused even where the kind that would have it is not chosen."""
    with pytest.raises(ConfigError, match=f"^config.model.positions.{line}"):
        from_mapping({"model": {"positions": {"kind": "rotary or none", **fields}, "attention": attention}})


@pytest.mark.parametrize("kinds", ["rotary or nine", "t5 or alibi"])
def test_none_that_suits(kinds):
    line = "'nine' is not one of" if "nine" in kinds else (
        "t5 or alibi; none of them suits model.attention.kind=linear; accepted: one or more of learned, sinusoidal, "
        "rotary, none among them"
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"^config.model.positions.kind: {line}"):
        from_mapping({"model": {"positions": kinds, "attention": "linear"}})


def test_sizes_are_the_published_ones_at_the_published_lengths():
    assert Longformer().fitted(4096).attention_window == 512
    assert BigBird().fitted(4096).block == 64
    assert Strided().fitted(16384).stride == 128
    assert Fixed().fitted(16384) == Fixed(block=128, last=8)


@pytest.mark.parametrize("length", [1, 2, 6, 8, 60, 64, 96, 256, 2**24])
def test_sizes_that_follow_from_the_length(length):
    """They are accepted at every such length, and given ones stay. The config keeps what was given: at another length
    they follow from that one."""
    for kind in ("longformer", "bigbird", "strided", "fixed", "dilated"):
        model = ModelConfig(attention={"kind": kind}, context_length=length)
        given = ModelConfig(attention=model.fitted_attention, context_length=length)
        assert given.attention == given.fitted_attention == model.fitted_attention != model.attention
        longer = replace(model, context_length=length * 4)
        assert (
            longer.fitted_attention == ModelConfig(attention={"kind": kind}, context_length=4 * length).fitted_attention
        )
    block = Fixed().fitted(length).block
    assert length % block == 0 and length / 4 <= block**2 <= length
    assert all(length % each for each in range(block + 1, int(length**0.5) + 1))
    assert Longformer(attention_window=10).fitted(length).attention_window == 10
    assert Fixed(last=1).fitted(length).block == block
    assert Dilated().fitted(length).size == max(1, length // 16) and Dilated(step=2).fitted(64).size == 8


@pytest.mark.parametrize("length", [7, 127, 254, 257])
def test_lengths_without_a_divisor_near_their_root(length):
    """Blocks of one or two tokens would be no pattern. A block that is given stands."""
    for kind in ("bigbird", "fixed"):
        with pytest.raises(ConfigError, match=f"^config.model.context_length: {length} has no divisor near its square"):
            ModelConfig(attention={"kind": kind}, context_length=length)
        assert ModelConfig(attention={"kind": kind, "block": length}, context_length=length).attention.block == length


def test_last_tokens_beyond_a_block_that_follows_from_the_length():
    with pytest.raises(ConfigError, match=r"^config.model.attention.last: 9; accepted: 1 to model.attention.block 8$"):
        ModelConfig(attention={"kind": "fixed", "last": 9}, context_length=64)

"""Specs: one description; initial values, shapes, axes, counts and the decay mask all follow from it."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config

from jaxformer import specs
from jaxformer.functional.block import block_specs
from jaxformer.functional.layer import weight_init
from jaxformer.models import bert, gpt
from jaxformer.specs import ParamSpec, normal, ones, uniform, zeros

TREE = {
    "a": {
        "w": ParamSpec((3, 5), ("embed", "mlp"), normal(2.0), "hidden"),
        "b": ParamSpec((5,), ("mlp",), zeros, "bias"),
    },
    "norm": {"scale": ParamSpec((3,), ("norm",), ones, "norm")},
    "heads": {"bias": ParamSpec((2, 4), ("heads", "head_width"), zeros, "bias")},
}


def rng(seed=0):
    return jax.random.key(seed)  # a new one each time: keys that are used twice raise


FAMILIES = [
    (family, model_config(**common, **own))
    for common in [dict(num_layers=3, width=24, num_heads=3, vocab_size=10, context_length=5)]
    for family, own in [
        (gpt, {}),
        (gpt, dict(use_bias=False, norm="rms_norm", activation="swiglu", positions="rotary", tie_embeddings=False)),
        (gpt, dict(block="parallel", positions="t5", num_kv_heads=1)),
        (bert, dict(family="bert", block="post_norm", token_types=2, next_sentence=True)),
        (bert, dict(family="bert", tie_embeddings=False, activation="geglu")),
    ]
]


def test_one_axis_name_per_dimension():
    with pytest.raises(ValueError, match=r"ParamSpec: shape \(3, 5\) and axes \('embed',\) differ in length"):
        ParamSpec((3, 5), ("embed",), zeros, "bias")


def test_everything_follows_from_the_specs():
    params = specs.init_params(TREE, rng())
    assert jax.tree.map(lambda p: (p.shape, str(p.dtype)), params) == {
        "a": {"w": ((3, 5), "float32"), "b": ((5,), "float32")},
        "norm": {"scale": ((3,), "float32")},
        "heads": {"bias": ((2, 4), "float32")},
    }
    abstract = specs.abstract_params(TREE)
    assert jax.tree.map(lambda a: (a.shape, str(a.dtype)), abstract) == jax.tree.map(
        lambda p: (p.shape, str(p.dtype)), params
    )
    assert specs.abstract_params(TREE, jnp.bfloat16)["a"]["w"].dtype == jnp.bfloat16
    assert specs.param_axes(TREE)["a"] == {"w": ("embed", "mlp"), "b": ("mlp",)}
    assert specs.count_params(TREE) == sum(p.size for p in jax.tree.leaves(params)) == 31
    assert specs.count_by_group(TREE) == {"a": 20, "norm": 3, "heads": 8}
    np.testing.assert_array_equal(params["norm"]["scale"], 1)
    np.testing.assert_array_equal(params["a"]["b"], 0)


def decays(tree):
    return jax.tree.map(lambda spec: spec.decay > 0, tree, is_leaf=specs.is_spec)


def test_the_role_says_what_decays():
    for tree in (TREE, specs.stack_specs(TREE, 2)):
        assert decays(tree) == {"a": {"w": True, "b": False}, "norm": {"scale": False}, "heads": {"bias": False}}


def test_a_role_that_does_not_exist_and_a_matrix_without_outputs_are_refused():
    with pytest.raises(ValueError, match="role 'hiden'; accepted: input, hidden, output, norm, bias"):
        ParamSpec((3, 5), ("embed", "mlp"), zeros, "hiden")
    for num_inputs in (0, 2):
        with pytest.raises(ValueError, match=f"num_inputs {num_inputs} of the hidden matrix"):
            ParamSpec((3, 5), ("embed", "mlp"), zeros, "hidden", num_inputs)


def test_only_trained_and_back():
    tree = {"a": ParamSpec((2,), (None,), ones, "norm", trained=False), "b": ParamSpec((2,), (None,), ones, "norm")}
    assert specs.only_trained({"a": 1, "b": 2}, tree) == {"a": None, "b": 2}
    assert specs.with_trained({"a": 1, "b": 2}, {"a": None, "b": 3}, tree) == {"a": 1, "b": 3}


@pytest.mark.parametrize("family, cfg", FAMILIES)
def test_no_bias_and_no_scale_of_a_model_decays(family, cfg):
    flat, _ = jax.tree_util.tree_flatten_with_path(decays(family.specs(cfg)))
    for path, decayed in flat:
        name = path[-1].key
        assert decayed == (not (name.startswith("b_") or name in ("b", "bias", "scale"))), path


@pytest.mark.parametrize("family, cfg", FAMILIES)
def test_axes_of_models_name_equal_sizes(family, cfg):
    """An axis name means one size within a model, so that a sharding rule for it always divides."""
    sizes = {}
    for spec in jax.tree.leaves(family.specs(cfg), is_leaf=specs.is_spec):
        for name, size in zip(spec.axes, spec.shape, strict=True):
            if name not in (None, "positions"):  # a position table and T5's buckets share the name
                sizes.setdefault(name, set()).add(size)
    assert all(len(values) == 1 for values in sizes.values()), sizes


def test_stacking_adds_a_layer_axis_and_draws_each_layer_anew():
    stacked = specs.stack_specs(TREE, 4)
    assert stacked["a"]["w"].shape == (4, 3, 5) and stacked["a"]["w"].axes == ("layers", "embed", "mlp")
    w = np.asarray(specs.init_params(stacked, rng())["a"]["w"])
    assert all(not np.array_equal(w[i], w[j]) for i, j in itertools.combinations(range(4), 2))


def test_a_parameter_does_not_depend_on_its_neighbours():
    params = specs.init_params(TREE, rng())
    more = specs.init_params({"0": TREE["a"]["w"], "a": {**TREE["a"], "0": TREE["a"]["w"]}}, rng())
    np.testing.assert_array_equal(params["a"]["w"], more["a"]["w"])
    assert not np.array_equal(more["0"], more["a"]["w"]) and not np.array_equal(more["a"]["0"], more["a"]["w"])


def test_the_rng_decides():
    one, same = specs.init_params(TREE, rng()), specs.init_params(TREE, rng())
    other = specs.init_params(TREE, rng(1))
    np.testing.assert_array_equal(one["a"]["w"], same["a"]["w"])
    assert not np.array_equal(one["a"]["w"], other["a"]["w"])


def test_init_is_jittable():
    compiled = jax.jit(lambda key: specs.init_params(TREE, key))(rng())
    np.testing.assert_allclose(compiled["a"]["w"], specs.init_params(TREE, rng())["a"]["w"], rtol=1e-6)


SIZE = 40_000


def std_within(values, std, sigmas=5):
    """The sample's deviation and mean lie within `sigmas` of what a normal or uniform sample of its size gives."""
    n = values.size
    assert abs(values.std() / std - 1) < sigmas / math.sqrt(2 * n)
    assert abs(values.mean()) < sigmas * std / math.sqrt(n)


@pytest.mark.parametrize("initialiser, std", [(normal(0.02), 0.02), (normal(3.0), 3.0), (uniform(0.3), 0.3 / 3**0.5)])
def test_standard_deviations(initialiser, std):
    values = np.asarray(initialiser(rng(), (200, SIZE // 200)), np.float64)
    std_within(values, std)


def test_uniform_stays_within_its_limit_and_fills_it():
    values = np.asarray(uniform(0.3)(rng(), (SIZE,)))
    assert 0.2999 < values.max() <= 0.3 and -0.3 <= values.min() < -0.2999


@pytest.mark.parametrize(
    "initializer, residual, std",
    [
        ("gpt2", False, 0.02),
        ("gpt2", True, 0.02 / math.sqrt(2 * 8)),
        ("scaled", False, 100**-0.5),
        ("scaled", True, 100**-0.5 / math.sqrt(2 * 8)),
        ("glorot", False, math.sqrt(2 / (100 + 400))),
        ("glorot", True, math.sqrt(2 / (100 + 400))),
    ],
)
def test_the_stated_initialisers(initializer, residual, std):
    cfg = model_config(num_layers=8, initializer=initializer)
    std_within(np.asarray(weight_init(cfg, 100, 400, residual=residual)(rng(), (100, 400)), np.float64), std)


@pytest.mark.parametrize("initializer", ["gpt2", "scaled", "glorot"])
def test_every_matrix_of_a_block_has_the_stated_deviation(initializer):
    """Fans are those of the flattened matrices, and only the two that write into the residual stream shrink."""
    cfg = model_config(
        num_layers=4, width=96, num_heads=4, num_kv_heads=2, head_width=40, mlp_width=200, activation="swiglu",
        initializer=initializer,
    )  # fmt: skip
    params = specs.init_params(block_specs(cfg), rng())
    fans = {
        "w_query": (96, 160), "w_key": (96, 80), "w_value": (96, 80), "w_out": (160, 96),
        "w_up": (96, 200), "w_gate": (96, 200), "w_down": (200, 96),
    }  # fmt: skip
    for name, value in (params["attention"] | params["mlp"]).items():
        value = np.asarray(value, np.float64)
        if name.startswith("b_"):
            assert not value.any()
            continue
        fan_in, fan_out = fans[name]
        assert value.size == fan_in * fan_out
        std = {"gpt2": 0.02, "scaled": fan_in**-0.5, "glorot": math.sqrt(2 / (fan_in + fan_out))}[initializer]
        if name in ("w_out", "w_down") and initializer != "glorot":
            std /= math.sqrt(2 * 4)
        std_within(value, std)


@pytest.mark.parametrize("initializer, std", [("gpt2", 0.02), ("scaled", 64**-0.5), ("glorot", 64**-0.5)])
def test_tables_have_the_stated_deviation(initializer, std):
    cfg = model_config(width=64, num_heads=2, num_layers=1, vocab_size=300, context_length=200, initializer=initializer)
    params = specs.init_params({"e": gpt.specs(cfg)["embedding"]}, rng())["e"]
    std_within(np.asarray(params["tokens"], np.float64), std)
    std_within(np.asarray(params["positions"], np.float64), std)


def test_published_sizes():
    """Parameter counts as published: GPT-2 (124M), BERT base uncased with its pooler, Llama 7B."""
    gpt2 = model_config(num_layers=12, width=768, num_heads=12, context_length=1024, vocab_size=50257)
    assert specs.count_params(gpt.specs(gpt2)) == 124_439_808

    base = model_config(
        family="bert", block="post_norm", num_layers=12, width=768, num_heads=12, context_length=512,
        vocab_size=30522, token_types=2, next_sentence=True,
    )  # fmt: skip
    groups = specs.count_by_group(bert.specs(base))
    assert sum(groups.values()) - groups["head"] - groups["next_sentence"] == 109_482_240
    # The masked-token head: dense 768 x 768 and its bias, a norm, the output bias; the next-sentence head: 2 x 768.
    assert groups["head"] == 768 * 768 + 768 + 2 * 768 + 30522 and groups["next_sentence"] == 2 * 768 + 2

    llama = model_config(
        num_layers=32, width=4096, num_heads=32, mlp_width=11008, vocab_size=32000, context_length=2048,
        norm="rms_norm", activation="swiglu", positions="rotary", use_bias=False, tie_embeddings=False,
    )  # fmt: skip
    assert specs.count_params(gpt.specs(llama)) == 6_738_415_616

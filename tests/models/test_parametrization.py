"""muP: the table row by row, what the model computes in the standard one's terms, and that the base is unchanged."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig, MuP, OptimizerConfig, Softmax, TuneConfig, from_mapping
from jaxformer.errors import ConfigError
from jaxformer.models import gpt
from jaxformer.models.tuning import tuned
from jaxformer.scaling.ladder import StudyConfig, run_config, runs, size_model, starting_rate
from jaxformer.specs import ParamSpec, abstract_params, is_spec, stack_specs, zeros
from jaxformer.training.optim import make_optimizer


def model(**changed):
    fields = {"num_layers": 2, "width": 32, "attention": Softmax(num_heads=4), "context_length": 8, "vocab_size": 32}
    return ModelConfig(**{**fields, "tie_embeddings": False, **changed})


def wide(**mup):
    """Four times wider, and four times as many layers, as the base."""
    return model(num_layers=8, width=256, parametrization=MuP(base_width=64, base_layers=2, **mup))


# Written out by hand from Dey et al. 2025, table 1, for m = 4 and l = 4: rate, decay and epsilon at alpha 1 and at 1/2.
TABLE = {
    "embedding.tokens": ((1, 1, 1 / 4), (1, 1, 1 / 4)),
    "embedding.positions": ((1, 1, 1 / 4), (1, 1, 1 / 4)),
    "head.table": ((1, 1, 1 / 4), (1, 1, 1 / 4)),
    "blocks.attention.w_query": ((1 / 4, 4, 1 / 16), (1 / 8, 4, 1 / 8)),
    "blocks.attention.w_out": ((1 / 4, 4, 1 / 16), (1 / 8, 4, 1 / 8)),
    "blocks.mlp.w_up": ((1 / 4, 4, 1 / 16), (1 / 8, 4, 1 / 8)),
    "blocks.mlp.w_down": ((1 / 4, 4, 1 / 16), (1 / 8, 4, 1 / 8)),
    "blocks.mlp.b_up": ((1, 0, 1 / 16), (1 / 2, 0, 1 / 8)),
    "blocks.attention.b_out": ((1, 0, 1 / 16), (1 / 2, 0, 1 / 8)),
    "blocks.mlp_norm.scale": ((1, 0, 1 / 16), (1 / 2, 0, 1 / 8)),
    "final_norm.scale": ((1, 0, 1 / 4), (1, 0, 1 / 4)),
    "final_norm.bias": ((1, 0, 1 / 4), (1, 0, 1 / 4)),
}


def by_name(cfg):
    leaves = jax.tree_util.tree_leaves_with_path(gpt.specs(cfg), is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in leaves}


@pytest.mark.parametrize(("number", "alpha"), [(0, 1.0), (1, 0.5)])
def test_the_table_row_by_row(number, alpha):
    specs = by_name(wide(alpha=alpha))
    for name, rows in TABLE.items():
        assert (specs[name].rate, specs[name].decay, specs[name].epsilon) == rows[number], name


def test_the_ablations_change_their_row_alone():
    for name, rows in TABLE.items():
        rate, decay, epsilon = rows[0]
        changed = by_name(wide(embedding_rate_exponent=-0.5, decay_exponent=0.0))[name]
        table = name.startswith(("embedding", "head"))
        assert (changed.rate, changed.decay) == (rate / 2 if table else rate, min(decay, 1)), name
        assert changed.epsilon == epsilon


# Standard deviations at width 256, where the base is 64 wide: of a matrix from 256 to 256 and of a table.
DEVIATIONS = {
    "gpt2": (0.02 / 2, 0.02),
    "scaled": (1 / 16, 1 / 8),
    "glorot": ((6 / 512 / 3) ** 0.5, 1 / 8),
    "t5": (1 / 16, 1.0),
}


@pytest.mark.parametrize("initializer", DEVIATIONS)
def test_initial_values_are_those_of_the_base_over_the_root_of_m(initializer):
    specs = by_name(replace(wide(), initializer=initializer))
    for name, wanted in zip(("blocks.attention.w_out", "embedding.tokens"), DEVIATIONS[initializer], strict=True):
        drawn = np.asarray(specs[name].init(jax.random.key(0), specs[name].shape))
        assert drawn.std() == pytest.approx(wanted, rel=0.02), name


def test_at_the_base_all_is_as_in_the_standard_parametrization():
    """To the bit and to the program, but for the initial values that GPT-2 divides by sqrt(2 layers)."""
    at_base = MuP(base_width=32, base_layers=2, base_head_width=8)
    standard, mup = model(), model(parametrization=at_base)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    def program(cfg):
        return jax.jit(functools.partial(gpt.apply, cfg=cfg)).lower(abstract_params(gpt.specs(cfg)), tokens).as_text()

    assert program(standard) == program(mup)
    specs, others = by_name(standard), by_name(mup)
    assert all(replace(others[name], init=spec.init) == spec for name, spec in specs.items())  # so updates are the same
    for name, factor in (("blocks.mlp.w_up", 1), ("blocks.mlp.w_down", 2), ("blocks.attention.w_out", 2)):
        old, new = (each[name].init(jax.random.key(1), each[name].shape) for each in (specs, others))
        np.testing.assert_array_equal(old * factor, new)  # sqrt(2 layers)


@pytest.mark.parametrize(
    "block", ["pre_norm", *(pytest.param(each, marks=pytest.mark.slow) for each in ("parallel", "sandwich"))]
)
def test_forward_multipliers_by_the_standard_model(block):
    """Everything that is multiplied is linear in some parameter: multiplying that instead gives the same logits."""
    mup = model(block=block, parametrization=MuP(base_width=8, base_layers=1, base_head_width=2))
    standard = model(block=block, attention=Softmax(num_heads=4, scale=8**-0.5 / 2))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(size=spec.shape).astype(np.float32), gpt.specs(mup), is_leaf=is_spec)
    blocks, halved = params["blocks"], ("attention_out_norm", "mlp_out_norm")
    if block == "sandwich":
        other = blocks | {name: jax.tree.map(lambda x: x / 2, blocks[name]) for name in halved}
    else:
        last = {"attention": ("w_out", "b_out"), "mlp": ("w_down", "b_down")}
        other = blocks | {
            group: blocks[group] | {name: blocks[group][name] / 2 for name in names} for group, names in last.items()
        }
    same = params | {"blocks": other, "head": {"table": params["head"]["table"] / 4}}
    tokens = jnp.arange(16).reshape(2, 8)
    logits = [jax.jit(functools.partial(gpt.apply, cfg=cfg))(p, tokens) for p, cfg in ((params, mup), (same, standard))]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_updates_of_every_rule_by_those_of_the_base():
    """The first update of a hidden matrix is 1 / m of the base's, and its decay the same."""
    stacked = {"w": ParamSpec((8, 8), ("embed", "mlp"), zeros, "hidden")}
    base = {"blocks": stack_specs(stacked, 2)}
    params = {"blocks": {"w": jax.random.normal(jax.random.key(0), (2, 8, 8))}}
    grads = {"blocks": {"w": jax.random.normal(jax.random.key(1), (2, 8, 8))}}
    multiplied = {"blocks": {"w": replace(base["blocks"]["w"], rate=0.25, decay=4.0, epsilon=0.25)}}

    def update(specs, name, params):
        cfg = OptimizerConfig(name=name, learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.5)
        rule = make_optimizer(cfg, 1, specs)
        return rule.update(grads, rule.init(params), params)[0]["blocks"]["w"]

    nothing = jax.tree.map(jnp.zeros_like, params)
    for name in ("adamw", "lion", "muon"):
        moved, kept = update(base, name, nothing), update(base, name, params)
        np.testing.assert_allclose(update(multiplied, name, nothing), moved / 4, rtol=1e-5)
        decay = update(multiplied, name, params) - moved / 4
        np.testing.assert_allclose(decay, kept - moved, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(decay, -0.25 * params["blocks"]["w"], rtol=1e-4, atol=1e-6)


def test_epsilon_is_multiplied():
    """With a gradient as large as epsilon / 4, where epsilon is a quarter, Adam's first update is half its rate."""
    spec = {"w": ParamSpec((2, 2), ("embed", "mlp"), zeros, "hidden", epsilon=0.25)}
    rule = make_optimizer(
        OptimizerConfig(learning_rate=1.0, schedule="constant", warmup_steps=0, epsilon=1e-3, weight_decay=0), 1, spec
    )
    params = {"w": jnp.zeros((2, 2))}
    moved = rule.update({"w": jnp.full((2, 2), 2.5e-4)}, rule.init(params), params)[0]["w"]
    np.testing.assert_allclose(moved, -0.5, rtol=1e-5)


def test_layer_rates_multiply_those_of_the_table():
    specs = tuned(gpt.specs(wide()), TuneConfig(layer_decay=0.5), 8)
    assert specs["blocks"]["mlp"]["w_up"].rate == tuple(0.25 * 0.5 ** (7 - layer) for layer in range(8))
    assert specs["embedding"]["tokens"].rate == 0.5**8


def test_a_ladder_has_one_base_and_one_rate():
    study = from_mapping(
        {
            "model": {"vocab_size": 256, "parametrization": {"kind": "mup", "base_width": 64, "base_layers": 2}},
            "ladder": {"widths": [64, 128, 256], "tokens": [1_000_000], "learning_rate_exponent": 0},
        },
        cls=StudyConfig,
    )
    sizes = [size_model(study.model, width, study.ladder) for width in study.ladder.widths]
    assert [(m.parametrization.width_ratio(m), m.parametrization.depth_ratio(m)) for m in sizes] == [
        (1, 1), (2, 2), (4, 4)
    ]  # fmt: skip
    assert {starting_rate(study, width) for width in study.ladder.widths} == {study.optimizer.learning_rate}
    run = run_config(study, runs(study, {})[0])
    assert run.model.parametrization == study.model.parametrization


def refused(tree):
    with pytest.raises(ConfigError) as error:
        from_mapping(tree)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"attention": "linear"}, "attention.kind: linear; model.parametrization.kind=mup has no rule for it; accepted "
         "there: softmax"),
        ({"positions": "sinusoidal"}, "positions.kind: sinusoidal; model.parametrization.kind=mup has no rule for it; "
         "accepted there: learned, rotary, alibi, t5, none"),
        ({"block": "post_norm"}, "block: post_norm; model.parametrization.kind=mup has no rule for it; accepted there: "
         "pre_norm, parallel, parallel_norms, sandwich"),
        ({"scale_embeddings": True}, "scale_embeddings: True; model.parametrization.kind=mup has no rule for it; "
         "accepted there: false"),
        ({"scale_output": True}, "scale_output: True; model.parametrization.kind=mup has no rule for it; "
         "accepted there: false"),
    ],
)  # fmt: skip
def test_models_without_rules(changed, line):
    assert refused({"model": {"parametrization": "mup", **changed}}) == f"config.model.{line}"

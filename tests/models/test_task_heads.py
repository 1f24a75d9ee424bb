"""Heads of tasks on packed rows: each example sees itself alone, and its outputs are those that it has alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import changed
from model_cases import config, random_params

from jaxformer.config import HeadConfig, LossConfig, TuneConfig
from jaxformer.models.families import HEADS, family_of
from jaxformer.modules import make_model
from jaxformer.specs import only_trained, with_trained
from jaxformer.training.gradients import gradients
from jaxformer.types import Batch

T = 8
SIZES = (3, 4)  # tokens of the two examples of the row; the last token is padding
FAMILIES = {"gpt": {}, "bert": {"family": "bert", "block": "post_norm", "token_types": 2}}
OUTPUTS = {
    "multiple_choice": 1,
    "sequence_classification": 3,
    "token_classification": 3,
    "regression": 1,
    "extractive_qa": 2,
}


def model(family, task, **fields):
    fields = {"num_layers": 1, "context_length": T, "vocab_size": T, "tie_embeddings": False, **fields}
    cfg = config(**FAMILIES[family], **fields)
    return changed(cfg, head=HeadConfig(task, OUTPUTS[task], dropout=0.0))


def row(sizes):
    """A row of examples, [1, T]; token t of the whole has the id t, what is asked differs from token to token."""
    begins = np.cumsum([0, *sizes])[:-1]
    out = np.zeros((8, T), np.int64)
    for number, (begin, size) in enumerate(zip(begins, sizes, strict=True), 1):
        own = slice(begin, begin + size)
        out[:3, own] = np.arange(begin, begin + size), np.arange(begin, begin + size) % 3, np.arange(size)
        out[3, own], out[4, begin], out[5, begin + size - 1] = number, 1, 1
    tokens, targets, positions, segments, first, last, *_ = jnp.asarray(out[:, None], jnp.int32)
    return tokens, targets, positions, segments, first, last


def batch(task, sizes):
    tokens, targets, positions, segments, first, last = row(sizes)
    asked = {"sequence_classification": (targets * first, first), "token_classification": (targets, segments > 0),
             "regression": (targets, first), "multiple_choice": (targets, segments > 0),
             "extractive_qa": (targets, first)}  # fmt: skip
    inputs = {"examples": segments, "starts": first, "ends": last, "places": positions, "values": targets * 0.5,
              "choices": segments, "sizes": segments}  # fmt: skip
    target, weights = asked[task]
    return Batch(tokens, target, jnp.asarray(weights, jnp.float32), positions, segments, inputs)


FAST = [("bert", "extractive_qa")]
EVERY = [
    pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in itertools.product(FAMILIES, HEADS)
]


@pytest.mark.parametrize(("family", "task"), EVERY)
def test_an_example_sees_itself_alone(family, task):
    cfg = model(family, task)
    params = jax.tree.map(jnp.asarray, random_params(family_of(cfg).specs(cfg)))
    both = batch(task, SIZES)
    second = both._replace(weights=both.weights * (both.segments == 2))
    if task == "extractive_qa":
        of_second = (both.segments == 2).astype(jnp.int32)
        flags = {name: both.inputs[name] * of_second for name in ("starts", "ends")}
        second = second._replace(inputs={**both.inputs, **flags})

    def loss(params, rows):
        total, weight = family_of(cfg).loss(params, rows, cfg, LossConfig())[0]["loss"]
        return total / weight

    run = jax.jit(jax.value_and_grad(loss))
    value, grads = run(params, second)
    felt = np.abs(np.asarray(grads["embedding"]["tokens"])).sum(axis=1)
    assert (felt[: SIZES[0]] == 0).all() and (felt[SIZES[0] : sum(SIZES)] > 0).all() and felt[-1] == 0
    alone = jax.tree.map(lambda x: jnp.roll(x, -SIZES[0], axis=1), second)
    alone = alone._replace(segments=jnp.where(alone.segments == 2, 1, 0))
    np.testing.assert_allclose(value, run(params, alone)[0], rtol=1e-5)


@pytest.mark.slow
def test_layers_that_do_not_learn_cost_no_gradient():
    """Their gradient is exactly zero, and the compiled program has fewer operations by what it would have cost."""
    task, flops, found = "token_classification", {}, {}
    cfg = model("bert", task, num_layers=4, width=32)
    rows, params = batch(task, SIZES), random_params(make_model(cfg, LossConfig()).specs)
    for kept in (None, 0, 1):
        made = make_model(cfg, LossConfig(), tune=TuneConfig(kept))

        def step(params, made=made):
            return gradients(params, rows, jax.random.key(0), model=made)

        compiled = jax.jit(step).lower(params).compile()
        flops[kept], found[kept] = compiled.cost_analysis()["flops"], compiled(params)
    whole = jax.tree.map(np.asarray, found[None][1]["blocks"])
    for trained in (0, 1):
        loss, grads, *_ = found[trained]
        np.testing.assert_allclose(loss, found[None][0], rtol=1e-6)
        assert grads["embedding"]["tokens"] is None
        if trained:
            blocks = jax.tree.map(np.asarray, grads["blocks"])
            leaves = jax.tree.leaves(blocks)
            assert all((leaf[:-trained] == 0).all() and (leaf[-trained:] != 0).any() for leaf in leaves)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a[-1], b[-1], rtol=1e-4, atol=1e-6), blocks, whole)
        share = (4 - trained) / 4 * 2 / 3  # a layer's backward pass is two of its three parts
        assert flops[trained] < flops[None] * (1 - 0.8 * share), flops


def test_the_rate_of_a_layer_falls_with_what_stands_above_it():
    cfg = model("gpt", "sequence_classification", num_layers=3)
    specs = make_model(cfg, LossConfig(), tune=TuneConfig(2, 0.5)).specs
    assert specs["blocks"]["mlp"]["w_up"].rate == (0.0, 0.5, 1.0) and specs["blocks"]["mlp"]["w_up"].trained
    assert not specs["embedding"]["tokens"].trained and specs["task"]["w"].rate == 1.0
    assert make_model(cfg, LossConfig(), tune=TuneConfig(layer_decay=0.5)).specs["embedding"]["tokens"].rate == 0.125
    tree = only_trained(specs, specs)
    assert with_trained(specs, tree, specs).keys() == specs.keys()

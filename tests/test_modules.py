"""The law of the shells: module.apply({"params": p}, x) equals the function on p, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config
from flax import linen as nn

from jaxformer import masks, modules
from jaxformer.config import LossConfig
from jaxformer.functional import attention_layer, feed_forward
from jaxformer.functional import block as blocks
from jaxformer.functional.layer import Context
from jaxformer.models import bert, gpt
from jaxformer.specs import abstract_params, stack_specs
from jaxformer.types import Batch

B, T = 2, 6
COMMON = dict(num_layers=2, width=16, num_heads=4, context_length=T, vocab_size=20, positions="rotary", dropout=0.2,
              attention_dropout=0.2)  # fmt: skip
CFG = model_config(**COMMON)
BERT_CFG = model_config(**COMMON, family="bert", block="post_norm", token_types=2, next_sentence=True)
TOKENS = jnp.array(np.random.default_rng(0).integers(0, 20, (B, T)))
SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
POSITIONS = jnp.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
TYPES = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
X = jnp.array(np.random.default_rng(1).normal(size=(B, T, 16)), jnp.float32)
MASK = masks.causal()
INPUTS = {"token_types": TYPES, "pair_labels": jnp.array([0, 1])}
BATCH = Batch(TOKENS, TOKENS, jnp.ones((B, T)), POSITIONS, SEGMENTS, INPUTS)


def context(mask=None, positions=None, rng=None):
    return Context(mask, blocks.rotation(CFG, jnp.arange(T) if positions is None else positions), rng=rng)


# name -> (shell, specs, arguments, function of (params, rng, *arguments))
SHELLS = {
    "GPT": (
        modules.GPT(CFG), gpt.specs(CFG), (TOKENS, POSITIONS, SEGMENTS),
        lambda p, rng, t, pos, seg: gpt.apply(p, t, CFG, positions=pos, segments=seg, rng=rng),
    ),
    "BERT": (
        modules.BERT(BERT_CFG), bert.specs(BERT_CFG), (TOKENS, POSITIONS, SEGMENTS),
        lambda p, rng, t, pos, seg: bert.apply(p, t, BERT_CFG, positions=pos, segments=seg, rng=rng),
    ),
    "Stack": (
        modules.Stack(CFG), stack_specs(blocks.block_specs(CFG), 2), (X, MASK, POSITIONS),
        lambda p, rng, x, m, pos: blocks.stack(p, x, CFG, context(m, pos, rng))[0],
    ),
    "Block": (
        modules.Block(CFG), blocks.block_specs(CFG), (X, MASK),
        lambda p, rng, x, m: blocks.block(p, x, CFG, context(m, rng=rng))[0],
    ),
    "Attention": (
        modules.Attention(CFG), blocks.block_specs(CFG)["attention"], (X, MASK, POSITIONS),
        lambda p, rng, x, m, pos: attention_layer.apply(p, x, CFG, context(m, pos, rng))[0],
    ),
    "MLP": (
        modules.MLP(CFG), blocks.block_specs(CFG)["mlp"], (X,),
        lambda p, rng, x: feed_forward.apply(p, x, CFG, context())[0],
    ),
}  # fmt: skip


@functools.cache
def params_of(name):
    shell, _, arguments, _ = SHELLS[name]
    return jax.jit(lambda rng: shell.init(rng, *arguments))(jax.random.key(0))["params"]


class _Key(nn.Module):
    """Asks for the same key as a shell does, from the same place in the tree."""

    def __call__(self):
        return self.make_rng("dropout")


def same(a, b):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_every_shell_is_here():
    shells = {n for n, m in vars(modules).items() if isinstance(m, type) and issubclass(m, nn.Module)}
    assert shells - {"Shell", "Transformer"} == set(SHELLS)  # the two bases of the others


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_is_its_function_bit_for_bit(name):
    shell, _, arguments, function = SHELLS[name]
    params = params_of(name)
    got = jax.jit(lambda p, *a: shell.apply({"params": p}, *a))(params, *arguments)
    same(got, jax.jit(lambda p, *a: function(p, None, *a))(params, *arguments))


@pytest.mark.parametrize("name", ["GPT", "BERT", "Block"])
def test_with_dropout_too(name):
    shell, _, arguments, function = SHELLS[name]
    params, rng = params_of(name), jax.random.key(5)
    got = jax.jit(lambda p, r, *a: shell.apply({"params": p}, *a, rngs={"dropout": r}))(params, rng, *arguments)
    key = _Key().apply({}, rngs={"dropout": jax.random.key(5)})
    same(got, jax.jit(lambda p, r, *a: function(p, r, *a))(params, key, *arguments))
    plain = jax.jit(lambda p, *a: shell.apply({"params": p}, *a))(params, *arguments)
    assert not np.allclose(got, plain, atol=1e-3)


@pytest.mark.parametrize("name", SHELLS)
def test_parameters_are_those_of_the_specs(name):
    _, specs, _, _ = SHELLS[name]
    wanted = jax.tree.map(lambda a: (a.shape, a.dtype), abstract_params(specs))
    got = jax.eval_shape(lambda: params_of(name))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), dict(got)) == wanted
    assert jax.tree.structure(params_of(name)) == jax.tree.structure(abstract_params(specs))


@pytest.mark.parametrize("cfg, family", [(CFG, gpt), (BERT_CFG, bert)], ids=["gpt", "bert"])
def test_the_model_training_receives_runs_through_the_shell(cfg, family):
    loss_cfg = LossConfig(z_loss=1e-3)
    model = modules.make_model(cfg, loss_cfg)
    params = jax.jit(model.init)(jax.random.key(1))
    assert jax.tree.structure(params) == jax.tree.structure(abstract_params(model.specs))
    got = jax.jit(lambda p: model.loss(p, BATCH, None))(params)
    same(got, jax.jit(lambda p: family.loss(p, BATCH, cfg, loss_cfg))(params))
    objective, _ = got
    assert {k: float(v) for k, v in model.weights(BATCH).items() if k in objective} == {
        k: float(v[1]) for k, v in objective.items()
    }
    dropped = jax.jit(lambda p, r: model.loss(p, BATCH, r))(params, jax.random.key(2))
    assert float(dropped[0]["loss"][0]) != float(objective["loss"][0])


def test_an_nnx_user_wraps_a_shell():
    from flax import nnx

    wrapped = nnx.bridge.ToNNX(modules.MLP(CFG), rngs=nnx.Rngs(0)).lazy_init(X)
    params = {name: getattr(wrapped, name) for name in blocks.block_specs(CFG)["mlp"]}
    params = {name: jnp.asarray(p[...]) for name, p in params.items()}
    np.testing.assert_allclose(wrapped(X), feed_forward.apply(params, X, CFG, context())[0], rtol=1e-5, atol=1e-6)

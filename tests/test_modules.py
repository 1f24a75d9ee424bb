"""The law of the shells: module.apply({"params": p}, x) equals the function on p, bit for bit."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config
from flax import linen as nn

from jaxformer import init_params, masks, modules
from jaxformer.config import T5, Alibi, LossConfig, ModelConfig, NoPositions, Softmax
from jaxformer.errors import ConfigError
from jaxformer.functional import attention_layer, feed_forward
from jaxformer.functional import block as blocks
from jaxformer.functional.layer import Context
from jaxformer.functional.position_encodings import rotation
from jaxformer.models import bert, encoder_decoder, gpt
from jaxformer.modules import Attention, Block, Stack
from jaxformer.specs import abstract_params, stack_specs
from jaxformer.types import Batch

B, T = 2, 6
COMMON = dict(num_layers=2, width=16, num_heads=2, context_length=T, vocab_size=20, positions="rotary", dropout=0.2,
              attention_dropout=0.2)  # fmt: skip
CFG = model_config(**COMMON)
BERT_CFG = model_config(**COMMON, family="bert", block="post_norm", token_types=2, next_sentence=True)
PAIR_CFG = model_config(**COMMON, family="encoder_decoder", encoder={"source_length": T})
TOKENS = jnp.array(np.random.default_rng(0).integers(0, 20, (B, T)))
SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
POSITIONS = jnp.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
TYPES = jnp.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
X = jnp.array(np.random.default_rng(1).normal(size=(B, T, 16)), jnp.float32)
MASK = masks.causal()
INPUTS = {"token_types": TYPES, "pair_labels": jnp.array([0, 1])}
BATCH = Batch(TOKENS, TOKENS, jnp.ones((B, T)), POSITIONS, SEGMENTS, INPUTS)


def context(mask=None, positions=None, rng=None):
    return Context(mask, rotation(CFG, jnp.arange(T) if positions is None else positions), rng=rng)


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
    "EncoderDecoder": (
        modules.EncoderDecoder(PAIR_CFG), encoder_decoder.specs(PAIR_CFG), (TOKENS, TOKENS[::-1], POSITIONS),
        lambda p, rng, t, s, pos: encoder_decoder.apply(p, t, PAIR_CFG, positions=pos, source_tokens=s, rng=rng),
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
    shell, _, _, _ = SHELLS[name]
    return shell.init(jax.random.key(0), method=lambda shell: shell.tree)["params"]  # as its call begins


@functools.cache
def from_specs(name):
    return init_params(SHELLS[name][1], jax.random.key(0))


class _Key(nn.Module):
    """Asks for the same key as a shell does, from the same place in the tree."""

    def __call__(self):
        return self.make_rng("dropout")


def same(a, b):
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)


def same_program(one, other, *arguments):
    """What XLA is given to compile, constants included, is the same to the letter."""
    for function in (one, other):
        function.__name__ = "function"
    one, other = (jax.jit(function).lower(*arguments).as_text() for function in (one, other))
    assert one == other and "stablehlo.dot_general" in one


def test_every_shell_is_here():
    shells = {n for n, m in vars(modules).items() if isinstance(m, type) and issubclass(m, nn.Module)}
    assert shells - {"Shell", "Transformer"} == set(SHELLS)  # the two bases of the others


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_is_its_function_bit_for_bit(name):
    shell, _, arguments, function = SHELLS[name]
    params = abstract_params(SHELLS[name][1])
    same_program(lambda p, *a: shell.apply({"params": p}, *a), lambda p, *a: function(p, None, *a), params, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Block", "GPT", "BERT"])
def test_with_dropout_too(name):
    shell, _, arguments, function = SHELLS[name]
    key = _Key().apply({}, rngs={"dropout": jax.random.key(5)})

    @jax.jit
    def both(params, rng, key, *arguments):
        found = shell.apply({"params": params}, *arguments, rngs={"dropout": rng})
        return found, function(params, key, *arguments), shell.apply({"params": params}, *arguments)

    got, wanted, plain = both(params_of(name), jax.random.key(5), key, *arguments)
    same(got, wanted)
    assert not np.allclose(got, plain, atol=1e-3)


# Written down by hand: names, which are those of checkpoints, and shapes; of L layers of width D, H heads of K, an MLP
# of F, and V tokens.
L, D, H, K, F, V = 2, 16, 2, 8, 64, 20
NORM = {"scale": (D,), "bias": (D,)}
ATTENTION = {
    "w_query": (D, H, K), "b_query": (H, K), "w_key": (D, H, K), "b_key": (H, K), "w_value": (D, H, K),
    "b_value": (H, K), "w_out": (H, K, D), "b_out": (D,),
}  # fmt: skip
MLP = {"w_up": (D, F), "b_up": (F,), "w_down": (F, D), "b_down": (D,)}
BLOCK = {"attention_norm": NORM, "attention": ATTENTION, "mlp_norm": NORM, "mlp": MLP}
STACK = jax.tree.map(lambda shape: (L, *shape), BLOCK, is_leaf=lambda x: isinstance(x, tuple))
CROSS = {name: {k: (L, *shape) for k, shape in tree.items()}
         for name, tree in (("cross", ATTENTION), ("cross_norm", NORM))}  # fmt: skip
BY_HAND = {
    "GPT": {"embedding": {"tokens": (V, D)}, "blocks": STACK, "final_norm": NORM},
    "BERT": {
        "embedding": {"tokens": (V, D), "types": (2, D)}, "embedding_norm": NORM, "blocks": STACK,
        "head": {"w": (D, D), "b": (D,), "norm": NORM, "bias": (V,)},
        "pooler": {"w": (D, D), "b": (D,)}, "next_sentence": {"w": (D, 2), "b": (2,)},
    },
    "EncoderDecoder": {
        "embedding": {"tokens": (V, D)}, "blocks": {**STACK, **CROSS}, "final_norm": NORM,
        "encoder": {"blocks": STACK, "final_norm": NORM},
    },
    "Stack": STACK, "Block": BLOCK, "Attention": ATTENTION, "MLP": MLP,
}  # fmt: skip
COUNTS = {
    # Attention 4 D^2 + 4 D, MLP 8 D^2 + 5 D, two norms 4 D.
    "GPT": L * (12 * D**2 + 13 * D) + V * D + 2 * D,
    # Two token types, the norm of the embedding, the head 1 D^2 + 3 D + V, the pooler, and two sentences.
    "BERT": L * (12 * D**2 + 13 * D) + V * D + 2 * D + 2 * D + (D**2 + 3 * D + V) + (D**2 + D) + (2 * D + 2),
}


def values(params):
    """Path in dots -> array."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in found}


@pytest.mark.parametrize("name", SHELLS)
def test_parameters_have_the_names_and_shapes_written_by_hand(name):
    """Those of a shell's init, and those that its specs give to `init_params`."""
    for params in (params_of(name), from_specs(name)):
        assert jax.tree.map(jnp.shape, dict(params)) == BY_HAND[name]
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
        if name in COUNTS:
            assert sum(x.size for x in jax.tree.leaves(params)) == COUNTS[name]


@pytest.mark.parametrize("name", SHELLS)
def test_every_parameter_begins_with_values_of_its_own(name):
    """Matrices and tables are drawn, no two of them, and no two layers, alike; scales are 1, biases 0."""
    for params in (params_of(name), from_specs(name)):
        drawn = {}
        for path, x in values(params).items():
            last = path.split(".")[-1]
            if last == "scale":
                assert (x == 1).all(), path
            elif last.startswith("b"):
                assert (x == 0).all(), path
            else:
                layers = x if path.startswith("blocks.") or name == "Stack" else [x]
                # Signs, since drawn from one key they are the same whatever the standard deviation.
                drawn |= {(path, n): tuple(np.sign(layer.reshape(-1)[:32])) for n, layer in enumerate(layers)}
        assert len(drawn) >= 2 and len(set(drawn.values())) == len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("cfg, family", [(CFG, gpt), (BERT_CFG, bert)], ids=["gpt", "bert"])
def test_the_model_training_receives_runs_through_the_shell(cfg, family):
    cfg, loss_cfg = replace(cfg, num_layers=1), LossConfig(z_loss=1e-3)
    model = modules.make_model(cfg, loss_cfg)
    abstract = jax.eval_shape(model.init, jax.random.key(1))
    assert jax.tree.structure(abstract) == jax.tree.structure(abstract_params(model.specs))
    same_program(lambda p: model.loss(p, BATCH, None), lambda p: family.loss(p, BATCH, cfg, loss_cfg), abstract)

    @jax.jit
    def losses(params, rng):
        return model.loss(params, BATCH, None)[0], model.loss(params, BATCH, rng)[0]["loss"][0]

    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda each: rng.normal(0, 0.3, each.shape).astype(each.dtype), abstract)
    objective, dropped = losses(params, jax.random.key(2))
    assert {k: float(v) for k, v in model.weights(BATCH).items() if k in objective} == {
        k: float(v[1]) for k, v in objective.items()
    }
    assert float(dropped) != float(objective["loss"][0])


def test_an_nnx_user_wraps_a_shell():
    from flax import nnx

    wrapped = nnx.bridge.ToNNX(modules.MLP(CFG), rngs=nnx.Rngs(0)).lazy_init(X)
    params = {name: getattr(wrapped, name) for name in blocks.block_specs(CFG)["mlp"]}
    params = {name: jnp.asarray(p[...]) for name, p in params.items()}
    np.testing.assert_allclose(wrapped(X), feed_forward.apply(params, X, CFG, context())[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [Block, pytest.param(Stack, marks=pytest.mark.slow), Attention])
def test_parts_obey_the_config(cls):
    """Without a mask of the caller's: causal, windowed, and with the bias of the positions."""
    cfg = ModelConfig(
        num_layers=2, width=16, context_length=16, vocab_size=20, positions=Alibi(), attention=Softmax(4, window=3)
    )
    x = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
    later, before = x.copy(), x.copy()
    later[:, 9:] += 1
    before[:, :2] += 1
    shell, plain = cls(cfg), cls(replace(cfg, positions=NoPositions()))
    run = jax.jit(lambda variables, rows: (shell.apply(variables, rows), plain.apply(variables, x)))
    variables = shell.init(jax.random.key(1), method=lambda shell: shell.tree)
    rows, without = map(np.asarray, run(variables, np.concatenate([x, later, before])))
    out, later, before = np.split(rows, 3)
    np.testing.assert_array_equal(out[:, :9], later[:, :9])
    reach = 2 * (2 if cls is Stack else 1)
    np.testing.assert_array_equal(out[:, 2 + reach :], before[:, 2 + reach :])
    assert np.abs(out - without).max() > 1e-4


def test_a_part_does_not_own_a_table_of_the_whole_model():
    shell = Block(ModelConfig(num_layers=1, width=16, vocab_size=20, positions=T5()))
    line = "config.model.positions.kind: t5 has a table of the whole model, which Block does not own; accepted: other"
    with pytest.raises(ConfigError, match=line):
        shell.init(jax.random.key(0), jnp.zeros((1, 8, 16)))

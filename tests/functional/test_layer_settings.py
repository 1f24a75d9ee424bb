"""Settings that models from elsewhere need, each against what it stands for: layers that differ, norms, caps."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config

from jaxformer import masks
from jaxformer.config import Execution, Learned, MeshConfig, Rotary, layers_of, period_of
from jaxformer.functional import block as blocks
from jaxformer.functional import positions as pos
from jaxformer.functional.layer import Context
from jaxformer.functional.layers import cap
from jaxformer.functional.losses import cross_entropy, token_loss
from jaxformer.functional.position_encodings import rotation
from jaxformer.functional.sublayers import stack_costs
from jaxformer.models import gpt
from jaxformer.parallel.mesh import make_mesh
from jaxformer.specs import is_spec

B, T, D, L = 2, 7, 8, 5
BASE = model_config(num_layers=L, width=D, num_heads=2, context_length=T, vocab_size=9, positions="rotary", window=2)
LOCAL = dataclasses.replace(
    BASE, attention=dataclasses.replace(BASE.attention, global_every=2), positions=Rotary(local_base=50.0)
)


def random_params(specs, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.2, 0.5, s.shape)), specs, is_leaf=is_spec)


def x_of(seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, D)))


@pytest.mark.parametrize(
    "execution",
    [Execution(layers="scan"), pytest.param(Execution(layers="unroll", remat="full"), marks=pytest.mark.slow)],
    ids=["scan", "unroll"],
)
def test_layers_that_differ(execution):
    """Scanned, unrolled and rematerialised, five layers of which every second sees all are those five one by one."""
    with jax.enable_x64():
        local, whole = period_of(LOCAL)
        assert [number for _, number in layers_of(LOCAL)] == [3, 2]
        assert (local.attention.window, whole.attention.window) == (2, None)
        assert (local.positions, whole.positions) == (Rotary(50.0), Rotary())
        params, x, places = random_params(gpt.specs(LOCAL))["blocks"], x_of(), jnp.arange(T)
        turns = [rotation(each, places) for each in (local, whole)]

        def alone(params, x, one, turn):
            mask = masks.Mask(causal=True, window=one.attention.window)
            return blocks.block(params, x, one, Context(mask, rotation=turn))[0]

        kinds = [
            jax.jit(functools.partial(alone, one=one, turn=turn))
            for one, turn in zip((local, whole), turns, strict=True)
        ]
        wanted = x
        for number in range(L):
            wanted = kinds[number % 2](jax.tree.map(lambda a, i=number: np.asarray(a)[i], params), wanted)
        contexts = [Context(masks.causal(), rotation=turn, execution=execution) for turn in turns]
        found = jax.jit(lambda params: blocks.stack(params, x, LOCAL, contexts)[0])(params)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        assert [cache["attention"].key.shape[1] for cache in blocks.init_cache(LOCAL, 1, T, "float32")] == [
            2,
            T,
            2,
            T,
            2,
        ]
        (costs,) = stack_costs(LOCAL, T, Execution())
        assert costs.costs["attention"].scores == pytest.approx(2 * 2 * D * (3 * 2 + 2 * T) / L)


@pytest.mark.slow
def test_layers_that_differ_on_a_mesh():
    """Rows cut over devices: the ring serves layers with a window and layers without."""
    cfg = dataclasses.replace(LOCAL, context_length=16)
    params = jax.tree.map(lambda a: a.astype(jnp.float32), random_params(gpt.specs(cfg)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 16)))
    wanted = jax.jit(lambda params: gpt.apply(params, tokens, cfg))(params)
    for layers in ("scan", "unroll"):
        with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2, context=2, tensor=2))):
            run = jax.jit(
                lambda params, layers=layers: gpt.apply(params, tokens, cfg, execution=Execution(layers=layers))
            )
            np.testing.assert_allclose(run(params), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_norms_around_sublayers():
    with jax.enable_x64():
        x, context = x_of(), Context(masks.causal())
        for arrangement in ("parallel_norms", "sandwich"):
            cfg = dataclasses.replace(BASE, block=arrangement, positions=Learned(), norm="rms_norm_plus_one")
            params = random_params(blocks.block_specs(cfg))

            def normed(name, y, params=params):
                size = jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + BASE.norm_epsilon)
                return y / size * jnp.broadcast_to(1 + params[name]["scale"], y.shape)

            def ran(name, y, params=params, cfg=cfg):
                return blocks.sublayers_of(cfg)[name].apply(params[name], y, cfg, context)[0]

            if arrangement == "sandwich":
                wanted = x + normed("attention_out_norm", ran("attention", normed("attention_norm", x)))
                wanted = wanted + normed("mlp_out_norm", ran("mlp", normed("mlp_norm", wanted)))
            else:
                wanted = x + ran("attention", normed("attention_norm", x)) + ran("mlp", normed("mlp_norm", x))
            np.testing.assert_allclose(blocks.block(params, x, cfg, context)[0], wanted, rtol=1e-12)


def test_a_capped_loss_is_the_loss_of_capped_logits():
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, D), (9, D)))
    targets, weights = jnp.asarray(rng.integers(0, 9, (B, T))), jnp.ones((B, T))

    def capped(table):
        return token_loss(hidden, table, targets, weights, soft_cap=1.5).total

    def plain(table):
        logits = 1.5 * jnp.tanh(jnp.einsum("BTD,VD->BTV", hidden, table) / 1.5)
        return jnp.sum(cross_entropy(logits, targets)[0])

    both = jax.jit(lambda table: [jax.value_and_grad(each)(table) for each in (capped, plain)])(table)
    for ours, wanted in zip(*both, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    assert cap(hidden, None) is hidden


def test_a_part_of_each_head_is_turned():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, 2, 8)), jnp.float32)
    assert Rotary(fraction=0.5).turned(8) == 4
    angles = pos.rotary_angles(jnp.arange(T), pos.rotary_frequencies(4)[0])
    found = pos.rotary(x, *angles)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(found[..., :4], pos.rotary(x[..., :4], *angles))


def test_llama3_stretches_long_waves_and_leaves_short_ones():
    plain, _ = pos.rotary_frequencies(64, base=1e4)
    found, scale = pos.rotary_frequencies(64, base=1e4, scaling="llama3", factor=8.0, original_length=256)
    turns = 256 * plain / (2 * math.pi)
    assert scale == 1.0 and (np.diff(found) < 0).all()
    np.testing.assert_array_equal(found[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(found[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (found[between] < plain[between]).all() and (found[between] > plain[between] / 8).all()


@pytest.mark.slow
def test_embeddings_scaled_and_moved():
    cfg = dataclasses.replace(BASE, num_layers=1, positions=Learned(offset=3), scale_embeddings=True)
    plain = dataclasses.replace(cfg, positions=Learned(), scale_embeddings=False, tie_embeddings=False)
    params, tokens = random_params(gpt.specs(cfg)), np.arange(T)[None]
    table = np.asarray(params["embedding"]["tokens"])
    moved = {"tokens": table * math.sqrt(D), "positions": np.asarray(params["embedding"]["positions"])[3:]}
    assert params["embedding"]["positions"].shape == (T + 3, D)
    other = {**params, "embedding": moved, "head": {"table": table}}
    found, wanted = jax.jit(lambda one, two: (gpt.apply(one, tokens, cfg), gpt.apply(two, tokens, plain)))(
        params, other
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_biases_of_queries_keys_and_values_alone():
    cfg = dataclasses.replace(BASE, use_bias=False, attention=dataclasses.replace(BASE.attention, qkv_bias=True))
    names = {name for name in blocks.block_specs(cfg)["attention"] if name.startswith("b_")}
    assert names == {"b_query", "b_key", "b_value"} and "b_up" not in blocks.block_specs(cfg)["mlp"]

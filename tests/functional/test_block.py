"""Blocks against float64 NumPy; scan = unroll = list; remat changes what is kept and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from flat_config import changed, model_config

from jaxformer import masks
from jaxformer.config import Execution, MeshConfig
from jaxformer.functional import attention_layer, key_value_cache
from jaxformer.functional import block as blocks
from jaxformer.functional import positions as pos
from jaxformer.functional.layer import Context, DecodeProgress
from jaxformer.functional.position_encodings import rotation
from jaxformer.parallel.mesh import make_mesh
from jaxformer.parallel.platforms import compiled_for
from jaxformer.specs import abstract_params, is_spec, stack_specs

B, T, L = 2, 6, 2
USUAL = Execution()
CFG = model_config(num_layers=L, width=16, num_heads=4, context_length=T, vocab_size=7)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]])


def change(**fields):
    return changed(CFG, **fields)


def random_params(specs, seed=0):
    """Normal numbers everywhere, so that a forgotten bias or scale shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(0, 0.4, s.shape) + (s.shape[-1:] == s.shape), specs, is_leaf=is_spec)


def random_x(cfg, seed=1):
    return np.random.default_rng(seed).normal(size=(B, T, cfg.width))


ARRANGEMENTS = {
    "gpt2": change(activation="gelu_tanh"),
    "llama": change(norm="rms_norm", activation="swiglu", use_bias=False, positions="rotary", num_kv_heads=2,
                    rotary_scaling="yarn", rotary_factor=2.0, rotary_original_length=3),
    "2017": change(block="post_norm", activation="relu"),
    "parallel": change(block="parallel", num_kv_heads=1, positions="alibi", attention_soft_cap=2.0),
    "qk_norm": change(qk_norm=True, num_kv_heads=2, positions="rotary", norm_epsilon=0.1, rotary_scaling="yarn",
                      rotary_factor=2.0, rotary_original_length=3),
    "wide_heads": change(block="post_norm", head_width=6, mlp_width=10, activation="geglu", norm_epsilon=0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_block(name):
    cfg = ARRANGEMENTS[name]
    params, x = random_params(blocks.block_specs(cfg)), random_x(cfg)
    mask = masks.causal() & masks.segments(jnp.array(SEGMENTS))
    frequencies, scale, bias, bias_array = None, 1.0, None, None
    if cfg.positions.kind == "rotary":
        frequencies, scale = pos.rotary_frequencies(cfg.head_size, 10_000.0, "yarn", 2.0, 3)
    if cfg.positions.kind == "alibi":
        bias, bias_array = lambda q, k: pos.alibi(q, k, 4), reference.alibi(T, T, 4)
    with jax.enable_x64(True):

        @jax.jit
        def run(params, x, positions):
            return blocks.block(params, x, cfg, Context(mask, rotation(cfg, positions), bias))

        out, cache, terms = run(jax.tree.map(jnp.array, params), jnp.array(x), jnp.array(POSITIONS))
    allowed = reference.allowed(T, T, causal=True, segments=SEGMENTS)
    wanted = reference.block(params, x, cfg, allowed, frequencies, POSITIONS, bias_array, scale)
    np.testing.assert_allclose(out, wanted, rtol=1e-7 if name == "parallel" else 1e-11, atol=1e-8)
    assert cache is None and not terms


@pytest.mark.slow
def test_with_qk_norm_the_size_of_the_query_and_key_weights_does_not_matter():
    cfg = change(qk_norm=True, use_bias=False, positions="rotary", norm_epsilon=1e-12)
    params, x = random_params(blocks.block_specs(cfg)), random_x(cfg)
    grown = params | {"attention": params["attention"] | {"w_query": params["attention"]["w_query"] * 50}}
    grown["attention"]["w_key"] = params["attention"]["w_key"] * 3
    with jax.enable_x64(True):
        context = Context(masks.causal(), rotation(cfg, jnp.arange(T)))
        outs = []
        for each in (cfg, changed(cfg, qk_norm=False)):
            run = jax.jit(lambda p, x, each=each: blocks.block(p, x, each, context)[0])
            outs += [np.asarray(run(p, x)) for p in (params, grown)]
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-10)
    assert np.abs(outs[2] - outs[3]).max() > 0.1  # the ruler measures


def run_stack(cfg, params, x, rng=None, execution=USUAL):
    """[B, T, D] and its gradients by params and x."""

    def total(params, x):
        out, _, _ = blocks.stack(params, x, cfg, Context(masks.causal(), rng=rng, execution=execution))
        return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32)))), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, x)
    return out, grads


@functools.cache
def reference_run(dropout):
    """Unrolled, without remat, in float64."""
    cfg = change(dropout=dropout, attention_dropout=dropout)
    params = random_params(stack_specs(blocks.block_specs(cfg), L))
    with jax.enable_x64(True):
        params, x = jax.tree.map(jnp.array, params), jnp.array(random_x(cfg))
        return params, x, run_stack(cfg, params, x, jax.random.key(0) if dropout else None)


@pytest.mark.parametrize(
    "layers, remat, dropout",
    [
        pytest.param("scan", "dots", 0.3, marks=pytest.mark.slow),
        ("unroll", "full", 0.3),
        pytest.param("scan", "none", 0.0, marks=pytest.mark.slow),
        pytest.param("scan", "full", 0.0, marks=pytest.mark.slow),
        pytest.param("scan", "attention", 0.0, marks=pytest.mark.slow),
        pytest.param("unroll", "attention", 0.3, marks=pytest.mark.slow),
        pytest.param("unroll", "dots", 0.0, marks=pytest.mark.slow),
        pytest.param("scan", "none", 0.3, marks=pytest.mark.slow),
    ],
)
def test_scan_and_remat_change_neither_values_nor_gradients(layers, remat, dropout):
    """Not even with dropout: the random numbers belong to the layer, not to the way it is run."""
    params, x, wanted = reference_run(dropout)
    cfg = change(dropout=dropout, attention_dropout=dropout)
    execution = Execution(layers=layers, remat=remat)
    with jax.enable_x64(True):
        got = run_stack(cfg, params, x, jax.random.key(0) if dropout else None, execution)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_list_of_blocks_is_the_stack_of_them():
    params, x, (wanted, _) = reference_run(0.0)
    with jax.enable_x64(True):
        context = Context(masks.causal(), execution=Execution(layers="scan"))
        out = jax.jit(lambda p, x: blocks.stack(p, x, CFG, context)[0])(blocks.unstack(params, L), x)
    np.testing.assert_allclose(out, wanted, rtol=1e-12)


def gradients_and_traces(function):
    """Of function(params, x, bias, rng), a sum's gradients, and how often the bias was asked for."""
    seen = []

    def bias(query, key):
        seen.append(1)
        return -0.1 * jnp.abs(query[:, None] - key[None])

    def total(params, x, rng):
        return jnp.sum(jnp.sin(function(params, x, bias, rng)))

    with jax.enable_x64(True):
        params, x = jax.tree.map(jnp.array, reference_run(0.0)[:2])
        return jax.jit(jax.grad(total, (0, 1)))(params, x, jax.random.key(1)), len(seen)


@functools.cache
def of_a_loop_over_blocks(cfg):
    def loop(params, x, bias, rng):
        for number, layer in enumerate(blocks.unstack(params, L)):
            context = Context(masks.causal(), bias=bias, rng=jax.random.fold_in(rng, number))
            x, _, _ = blocks.block(layer, x, cfg, context)
        return x

    return gradients_and_traces(loop)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_unrolled_layers_are_traced_once_and_are_a_loop_over_blocks(remat):
    cfg, execution = change(dropout=0.3), Execution(remat=remat)

    def stack(params, x, bias, rng):
        return blocks.stack(params, x, cfg, Context(masks.causal(), bias=bias, rng=rng, execution=execution))[0]

    (wanted, of_all), (found, of_one) = of_a_loop_over_blocks(cfg), gradients_and_traces(stack)
    assert of_one == of_all // L
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_dropout_drops_and_differs_by_rng():
    params, x, (plain, _) = reference_run(0.0)
    dropped = reference_run(0.3)[2][0]
    assert not np.allclose(plain, dropped, atol=0.01)
    cfg = change(dropout=0.3, attention_dropout=0.3)
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            jax.jit(lambda p, x: blocks.stack(p, x, cfg, Context(masks.causal()))[0])(params, x), plain
        )


@pytest.mark.parametrize(
    "arrangement", ["parallel", *(pytest.param(a, marks=pytest.mark.slow) for a in ("pre_norm", "post_norm"))]
)
def test_each_kind_of_dropout_acts_by_itself(arrangement):
    plain = change(block=arrangement)
    params, x = random_params(blocks.block_specs(plain)), random_x(plain)

    @jax.jit
    def run(params, x):
        kinds = plain, changed(plain, dropout=0.5), changed(plain, attention_dropout=0.5)
        return [blocks.block(params, x, cfg, Context(rng=jax.random.key(0)))[0] for cfg in kinds]

    out, *dropped = run(params, x)
    assert not any(np.allclose(out, x, atol=0.01) for x in dropped)


def kept_for_backward(cfg, x, execution):
    """Elements that the forward pass keeps for the backward pass, parameters left out. Nothing is compiled."""
    params = abstract_params(stack_specs(blocks.block_specs(cfg), cfg.num_layers))

    def backward(params, x):
        context = Context(masks.causal(), execution=execution)
        return jax.vjp(lambda p, x: blocks.stack(p, x, cfg, context)[0], params, x)[1]

    shapes = {leaf.shape[skip:] for leaf in jax.tree.leaves(params) for skip in (0, 1)}
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(backward, params, x)) if leaf.shape not in shapes)


@pytest.mark.parametrize(
    "layers, dtype",
    [
        pytest.param("scan", "bfloat16", marks=pytest.mark.slow),
        ("unroll", "float32"),
        pytest.param("scan", "float32", marks=pytest.mark.slow),
        pytest.param("unroll", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_remat_keeps_what_it_says(layers, dtype):
    rows, length, width = 8, 64, 32

    def kept(remat):
        cfg = model_config(num_layers=L, width=width, num_heads=2, context_length=length)
        x = jax.ShapeDtypeStruct((rows, length, width), dtype)
        return kept_for_backward(cfg, x, Execution(layers=layers, remat=remat))

    one = L * rows * length * width  # one [B, T, D] array of each layer
    assert kept("full") == one  # the block's input
    weights = L * 2 * rows * length**2  # of 2 heads
    assert kept("attention") == 2 * one + weights  # and attention's output
    assert kept("dots") == (1 + 4 + 4) * one  # and query, key, value, output, and 4 D of the MLP
    # What goes into the norms, the five products that read a [B, T, D] array, and attention; its weights, H T = 4 D a
    # token; what goes into the activation. Not what comes between (34 of `one`, if differentiation chose).
    assert kept("none") // one == 2 + 5 + 3 + 4 + 4


@pytest.mark.slow
def test_full_remat_computes_again():
    """Within one program too, where XLA would like to keep what it has seen before."""

    def dots(remat):
        params = abstract_params(stack_specs(blocks.block_specs(CFG), L))
        x = jax.ShapeDtypeStruct((B, T, CFG.width), jnp.float32)
        run = jax.jit(lambda p, x: run_stack(CFG, p, x, execution=Execution(remat=remat)))
        text = run.lower(params, x).compile().as_text()
        return sum(" dot(" in line for line in text.splitlines())

    assert dots("full") >= dots("none") + 6 * L  # all but the last product of a block, which nothing needs again


@pytest.mark.slow
def test_remat_of_all_but_attention_has_no_second_loop_over_keys():
    def loops(remat):
        params = abstract_params(stack_specs(blocks.block_specs(CFG), L))
        x = jax.ShapeDtypeStruct((B, 512, CFG.width), jnp.float32)
        execution = Execution(layers="scan", remat=remat, attention="chunked")
        return (
            jax.jit(lambda p, x: run_stack(CFG, p, x, execution=execution)).lower(params, x).as_text().count(".while")
        )

    assert loops("attention") == loops("none") < loops("full")


def test_rotation_belongs_to_rotary_configs():
    assert rotation(CFG, jnp.arange(3)) is None
    cfg = change(positions="rotary", rotary_scaling="yarn", rotary_factor=2.0, context_length=64)
    angle = rotation(cfg, jnp.arange(3))
    frequencies, scale = pos.rotary_frequencies(4, 10_000.0, "yarn", 2.0, 32)  # trained on 64 / 2 tokens
    np.testing.assert_allclose(angle.cos, np.cos(np.outer(np.arange(3), frequencies)), rtol=1e-6)
    assert angle.scale == scale != 1


def test_the_cache_is_the_keys_and_values_heads_first():
    cfg = change(num_kv_heads=2)
    params, x = random_params(blocks.block_specs(cfg))["attention"], random_x(cfg)

    @jax.jit
    def cache_of(params, x):
        empty, progress = key_value_cache.init_cache(cfg, B, T, jnp.float32), DecodeProgress(jnp.full(B, T))
        return attention_layer.apply(params, x, cfg, Context(masks.causal(), cache=empty, progress=progress))[1]

    cache = cache_of(params, x)
    wanted = np.einsum("btd,dgk->bgtk", x, params["w_key"]) + np.asarray(params["b_key"])[None, :, None]
    np.testing.assert_allclose(cache.key, wanted.reshape(B * 2, T, 4), rtol=1e-4, atol=1e-5)
    assert cache.value.shape == (B * 2, T, 4)


@pytest.mark.parametrize("use_bias, norm", [(True, "layer_norm"), (False, "layer_norm"), (True, "rms_norm")])
def test_only_layer_norm_with_biases_has_a_bias(use_bias, norm):
    specs = blocks.block_specs(change(use_bias=use_bias, norm=norm))
    assert ("bias" in specs["attention_norm"]) == (use_bias and norm == "layer_norm")
    assert ("b_query" in specs["attention"]) == ("b_up" in specs["mlp"]) == use_bias


@pytest.mark.slow
def test_bfloat16_blocks_keep_float32_parameters_and_gradients():
    cfg = change(dtype="bfloat16")
    params = jax.tree.map(np.float32, random_params(stack_specs(blocks.block_specs(cfg), L)))
    out, (d_params, d_x) = run_stack(cfg, params, jnp.array(random_x(cfg), jnp.bfloat16))
    assert out.dtype == d_x.dtype == jnp.bfloat16
    assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in jax.tree.leaves(d_params))


def test_layers_of_gathered_weights_are_the_layers():
    """As on GPUs, where a layer that is computed again gathers each weight once for that; float32 rounds nothing."""
    params = jax.tree.map(np.float32, random_params(stack_specs(blocks.block_specs(CFG), L)))
    x = np.float32(np.random.default_rng(1).normal(size=(4, T, CFG.width)))
    context = Context(masks.causal(), execution=Execution(remat="full", attention="xla", layers="scan"))

    def run(params, x):
        return jax.value_and_grad(lambda p: jnp.sum(jnp.sin(blocks.stack(p, x, CFG, context)[0])))(params)

    alone = jax.jit(run)(params, x)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=4, tensor=2), jax.devices())), compiled_for("cuda"):
        assert "optimization_barrier" in str(jax.make_jaxpr(run)(params, x))
        found = jax.jit(run)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, alone)

"""Reversible residuals: the gradients of the plain form, in both modes; dropout; memory; meshes; a run that goes on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import params_of
from flat_config import changed, model_config
from jax.tree_util import Partial

from jaxformer import from_mapping, masks
from jaxformer.config import Execution, MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import block as blocks
from jaxformer.functional import reversible
from jaxformer.functional.layer import Context
from jaxformer.models import gpt
from jaxformer.models.flops import flops_per_token
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan import costs, hlo
from jaxformer.specs import abstract_params, is_spec, stack_specs

L, B, T, D = 3, 2, 8, 16
CFG = model_config(num_layers=L, width=D, num_heads=4, context_length=T, vocab_size=7, block="reversible")


def inputs(cfg, seed=0):
    """Parameters, x [B, T, D] and a table that a bias of the scores is made of."""
    rng = np.random.default_rng(seed)
    specs = stack_specs(blocks.block_specs(cfg), cfg.num_layers)
    params = jax.tree.map(lambda s: rng.normal(0, 0.3, s.shape), specs, is_leaf=is_spec)
    return params, rng.normal(size=(B, T, D)), rng.normal(size=(4, T, T))


def _taken(table, query, key):
    return table[None, :, query][:, :, :, key]


def total(execution, cfg, rng, params, x, table):
    context = Context(masks.causal(), bias=Partial(_taken, table), rng=rng, execution=execution)
    return jnp.sum(jnp.sin(blocks.stack(params, x, cfg, context)[0]))


def gradients(cfg, execution, rng=None):
    with jax.enable_x64(True):
        given = jax.tree.map(jnp.asarray, inputs(cfg))
        run = functools.partial(total, execution, cfg, rng)
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(*given)


def close(one, other, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), one, other)


@pytest.mark.parametrize("layers", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
def test_the_gradients_are_those_of_the_plain_form(layers, monkeypatch):
    """Also with dropout, whose numbers are drawn a second time, and by what all layers share, here a bias's table."""
    cfg, execution = changed(CFG, dropout=0.3, attention_dropout=0.2), Execution(layers=layers)
    with jax.enable_x64(True):
        rng = jax.random.key(0)
    found = gradients(cfg, execution, rng)
    monkeypatch.setattr(reversible, "_streams", reversible._plain)
    close(found, gradients(cfg, execution, rng), rtol=1e-9, atol=1e-11)
    assert np.abs(found[1][2]).max() > 0.01


def test_a_layer_written_out():
    """y1 = x1 + attention(norm(x2)), y2 = x2 + mlp(norm(y1)), of both streams, with the parts of an ordinary block."""
    params, x, _ = inputs(CFG)
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: jnp.asarray(a[0]), params), jnp.asarray(x)
        plain, context = changed(CFG, block="plain"), Context(masks.causal())
        x1, x2 = x, jnp.cos(x)

        @jax.jit
        def run(x1, x2):
            def branch(name, x):
                normed = blocks.norm(params[f"{name}_norm"], x, CFG)
                return blocks.sublayers_of(plain)[name].apply(params[name], normed, plain, context)[0]

            y1 = x1 + branch("attention", x2)
            wanted = y1, x2 + branch("mlp", y1)
            return wanted, reversible.layer(params, (x1, x2), CFG, context, x.dtype)[0]

        close(*run(x1, x2), rtol=1e-12)


@pytest.mark.slow
def test_forward_mode():
    """A directional derivative is that of the gradient."""
    with jax.enable_x64(True):
        given = jax.tree.map(jnp.asarray, inputs(CFG))
        run = functools.partial(total, Execution(layers="scan"), CFG, None)
        moved, grads = jax.jit(
            lambda *a: (jax.jvp(run, a, jax.tree.map(jnp.ones_like, a))[1], jax.grad(run, argnums=(0, 1, 2))(*a))
        )(*given)
    assert float(moved) == pytest.approx(sum(np.asarray(g).sum() for g in jax.tree.leaves(grads)), rel=1e-9)


def temporaries(num_layers, block, layers="scan", chunks=1, **fields):
    """Bytes that the compiled gradient of a stack needs beside its arguments and results."""
    cfg = model_config(num_layers=num_layers, width=64, num_heads=4, context_length=128, vocab_size=7, block=block)
    cfg = changed(cfg, **fields)
    params = abstract_params(stack_specs(blocks.block_specs(cfg), num_layers))
    x = jax.ShapeDtypeStruct((4, 128, 64), jnp.float32)
    context = Context(masks.causal(), execution=Execution(layers=layers, feed_forward_chunks=chunks))

    def run(params, x):
        return jnp.sum(jnp.sin(blocks.stack(params, x, cfg, context)[0]))

    compiled = jax.jit(jax.grad(run)).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.optimized
def test_memory_does_not_grow_with_the_layers():
    few, many = (temporaries(n, "reversible") for n in (4, 64))
    assert many <= 1.02 * few + 64 * 1024, (few, many)
    assert temporaries(16, "pre_norm") > 4 * many
    few, many = (temporaries(n, "reversible", attention={"kind": "lsh", "chunk": 16}) for n in (4, 64))
    assert many <= 1.02 * few + 64 * 1024, (few, many)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_chunked_feed_forward_needs_less_memory_in_both_passes():
    whole, parts = (temporaries(4, "reversible", chunks=n, mlp_width=2048) for n in (1, 8))
    assert parts < 0.5 * whole, (whole, parts)


@pytest.mark.slow
def test_a_chunked_feed_forward_changes_no_number():
    cfg = changed(CFG, block="pre_norm", activation="swiglu")
    one, parts = (gradients(cfg, Execution(layers="scan", feed_forward_chunks=n)) for n in (1, 4))
    close(parts, one, rtol=1e-10, atol=1e-12)
    with pytest.raises(ConfigError, match=r"feed_forward_chunks: 3; accepted: a divisor of model.context_length 256"):
        from_mapping({"execution": {"feed_forward_chunks": 3}})


@pytest.mark.slow
def test_streams_are_float32_whatever_the_dtype():
    """In bfloat16 the gradients stay as near to the plain form's as two ways to round are."""
    cfg = changed(CFG, num_layers=12, dtype="bfloat16")
    params, x, table = inputs(cfg)
    given = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params), jnp.asarray(x, jnp.bfloat16)
    run = functools.partial(total, Execution(layers="scan"), cfg, None, table=jnp.asarray(table, jnp.float32))
    found = jax.jit(jax.grad(run))(*given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reversible, "_streams", reversible._plain)
        wanted = jax.jit(jax.grad(run))(*given)
    both = (map(np.asarray, jax.tree.leaves(each)) for each in (found, wanted))
    error = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(*both, strict=True)]
    assert max(error) < 5e-3, max(error)


@pytest.mark.slow
def test_operations_are_those_of_the_program():
    """One more forward pass of the blocks than without."""
    cfg = from_mapping({"model": {"num_layers": 2, "width": 32, "vocab_size": 20, "context_length": 32,
                                  "block": "reversible", "attention": {"num_heads": 2}}}).model  # fmt: skip
    run = jax.jit(
        jax.grad(lambda p, t: jnp.sum(gpt.apply(p, t, cfg, execution=Execution(layers="scan", attention="xla"))))
    )
    compiled = run.lower(abstract_params(gpt.specs(cfg)), jnp.zeros((2, 32), int)).compile()
    counted = flops_per_token(cfg)
    assert counted.remat == flops_per_token(cfg, remat_policy="full").remat > 0
    wanted = 2 * 32 * (counted.training + counted.remat)
    assert costs.flops(hlo.read(compiled.as_text())) == pytest.approx(wanted, rel=0.02)


@pytest.mark.slow
def test_the_same_on_eight_devices():
    """Rows, their tokens and heads divided."""
    cfg = from_mapping({"model": {"num_layers": 2, "width": 32, "vocab_size": 24, "context_length": 16,
                                  "block": "reversible", "positions": "rotary"}}).model  # fmt: skip
    params = params_of(gpt.specs(cfg))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (8, 16)))
    execution = Execution(layers="scan", attention="xla")
    step = jax.jit(
        jax.value_and_grad(lambda p: jnp.mean(jnp.sin(gpt.apply(p, tokens, cfg, execution=execution)[..., 0])))
    )
    wanted = step(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2, context=2, tensor=2), jax.devices()[:8])):
        found = jax.device_get(jax.jit(step)(params))
    close(found, wanted, rtol=1e-4, atol=1e-5)

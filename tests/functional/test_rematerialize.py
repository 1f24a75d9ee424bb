"""What the backward pass computes again: equal numbers, and the arrays it is for are not kept."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.attention import attention
from jaxformer.functional.block import unstack
from jaxformer.functional.layers import layer_norm, linear, linear_of, mlp, rms_norm
from jaxformer.kernels.rematerialize import rematerialize
from jaxformer.masks import causal

FOUR, TWO = 4, 2  # bytes of a float32 and of a bfloat16


def test_again_is_the_same():
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    g = jnp.array([[3.0], [-2.0], [0.0], [jnp.inf]]).repeat(256, 0)
    np.testing.assert_array_equal(jax.jit(rematerialize)(x, g), x)


@pytest.mark.parametrize("x", [jnp.ones((64, 64)), jnp.ones((1024, 1024), jnp.bfloat16)], ids=["small", "narrow"])
def test_again_leaves_what_is_not_worth_it(x):
    assert rematerialize(x, x) is x


def test_on_gpus_narrow_arrays_wait_for_their_gradient_too():
    """Where only numbers that belong together are computed with: lowered for CUDA, the value depends on the gradient,
    for CPU it does not."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    again = jax.jit(lambda x, g: rematerialize(x, g, elementwise=True))
    texts = {name: again.trace(x, x).lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")}
    assert {name: "stablehlo.minimum" in text for name, text in texts.items()} == {
        "cpu": False, "cuda": True, "tpu": False,
    }  # fmt: skip


def test_on_gpus_the_slope_of_an_activation_waits_for_its_gradient():
    """And its result is that of the forward pass, which XLA keeps, where it sees the same twice."""

    def loss(x, w):
        return linear_of(jnp.sin, (x,), w).astype(jnp.float32).sum()

    x, w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 8), jnp.float32)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(x, w)
    texts = {name: step.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert "stablehlo.minimum" in texts["cuda"] and "stablehlo.minimum" not in texts["cpu"]
    calls = {name: re.findall(r"stablehlo.sine (%\w+)", text) for name, text in texts.items()}
    assert {name: len(found) for name, found in calls.items()} == {"cpu": 2, "cuda": 2 + 1}
    assert len(set(calls["cuda"])) == 2  # twice of the input itself


def bytes_of_a_layer(layer, params, x) -> float:
    """Temporary bytes that one layer more takes, forward and backward; `params` has a leading layer axis."""

    def temporaries(number):
        def loss(params, x):
            for part in unstack(params, number):
                x = x + layer(part, x)
            return x.sum()

        some = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype), params)
        return jax.jit(jax.grad(loss)).lower(some, x).compile().memory_analysis().temp_size_in_bytes

    return (temporaries(6) - temporaries(2)) / 4


@pytest.mark.parametrize(
    "activation, norm",
    [("gelu_tanh", layer_norm), ("gelu", rms_norm), ("swiglu", rms_norm)],
    ids=["gelu_tanh", "gelu", "swiglu"],
)
@pytest.mark.slow
@pytest.mark.optimized
def test_mlp_keeps_what_goes_into_the_activation_and_no_weights(activation, norm):
    """Of a layer: its input, the norm's result turned for the weight's gradient, the hidden numbers before the
    activation; and the weights' gradients until they are stacked."""
    n, d, f = 1024, 512, 2048
    names = {"w_up": (d, f), "w_down": (f, d), "scale": (d,)} | ({"w_gate": (d, f)} if activation == "swiglu" else {})
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in names.items()}

    def layer(p, x):
        weights = {name: w for name, w in p.items() if name != "scale"}
        return mlp(norm(x, p["scale"]), **weights, activation=activation)

    hidden = 2 if activation == "swiglu" else 1
    kept = (2 * n * d + hidden * n * f) * FOUR
    assert bytes_of_a_layer(layer, params, jax.ShapeDtypeStruct((n, d), jnp.float32)) < 1.1 * kept


@pytest.mark.slow
@pytest.mark.parametrize("norm", [layer_norm, rms_norm], ids=lambda norm: norm.__name__)
@pytest.mark.optimized
def test_norms_of_bfloat16_keep_neither_what_is_centred_nor_what_is_normed(norm):
    """Of a layer: its input, in float32 too, and the norm's result turned for the weight's gradient. Before, one
    float32 array of that size more."""
    n, d = 4096, 512
    params = {"w": jax.ShapeDtypeStruct((d, d), jnp.float32), "scale": jax.ShapeDtypeStruct((d,), jnp.float32)}

    def layer(p, x):
        return linear(norm(x, p["scale"]), p["w"])

    kept = 2 * n * d * TWO + (n + d) * d * FOUR
    assert bytes_of_a_layer(layer, params, jax.ShapeDtypeStruct((n, d), jnp.bfloat16)) < 1.2 * kept


@pytest.mark.slow
@pytest.mark.optimized
def test_attention_keeps_no_pieces_of_keys_and_values():
    """Of a layer: its input, turned too; queries, keys and values; the weights, of which causality spares half."""
    t, heads, width = 1024, 16, 64
    d = heads * width
    params = {name: jax.ShapeDtypeStruct((d, heads, width), jnp.float32) for name in ("q", "k", "v")}

    def layer(p, x):
        q, k, v = (linear(x, p[name]) for name in ("q", "k", "v"))
        return attention(q, k, v, causal(), implementation="xla").reshape(x.shape)

    weights = heads * t * (t + 128) // 2
    kept = (5 * t * d + weights) * FOUR
    assert bytes_of_a_layer(layer, params, jax.ShapeDtypeStruct((1, t, d), jnp.float32)) < 1.1 * kept

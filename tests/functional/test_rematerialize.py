"""What the backward pass computes again: equal numbers, and the arrays it is for are not kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional.attention import attention
from jaxformer.functional.block import unstack
from jaxformer.functional.layers import layer_norm, linear, mlp, rms_norm
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


def bytes_of_a_layer(layer, params, x) -> float:
    """Temporary bytes that one layer more takes, forward and backward; `params` has a leading layer axis."""

    def temporaries(number):
        def loss(params, x):
            for part in unstack(params, number):
                x = x + layer(part, x)
            return x.sum()

        some = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype), params)
        return jax.jit(jax.grad(loss)).lower(some, x).compile().memory_analysis().temp_size_in_bytes

    return (temporaries(4) - temporaries(2)) / 2


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

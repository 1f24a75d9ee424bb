"""Layers as plain functions of arrays and numbers: linear, norms, activations, MLP, dropout, embedding.

Linear layers, norms and the MLP have custom derivatives, for both `jax.grad` and `jax.jvp` (`kernels.derivatives`).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.kernels import derivatives
from jaxformer.kernels.columns import a_row_as_two, times_columns
from jaxformer.kernels.matmul import add_bias, matmul, matmul_of
from jaxformer.kernels.rematerialize import PRODUCT, rematerialize
from jaxformer.low_rank import Columns, LowRank
from jaxformer.types import Array


def linear(x: Array, w: Array | LowRank | Columns, b: Array | None = None, num_inputs: int = 1) -> Array:
    """x @ w + b over the last axis of `x`, or the last ones, in the dtype of `x`.

    Args:
      x: [..., D].
      w: [D, ...]; its trailing axes become the trailing axes of the result (say [D, H, K]). A `LowRank` of such
        arrays adds scale (x A) B, and its sum is never computed; `Columns` is a matrix stored otherwise.
      b: shape of w's trailing axes, or None.
      num_inputs: how many of w's leading axes are summed over, which are the last ones of x: 2 of [H, K, D].

    Returns:
      [..., *w.shape[num_inputs:]] in the dtype of x.

    >>> linear(jnp.ones((2, 3)), jnp.ones((3, 4, 5))).shape
    (2, 4, 5)
    """
    whole = w.weight if isinstance(w, LowRank) else w
    size = math.prod(whole.shape[:num_inputs])
    flat = _finished(_product(x.reshape(-1, size), w, size), b)
    return flat.reshape(*x.shape[: x.ndim - num_inputs], *whole.shape[num_inputs:])


def _product(x: Array, w: Array | LowRank | Columns, size: int) -> Array:
    """[N, D] and a weight whose leading axes have D entries in all."""
    if isinstance(w, Columns):
        return times_columns(x, w.array.astype(x.dtype), x.dtype)
    if not isinstance(w, LowRank):
        return matmul(x, w.reshape(size, -1))
    return matmul(x, w.weight.reshape(size, -1)) + _second_factor(matmul(x, w.a.reshape(size, -1)), w)


def _second_factor(inner: Array, w: LowRank) -> Array:
    """scale (x A) B of x A [N, R]."""
    return matmul(checkpoint_name(inner, PRODUCT) * w.scale, w.b.reshape(inner.shape[1], math.prod(w.b.shape[1:])))


def linear_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], w: Array | LowRank | Columns, b: Array | None = None
) -> Array:
    """linear(function(*inputs), w, b) that keeps only the inputs for the backward pass, not the function's result.

    Args:
      function: elementwise.
      inputs: [..., D] each.
      w: [D, F], or a `LowRank` or `Columns`.
      b: [F] or None.

    Returns:
      [..., F] in the dtype of the inputs.
    """
    if isinstance(w, LowRank):
        flat = matmul_of(function, inputs, w.weight) + _second_factor(matmul_of(function, inputs, w.a), w)
    elif isinstance(w, Columns):
        return linear(function(*inputs), w, b)
    else:
        flat = matmul_of(function, inputs, w)
    return _finished(flat, b).reshape(*inputs[0].shape[:-1], flat.shape[1])


def _finished(flat: Array, b: Array | None) -> Array:
    """A product [N, F], named for the checkpoint policies, and the bias."""
    flat = checkpoint_name(flat, PRODUCT)
    return flat if b is None else add_bias(flat, b.reshape(-1))


def _wide(x: Array) -> Array:
    """`x` in float32, or unchanged if wider: bfloat16 is too coarse for transcendental functions and statistics."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _align(parameter: Array, x: Array) -> Array:
    """`parameter` with leading axes of size 1 up to the rank of `x`; implicit rank promotion may be an error."""
    return parameter.reshape((1,) * (x.ndim - parameter.ndim) + parameter.shape)


def layer_norm(x: Array, scale: Array, bias: Array | None = None, epsilon: float = 1e-5) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis; statistics in float32 or wider.

    Args:
      x: [..., D].
      scale, bias: [D]; bias may be None.
      epsilon: added to the variance.

    Returns:
      [..., D] in the dtype of x.

    Source: Ba et al. 2016, section 3.
    """
    return _norm_rows(True, epsilon, x, scale, bias)


def rms_norm(x: Array, scale: Array, epsilon: float = 1e-5) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis; the mean in float32 or wider.

    Args:
      x: [..., D].
      scale: [D].
      epsilon: added to the mean square.

    Returns:
      [..., D] in the dtype of x.

    Source: Zhang and Sennrich 2019, section 4.
    """
    return _norm_rows(False, epsilon, x, scale, None)


def _norm_rows(centre: bool, epsilon: float, x: Array, scale: Array, bias: Array | None) -> Array:
    """`_norm` without a leading axis of size 1: XLA's CPU backend would split only that axis among its threads."""
    if x.ndim > 2 and x.shape[0] == 1:
        return _norm_rows(centre, epsilon, x.reshape(x.shape[1:]), scale, bias).reshape(x.shape)
    return _norm(centre, epsilon, x, scale, bias)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _norm(centre: bool, epsilon: float, x: Array, scale: Array, bias: Array | None) -> Array:
    """Both norms. The custom gradient keeps x and one or two numbers per token; autodiff would keep two or three
    float32 arrays like x."""
    return _norm_forward(centre, epsilon, x, scale, bias)[0]


def _norm_forward(centre, epsilon, x, scale, bias):
    wide = _wide(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centre else None
    centred = wide if mean is None else wide - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    out = centred * inverse * _align(scale, x)
    out = (out if bias is None else out + _align(bias, x)).astype(x.dtype)
    return out, (x, scale, bias, mean, inverse)


def _norm_backward(centre, epsilon, saved, g):
    x, scale, bias, mean, inverse = saved
    wide, g_wide = _wide(x), _wide(g)
    # Rematerialised, or XLA keeps the centred and the normed x, and each statistic broadcast to the size of x.
    remade = functools.partial(rematerialize, gradient=g_wide[..., :1], kept_bytes=wide.size * wide.dtype.itemsize)
    normed = (wide if mean is None else wide - remade(mean)) * remade(inverse)
    d_normed = g_wide * _align(scale, x)
    d_x = d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True)
    if mean is not None:
        d_x = d_x - jnp.mean(d_normed, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    d_scale = jnp.sum(g_wide * normed, axis=rows).astype(scale.dtype)
    d_bias = None if bias is None else jnp.sum(g_wide, axis=rows).astype(bias.dtype)
    return (remade(inverse) * d_x).astype(x.dtype), d_scale, d_bias


def _norm_tangent(centre, epsilon, saved, changes):
    x, scale, bias, mean, inverse = saved
    change, d_scale, d_bias = changes
    wide = _wide(change)
    if centre:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = (_wide(x) if mean is None else _wide(x) - mean) * inverse
    d_normed = inverse * (wide - normed * jnp.mean(wide * normed, axis=-1, keepdims=True))
    out = d_normed * _align(scale, x) + normed * _align(d_scale, x)
    return (out if bias is None else out + _align(d_bias, x)).astype(x.dtype)


derivatives.define(_norm, _norm_forward, _norm_tangent, _norm_backward)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


def gelu(x: Array) -> Array:
    """Exact GELU, x * Phi(x). Source: Hendrycks and Gimpel 2016, section 2.

    With erf: `jax.nn.gelu(approximate=False)` uses erfc, which is several times slower on CPU.
    """
    wide = _wide(x)
    return (0.5 * wide * (1 + jax.lax.erf(wide * (1 / math.sqrt(2))))).astype(x.dtype)


def gelu_tanh(x: Array) -> Array:
    """The tanh form of GELU that GPT-2 uses. Source: Hendrycks and Gimpel 2016, section 2."""
    half = x.dtype.itemsize == 2
    return jax.lax.platform_dependent(x, cuda=_gelu_tanh_on_gpu, default=_gelu_tanh) if half else _gelu_tanh(x)


def _gelu_tanh(x: Array) -> Array:
    wide = _wide(x)
    return (0.5 * wide * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).astype(x.dtype)


def _gelu_tanh_on_gpu(x: Array) -> Array:
    """x sigmoid(2 u) = x / (1 + exp(-2 u)), by the GPU's own exponential and reciprocal root: with XLA's tanh, a
    polynomial, the activation waits for arithmetic and not for memory."""
    wide = _wide(x)
    # Beyond exp(60) the result is 0 in any 16-bit dtype, and below inf its derivative is 0 and not NaN.
    grown = 1 + jnp.exp(jnp.minimum((-2 * math.sqrt(2 / math.pi)) * (wide + 0.044715 * wide**3), 60.0))
    return (wide * jnp.square(jax.lax.rsqrt(grown))).astype(x.dtype)


def silu(x: Array) -> Array:
    """x * sigmoid(x), the gate of SwiGLU. Source: Hendrycks and Gimpel 2016; Shazeer 2020."""
    wide = _wide(x)
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)


# name -> (function, True if gated). A gated MLP computes function(x w_gate) * (x w_up).
ACTIVATIONS = {
    "relu": (relu, False),
    "gelu": (gelu, False),
    "gelu_tanh": (gelu_tanh, False),
    "swiglu": (silu, True),
    "geglu": (gelu, True),
    "geglu_tanh": (gelu_tanh, True),
}


def _gated(function: Callable[[Array], Array], gate: Array, hidden: Array) -> Array:
    return function(gate) * hidden


def mlp(
    x: Array,
    w_up: Array,
    w_down: Array,
    b_up: Array | None = None,
    b_down: Array | None = None,
    w_gate: Array | None = None,
    b_gate: Array | None = None,
    activation: str = "gelu",
) -> Array:
    """The position-wise feed-forward layer.

    Args:
      x: [..., D].
      w_up: [D, F]; w_down: [F, D]; b_up: [F] or None; b_down: [D] or None.
      w_gate: [D, F], for the gated activations only; b_gate: [F] or None.
      activation: "relu", "gelu" (exact), "gelu_tanh", "swiglu", "geglu" or "geglu_tanh".

    Returns:
      [..., D] in the dtype of x.

    Raises:
      ValueError: unknown activation, a gated one without `w_gate`, or `w_gate` with one that has no gate.

    Source: Vaswani et al. 2017, section 3.3; Shazeer 2020 (GLU variants), section 2.

    >>> mlp(jnp.ones((2, 3)), jnp.ones((3, 8)), jnp.ones((8, 3)), activation="relu").shape
    (2, 3)
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"mlp: activation {activation!r}; accepted: {', '.join(ACTIVATIONS)}")
    function, gated = ACTIVATIONS[activation]
    if gated != (w_gate is not None):
        raise ValueError(f"mlp: activation {activation!r} {'needs' if gated else 'has no use for'} w_gate")
    hidden = linear(x, w_up, b_up)
    if w_gate is None:
        return linear_of(function, (hidden,), w_down, b_down)
    return linear_of(functools.partial(_gated, function), (linear(x, w_gate, b_gate), hidden), w_down, b_down)


def dropout(x: Array, rate: float, rng: Array | None) -> Array:
    """Zeroes a share `rate` of the entries and scales the rest by 1 / (1 - rate); nothing if `rng` is None.

    Raises:
      ValueError: a rate outside 0 <= rate < 1.

    Source: Srivastava et al. 2014, section 4 (the inverted form).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate {rate}; accepted: 0 <= rate < 1")
    if rate == 0.0 or rng is None:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def embed(tokens: Array, table: Array) -> Array:
    """Rows of `table` [V, D] for `tokens` [...] int. Returns [..., D]."""
    return jnp.asarray(table)[tokens]


def unembed(x: Array, table: Array, bias: Array | None = None, soft_cap: float | None = None) -> Array:
    """Logits x . table^T + bias, [..., V] float32 or wider. `x`: [..., D]; `table`: [V, D]; `bias`: [V] or None;
    `soft_cap`: as of `cap`.

    Source: Press and Wolf 2017 (the table may be the embedding's).
    """
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    logits = a_row_as_two(functools.partial(_logits, dtype=accumulate), x, table.astype(x.dtype))
    return cap(logits if bias is None else logits + _align(bias, logits), soft_cap)


def _logits(x: Array, table: Array, dtype) -> Array:
    return jnp.einsum("...D,VD->...V", x, table, preferred_element_type=dtype)


def cap(logits: Array, soft_cap: float | None) -> Array:
    """soft_cap * tanh(logits / soft_cap), or the logits if it is None. Source: Gemma team 2024, section 2."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)

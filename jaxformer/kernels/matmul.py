"""Matrix products that stay on the fast paths of XLA's CPU backend, forward and backward; plain products elsewhere.

Four paths are lost by writing the obvious thing on CPU (medians of alternating runs, two cores with AVX-512):

- The gradient of a weight is x^T g. XLA folds that transpose into the product and leaves its fast routine (81-140
  against about 400 GFLOP/s), or makes a bfloat16 product a float32 one (190 against 380 on two Zen 4 cores).
  Transposing the narrower operand for real, behind an optimization barrier and with an axis more, keeps it.
- A bfloat16 product with a bfloat16 result takes about twice as long as the same product with a float32 result that is
  rounded afterwards (193 against 361 GFLOP/s on two Zen 4 cores), so results are rounded here and not in the product.
- Most bfloat16 products with batch axes are made float32 ones (1.2 to 1.3 times the time of all of attention), unless
  an operand has an axis more.
- The gradient of a bias is a sum over tokens, in bfloat16 if differentiation makes it, and then a number at a time.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.rematerialize import rematerialize
from jaxformer.parallel.constraints import mesh_axes
from jaxformer.types import Array

_FEW_ROWS = 64
_FEW_BATCHES = 64


def rounded_einsum(spec: str, a: Array, b: Array, dtype) -> Array:
    """einsum with the result in `dtype`; on CPU, narrow operands and results take the way that is faster there."""

    def direct(a, b):
        return _ordered(spec, a, b, dtype)

    def on_cpu(a, b):
        wide = jnp.promote_types(dtype, jnp.float32)
        inputs, out = spec.split("->")
        left, right = inputs.split(",")
        batch = [x for x in left if x in right and x in out]
        if a.dtype.itemsize >= 4 or not batch:
            return _ordered(spec, a, b, wide).astype(dtype)
        found = _ordered(f"o{left},{right}->o{out}", a[None], b, wide)
        return found[0].astype(dtype)

    if a.dtype.itemsize >= 4 and jnp.dtype(dtype).itemsize >= 4:
        return direct(a, b)
    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=direct)


def _ordered(spec: str, a: Array, b: Array, dtype) -> Array:
    """einsum by one dot_general whose operands stand in the order that leaves the largest array as it lies.

    jnp.einsum always takes them the other way round, and XLA's CPU backend then makes a pass over the scores of
    attention to transpose them, and over the weights. What lies right: as first operand what is contracted along its
    last axis, as second what is contracted along earlier ones.
    """
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    common = [x for x in left if x in right]
    batch, contracted = [x for x in common if x in out], [x for x in common if x not in out]
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    larger = left if a.size >= b.size else right
    lies_first = larger[-1] in contracted
    if math.prod(sizes[x] for x in out) <= max(a.size, b.size) and (larger == left) != lies_first:
        left, right, a, b = right, left, b, a
    axes = (([side.index(x) for x in which] for side in (left, right)) for which in (contracted, batch))
    found = jax.lax.dot_general(a, b, tuple(map(tuple, axes)), preferred_element_type=dtype)
    order = [*batch, *(x for x in left if x not in common), *(x for x in right if x not in common)]
    return found.transpose([order.index(x) for x in out])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3))
def product(spec: str, a: Array, b: Array, dtype) -> Array:
    """einsum of two operands of one dtype, result in `dtype`; so are all products of its gradient.

    Without this a float32 result of bfloat16 operands would make both products of the backward pass float32 ones.

    Args:
      spec: einsum subscripts of two operands; every letter of an operand is in the other one or in the result.
      a, b: the operands.
      dtype: of the result.
    """
    return rounded_einsum(spec, a, b, dtype)


def _product_forward(spec, a, b, dtype):
    return rounded_einsum(spec, a, b, dtype), (a, b)


def _product_backward(spec, dtype, saved, g):
    del dtype
    a, b = saved
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    g = g.astype(a.dtype)
    gradient_a = rounded_einsum(f"{out},{right}->{left}", g, b, a.dtype)
    return gradient_a, rounded_einsum(f"{left},{out}->{right}", a, g, b.dtype)


def _product_tangent(spec, dtype, saved, changes):
    a, b = saved
    return rounded_einsum(spec, changes[0], b, dtype) + rounded_einsum(spec, a, changes[1], dtype)


derivatives.define(product, _product_forward, _product_tangent, _product_backward)


@jax.custom_jvp
def matmul(x: Array, w: Array) -> Array:
    """x @ w. `x`: [N, D]; `w`: [D, F], cast to the dtype of x inside. Returns [N, F] in the dtype of x.

    The gradient of w comes out in w's own (wider) dtype, with no rounding in between.
    """
    return rounded_einsum("ND,DF->NF", x, w.astype(x.dtype), x.dtype)


def _matmul_forward(x, w):
    return matmul(x, w), (x, w)


def _matmul_backward(saved, g):
    x, w = saved
    return times_transpose(g, _weight_again(w, g), x.dtype), transposed_product(x, g, w.dtype)


def _matmul_tangent(saved, changes):
    x, w = saved
    return matmul(changes[0], w) + matmul(x, changes[1])


derivatives.define(matmul, _matmul_forward, _matmul_tangent, _matmul_backward)


def _weight_again(w: Array, g: Array) -> Array:
    """`w` in the dtype of `g`, cut out of a stack of layers and cast again rather than kept; not over several devices,
    which would have to be sent the number of `g` on which that depends."""
    w = w.astype(g.dtype)
    return w if mesh_axes() else rematerialize(w, g[:1, :1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def matmul_of(function: Callable[..., Array], inputs: tuple[Array, ...], w: Array) -> Array:
    """function(*inputs) @ w, of which the inputs alone are kept for the backward pass.

    Args:
      function: elementwise; [..., D] of each input to [..., D].
      inputs: [..., D] each.
      w: [D, F], cast to the dtype of the inputs inside.

    Returns:
      [N, F], N tokens, in the dtype of the function's result.
    """
    return matmul(_flat(function(*inputs)), w)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _matmul_of_forward(function, inputs, w):
    return matmul_of(function, inputs, w), (inputs, w)


def _matmul_of_backward(function, saved, g):
    inputs, w = saved
    d_hidden = times_transpose(g, _weight_again(w, g), g.dtype).reshape(inputs[0].shape)
    hidden, pull = jax.vjp(function, *(rematerialize(x, d_hidden) for x in inputs))
    return pull(d_hidden), transposed_product(_flat(hidden), g, w.dtype)


def _matmul_of_tangent(function, saved, changes):
    inputs, w = saved
    hidden, change = jax.jvp(function, inputs, changes[0])
    return matmul(_flat(change), w) + matmul(_flat(hidden), changes[1])


derivatives.define(matmul_of, _matmul_of_forward, _matmul_of_tangent, _matmul_of_backward)


def transposed_product(x: Array, g: Array, dtype) -> Array:
    """x^T g, the gradient of a weight. `x`: [N, D]; `g`: [N, F]. Returns [D, F] in `dtype`."""

    def plain(x, g):
        return jnp.matmul(x.T, g, preferred_element_type=dtype)

    def transposed(x, g):
        if x.shape[1] <= g.shape[1]:
            return jnp.einsum("ODN,NF->ODF", _turned(x), g, preferred_element_type=dtype)[0]
        # The result behind a barrier too: XLA would fold its transpose into the product and be off the fast path
        # again (1.35 times the time), or, where g is a constant, on one that cannot run bfloat16 at all.
        out = jnp.einsum("OFN,ND->OFD", _turned(g), x, preferred_element_type=dtype)[0]
        return jax.lax.optimization_barrier(out).T

    return jax.lax.platform_dependent(x, g, cpu=transposed, default=plain)


def transposed_products(x: Array, g: Array, dtype) -> Array:
    """x^T g of every batch. `x`: [(B,) G, T, K], the narrower; `g`: [(B,) G, T, S].

    Returns [(B,) G, K, S] in `dtype`.

    On CPU narrow x, and float32 ones of few batches, are turned first: otherwise XLA takes another library's routine,
    at half of the rate where other products run beside it (GPT-2's step of one row takes 0.95 of the time so; of 96
    batches 1.01 to 1.02).
    """
    batch = "BG"[4 - x.ndim :]

    def plain(x, g):
        return rounded_einsum(f"{batch}TK,{batch}TS->{batch}KS", x, g, dtype)

    def turned(x, g):
        x = jax.lax.optimization_barrier(x.swapaxes(-2, -1))
        return rounded_einsum(f"{batch}KT,{batch}TS->{batch}KS", x, g, dtype)

    if x.dtype.itemsize >= 4 and math.prod(x.shape[:-2]) > _FEW_BATCHES:
        return plain(x, g)
    return jax.lax.platform_dependent(x, g, cpu=turned, default=plain)


def times_transpose(a: Array, b: Array, dtype) -> Array:
    """a b^T. `a`: [N, K]; `b`: [M, K]. Returns [N, M] in `dtype`.

    On CPU narrow operands have b^T made an array of its own first; for few rows that would cost more than it saves, and
    float32 ones are as fast without.
    """

    def plain(a, b):
        return rounded_einsum("NK,MK->NM", a, b, dtype)

    def turned(a, b):
        return rounded_einsum("ONK,OKM->NM", a[None], _turned(b), dtype)

    if a.dtype.itemsize >= 4 or len(a) < _FEW_ROWS:
        return plain(a, b)
    return jax.lax.platform_dependent(a, b, cpu=turned, default=plain)


def _turned(x: Array) -> Array:
    """x^T [N, D] -> [1, D, N], an array of its own. For the axis more, XLA never takes it for a transpose of x: not
    even before fusion, when it decides which bfloat16 products to make float32 ones (1.7 to 1.9 times the time)."""
    return jax.lax.optimization_barrier(x.T[None])


@jax.custom_jvp
def add_bias(x: Array, b: Array) -> Array:
    """x + b. `x`: [N, F]; `b`: [F], cast to the dtype of x. Returns [N, F] in the dtype of x.

    The gradient of b is summed and comes out in b's own (wider) dtype; a sum in bfloat16, which differentiation would
    make, is less exact and much slower on CPU.
    """
    return x + b.astype(x.dtype)[None]


def _add_bias_forward(x, b):
    return add_bias(x, b), b


def _add_bias_backward(b, g):
    return g, jnp.sum(g, axis=0, dtype=b.dtype)


def _add_bias_tangent(b, changes):
    del b
    return add_bias(*changes)


derivatives.define(add_bias, _add_bias_forward, _add_bias_tangent, _add_bias_backward)

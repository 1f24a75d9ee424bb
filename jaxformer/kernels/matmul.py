"""Matrix products that stay on the fast paths of XLA's CPU backend, forward and backward; plain products elsewhere.

On CPU the straightforward code would be slow for four reasons:

- The gradient of a weight is x^T g. XLA folds the transpose into the product and then does not use its fast routine, or
  converts a bfloat16 product to float32. Transposing the narrower operand explicitly, behind an optimization barrier
  and with an extra axis, prevents both.
- A bfloat16 product with a bfloat16 result is about half as fast as one with a float32 result that is rounded
  afterwards, so results are rounded here and not in the product.
- Most bfloat16 products with batch axes are converted to float32, unless an operand has an extra axis.
- The gradient of a bias is a sum over tokens, which autodiff makes in bfloat16, and that is not vectorized.
"""

import functools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.rematerialize import rematerialize
from jaxformer.parallel.constraints import mesh_axes
from jaxformer.types import Array

FEW_ROWS = 64
_FEW_BATCHES = 64


def rounded_einsum(spec: str, a: Array, b: Array, dtype) -> Array:
    """einsum with the result in `dtype`; 16-bit operands and results are computed the way that is fast on CPU."""

    def direct(a, b):
        return _ordered(spec, a, b, dtype)

    def on_cpu(a, b):
        wide = jnp.promote_types(dtype, jnp.float32)
        left, right, out = re.split(",|->", spec)
        batch = [x for x in left if x in right and x in out]
        if a.dtype.itemsize >= 4 or not batch:
            return _ordered(spec, a, b, wide).astype(dtype)
        left, right, a, b = _with_one_turned(left, right, "".join(batch), a, b)
        return _ordered(f"o{left},{right}->o{out}", a[None], b, wide)[0].astype(dtype)

    if a.dtype.itemsize >= 4 and jnp.dtype(dtype).itemsize >= 4:
        return direct(a, b)
    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=direct)


def _with_one_turned(left: str, right: str, batch: str, a: Array, b: Array) -> tuple[str, str, Array, Array]:
    """Subscripts and operands of a product a^T b of every batch, the narrower operand transposed; others as they are.

    XLA's CPU backend has no bfloat16 in the routine for such products, and fails."""
    contracted = [x for x in left if x in right and x not in batch]
    leads = left.startswith(batch) and right.startswith(batch)
    if not leads or len(contracted) != 1 or left[-1] in contracted or right[-1] in contracted:
        return left, right, a, b

    def turned(letters: str, x: Array) -> tuple[str, Array]:
        at = letters.index(contracted[0])
        last = jax.lax.optimization_barrier(jnp.moveaxis(x, at, -1))
        return letters[:at] + letters[at + 1 :] + letters[at], last

    if a.size <= b.size:
        left, a = turned(left, a)
    else:
        right, b = turned(right, b)
    return left, right, a, b


def _ordered(spec: str, a: Array, b: Array, dtype) -> Array:
    """einsum by one dot_general, with the operands in the order that needs no transpose of the largest array.

    jnp.einsum always uses the other order, for which XLA's CPU backend transposes attention's scores and weights. No
    transpose is needed for a first operand that is contracted along its last axis, or a second along earlier ones.
    """
    left, right, out = re.split(",|->", spec)
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
    """einsum of two operands of one dtype, result in `dtype`; the gradient's products also use the operands' dtype.

    Otherwise a float32 result of bfloat16 operands would make both products of the backward pass float32.

    Args:
      spec: einsum subscripts of two operands; every letter of an operand is in the other one or in the result.
      a, b: the operands.
      dtype: of the result.
    """
    return rounded_einsum(spec, a, b, dtype)


def _product_forward(spec, a, b, dtype):
    return rounded_einsum(spec, a, b, dtype), (a, b)


def _product_backward(spec, dtype, saved, g):
    a, b = saved
    left, right, out = re.split(",|->", spec)
    g = g.astype(a.dtype)
    gradient_a = rounded_einsum(f"{out},{right}->{left}", g, b, a.dtype)
    return gradient_a, rounded_einsum(f"{left},{out}->{right}", a, g, b.dtype)


def _product_tangent(spec, dtype, saved, changes):
    a, b = saved
    return rounded_einsum(spec, changes[0], b, dtype) + rounded_einsum(spec, a, changes[1], dtype)


derivatives.define(product, _product_forward, _product_tangent, _product_backward)


@jax.custom_jvp
def matmul(x: Array, w: Array) -> Array:
    """x @ w. `x`: [N, D]; `w`: [D, F], cast to the dtype of x. Returns [N, F] in the dtype of x.

    The gradient of w is computed in w's own (wider) dtype, without rounding in between.
    """
    return rounded_einsum("ND,DF->NF", x, w.astype(x.dtype), x.dtype)


def _matmul_backward(saved, g):
    x, w = saved
    return times_transpose(g, _weight_again(w, g), x.dtype), transposed_product(x, g, w.dtype)


def _matmul_tangent(saved, changes):
    x, w = saved
    return matmul(changes[0], w) + matmul(x, changes[1])


derivatives.define(matmul, None, _matmul_tangent, _matmul_backward)


def _weight_again(w: Array, g: Array) -> Array:
    """`w` in the dtype of `g`, rematerialised: sliced from the stack of layers and cast again instead of kept. Not on
    several devices, which would have to communicate the element of `g` that this depends on."""
    w = w.astype(g.dtype)
    return w if mesh_axes() else rematerialize(w, g[:1, :1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def matmul_of(function: Callable[..., Array], inputs: tuple[Array, ...], w: Array) -> Array:
    """function(*inputs) @ w, keeping only the inputs for the backward pass; on GPUs the function's result too.

    Args:
      function: elementwise; [..., D] of each input to [..., D].
      inputs: [..., D] each.
      w: [D, F], cast to the dtype of the inputs.

    Returns:
      [N, F], N tokens, in the dtype of the function's result.
    """
    return matmul(_flat(function(*inputs)), w)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _matmul_of_backward(function, saved, g):
    inputs, w = saved
    d_hidden = times_transpose(g, _weight_again(w, g), g.dtype).reshape(inputs[0].shape)
    hidden, pull = jax.vjp(function, *(rematerialize(x, d_hidden, elementwise=True) for x in inputs))
    hidden = _kept_on_gpu(function, inputs, hidden)
    return pull(d_hidden), transposed_product(_flat(hidden), g, w.dtype)


def _kept_on_gpu(function: Callable[..., Array], inputs: tuple[Array, ...], hidden: Array) -> Array:
    """`hidden`, function(*inputs) computed again; on GPUs by the same computation as in the forward pass, which XLA
    then keeps: computing it again is a kernel of its own there, 3 % of a step of GPT-2 1.5B on an H200."""

    def forward(hidden, *inputs):
        return function(*inputs)

    return jax.lax.platform_dependent(hidden, *inputs, cuda=forward, default=lambda hidden, *inputs: hidden)


def _matmul_of_tangent(function, saved, changes):
    inputs, w = saved
    hidden, change = jax.jvp(function, inputs, changes[0])
    return matmul(_flat(change), w) + matmul(_flat(hidden), changes[1])


derivatives.define(matmul_of, None, _matmul_of_tangent, _matmul_of_backward)


def transposed_product(x: Array, g: Array, dtype) -> Array:
    """x^T g, the gradient of a weight. `x`: [N, D]; `g`: [N, F]. Returns [D, F] in `dtype`."""

    def plain(x, g):
        return jnp.matmul(x.T, g, preferred_element_type=dtype)

    def transposed(x, g):
        if x.shape[1] <= g.shape[1]:
            return jnp.einsum("ODN,NF->ODF", _turned(x), g, preferred_element_type=dtype)[0]
        # A barrier for the result too: otherwise XLA folds its transpose into the product, which is slow again or, for
        # a constant g, fails because that routine has no bfloat16.
        out = jnp.einsum("OFN,ND->OFD", _turned(g), x, preferred_element_type=dtype)[0]
        return jax.lax.optimization_barrier(out).T

    return jax.lax.platform_dependent(x, g, cpu=transposed, default=plain)


def transposed_products(x: Array, g: Array, dtype) -> Array:
    """x^T g of every batch. `x`: [(B,) G, T, K], the narrower; `g`: [(B,) G, T, S].

    Returns [(B,) G, K, S] in `dtype`.

    On CPU x is transposed first if it is 16-bit, or float32 with few batches: otherwise XLA uses a routine that is slow
    when other products run at the same time.
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

    On CPU b is transposed explicitly first for 16-bit operands; not for few rows, where that costs more than it saves,
    and not for float32, which is as fast without.
    """

    def plain(a, b):
        return rounded_einsum("NK,MK->NM", a, b, dtype)

    def turned(a, b):
        return rounded_einsum("ONK,OKM->NM", a[None], _turned(b), dtype)

    if a.dtype.itemsize >= 4 or len(a) < FEW_ROWS:
        return plain(a, b)
    return jax.lax.platform_dependent(a, b, cpu=turned, default=plain)


def _turned(x: Array) -> Array:
    """x^T [N, D] -> [1, D, N] as a new array. The extra axis hides the transpose from XLA, also before fusion, when it
    decides which bfloat16 products to convert to float32."""
    return jax.lax.optimization_barrier(x.T[None])


@jax.custom_jvp
def add_bias(x: Array, b: Array) -> Array:
    """x + b. `x`: [N, F]; `b`: [F], cast to the dtype of x. Returns [N, F] in the dtype of x.

    The gradient of b is summed in b's own (wider) dtype; autodiff's sum in bfloat16 is less exact and much slower on
    CPU.
    """
    return x + b.astype(x.dtype)[None]


def _add_bias_forward(x, b):
    return add_bias(x, b), b


def _add_bias_backward(b, g):
    return g, jnp.sum(g, axis=0, dtype=b.dtype)


def _add_bias_tangent(b, changes):
    return add_bias(*changes)


derivatives.define(add_bias, _add_bias_forward, _add_bias_tangent, _add_bias_backward)

"""x @ w with a weight gradient that stays on the fast path of XLA's CPU matrix product.

The gradient of the weight is x^T g. XLA on CPU folds that transpose into the product and falls off its fast
routine (81-140 against about 400 GFLOP/s measured on AVX-512). Transposing the narrower of the two operands for real,
behind an optimization barrier, keeps it on; other platforms get the plain product.

The weight is cast to the dtype of x inside, so that its gradient comes out in the weight's own (wider) dtype,
accumulated without a rounding in between.
"""

import jax
import jax.numpy as jnp

from jaxformer.types import Array


@jax.custom_vjp
def matmul(x: Array, w: Array) -> Array:
    """x: [N, D]; w: [D, F]. Returns [N, F] in the dtype of x; the gradient of w has the dtype of w."""
    return jnp.matmul(x, w.astype(x.dtype))


def _forward(x, w):
    return matmul(x, w), (x, w)


def _backward(saved, g):
    x, w = saved

    def plain(x, g):
        return jnp.matmul(x.T, g, preferred_element_type=w.dtype)

    def cpu(x, g):
        if x.shape[1] <= g.shape[1]:
            return jnp.matmul(jax.lax.optimization_barrier(x.T), g, preferred_element_type=w.dtype)
        return jnp.matmul(jax.lax.optimization_barrier(g.T), x, preferred_element_type=w.dtype).T

    return jnp.matmul(g, w.astype(g.dtype).T), jax.lax.platform_dependent(x, g, cpu=cpu, default=plain)


matmul.defvjp(_forward, _backward)

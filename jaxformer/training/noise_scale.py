"""The gradient noise scale, from the gradients of micro-batches: about the batch size beyond which more tokens for each
update begin to buy little.

Let the gradient of a token be G on average, with covariance S. Of a batch of weight W, in micro-batches of weights
a_i W, gradient accumulation adds up shares s_i with means a_i G and covariances a_i S / W. With

    Q = sum |s_i|**2,   R = |sum s_i|**2,   A = sum a_i**2

the expectations are E Q = A |G|**2 + tr S / W and E R = |G|**2 + tr S / W, so that |G|**2 and tr S follow without bias,
for unequal weights too. Their ratio is the noise scale B, in tokens. Each is noisy, and |G|**2 may come out below 0:
both are averaged over many updates before they are divided.

Source: McCandlish et al. 2018, section 2.2 and appendix A.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.training.counter_biases import without_counter_biases
from jaxformer.training.microbatch import fori_over_batches
from jaxformer.types import Array, Batch, Model, Params, Sums


class Squares(NamedTuple):
    """What is added up over micro-batches, () float32 each.

    Attributes:
      shares: of |s_i|**2, squared norms of the shares of the gradient.
      weights: of the squares of the micro-batches' weights.
    """

    shares: Array
    weights: Array


def squared_norm(tree: Any) -> Array:
    """Of all arrays of a tree together, () float32 or wider."""
    leaves = jax.tree.leaves(tree)
    return sum((jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in leaves), jnp.float32(0))


def noise_sums(squares: Squares, gradient: Any, weight: Array) -> Sums:
    """The metrics of an update, as (sum, weight).

    Args:
      squares: of its micro-batches.
      gradient: of the whole batch.
      weight: W, () float: of the whole batch, in tokens.

    Returns:
      "noise_scale": (tr S, |G|**2), whose sums over updates are divided; and both by themselves with weight 1, as
      "gradient_variance" and "gradient_square". All are 0 if one micro-batch has all the weight.

    Two micro-batches of one token each, whose gradients are 3 and 1:

    >>> squares = Squares(jnp.float32(1.5**2 + 0.5**2), jnp.float32(2.0))
    >>> {name: [float(x) for x in pair] for name, pair in noise_sums(squares, {"w": jnp.array([2.0])}, 2.0).items()}
    {'noise_scale': [2.0, 3.0], 'gradient_variance': [2.0, 1.0], 'gradient_square': [3.0, 1.0]}
    """
    whole = squared_norm(gradient)
    share = squares.weights / jnp.square(jnp.where(weight > 0, weight, 1))
    known = (weight > 0) & (share < 1)
    rest = jnp.where(known, 1 - share, 1)
    variance = jnp.where(known, weight * (squares.shares - share * whole) / rest, 0)
    square = jnp.where(known, (whole - squares.shares) / rest, 0)
    one = jnp.where(known, jnp.ones_like(square), 0)
    return {
        "noise_scale": (variance, square), "gradient_variance": (variance, one), "gradient_square": (square, one),
    }  # fmt: skip


def accumulate(
    value_and_grad: Callable, zeros: Any, trained: Params, parts: Batch, rng: Array, model: Model
) -> tuple[Array, Params, Sums]:
    """Loss, gradient and metrics added up over micro-batches, and the metrics of `noise_sums`.

    Args:
      value_and_grad: ``(trained, rows, rng) -> ((loss, sums), gradient)`` of one micro-batch's share.
      zeros: what is added to, in the shapes of its results.
      trained: the parameters that are trained.
      parts: micro-batches, along a leading axis.
      rng: micro-batch i gets fold_in(rng, i).
      model: whose `weights` under "loss" are those of the micro-batches. What its specs call a counter bias has no
        gradient in the sense of this file, and is left out.
    """

    def add(index, carry, rows):
        total, squares, weight = carry
        found = value_and_grad(trained, rows, jax.random.fold_in(rng, index))
        mine = model.weights(rows)["loss"]
        new = Squares(squared_norm(without_counter_biases(found[1], model.specs)), jnp.square(mine))
        return jax.tree.map(jnp.add, (total, squares, weight), (found, new, mine))

    shapes = jax.eval_shape(lambda: model.weights(jax.tree.map(lambda x: x[0], parts))["loss"])
    nothing = jnp.zeros(shapes.shape, shapes.dtype)
    none = Squares(jnp.zeros_like(squared_norm(zeros[1])), nothing)
    count = jax.tree.leaves(parts)[0].shape[0]
    ((loss, sums), grads), squares, weight = fori_over_batches(add, (zeros, none, nothing), parts, count)
    return loss, grads, sums | noise_sums(squares, without_counter_biases(grads, model.specs), weight)

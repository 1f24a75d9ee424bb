"""One evaluation batch: a pure function, and its compilation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.parallel.mesh import batch_sharding, param_shardings, replicated
from jaxformer.types import Array, Batch, Model, Params, Sums


def eval_step(
    params: Params, batch: Batch, frozen: Any = None, *, model: Model
) -> Sums | tuple[Sums, dict[str, Array]]:
    """The model's metrics on one batch, without dropout, and its predictions where it has a `predict`.

    Args:
      params, batch, model: as of `types.Model`.
      frozen: as in `TrainState`.

    Returns:
      name -> (sum, weight), each [B] float32 where the model reports rows (so that a standard error over rows can
      be computed), else [1]: the batch is then one unit.
    """
    if model.predict is not None:
        sums, predictions = model.predict(params, batch, frozen)
        return _rows(sums), predictions
    return _rows(model.loss(params, batch, None, frozen)[1])


def compile_eval(
    model: Model, mesh: Mesh, step: Callable[..., Any] = eval_step
) -> Callable[[Params, Batch, Any], Any]:  # fmt: skip
    """`eval_step`, or one like it, jitted on `mesh`: (params, batch there, frozen) -> what it returns, on each host."""
    params, frozen = (param_shardings(specs, mesh) for specs in (model.specs, model.frozen))
    return jax.jit(
        functools.partial(step, model=model),
        in_shardings=(params, batch_sharding(mesh), frozen),
        out_shardings=replicated(mesh),
    )


def _rows(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: jnp.atleast_1d(x).astype(jnp.float32), sums)

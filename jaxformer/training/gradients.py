"""Loss and gradient of a batch in micro-batches, exactly those of the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.parallel.data_axis import apart, data_shards, draws, sum_over_data
from jaxformer.specs import is_spec, is_statistic, merge, only, only_trained, with_trained
from jaxformer.training.microbatch import fori_over_batches, split_microbatches
from jaxformer.training.noise_scale import accumulate
from jaxformer.types import Array, Batch, Model, Params, Sums


def gradients(
    params: Params,
    batch: Batch,
    rng: Array,
    frozen: Any = None,
    *,
    model: Model,
    micro_batches: int = 1,
    noise_scale: bool = False,
    staged: bool = False,
) -> tuple[Array, Params, Sums, dict[str, Array]]:
    """Loss and gradient of a whole batch, computed one micro-batch after another.

    Exact even if micro-batches have unequal weights: each one's sums are divided by the weight of the whole batch. They
    are added in float32 (or wider, where the parameters are). What the loss needs of the whole batch, the parameters of
    role "statistic", is summed over all micro-batches before the first of them has its gradient computed. On a mesh
    with a data axis the gradients are summed over it once, see `parallel.data_axis`; once a micro-batch where the loss
    draws random numbers.

    Args:
      params: the parameters.
      batch: rows divide by `micro_batches`.
      rng: micro-batch i gets fold_in(rng, i).
      frozen: as in `TrainState`.
      model: the model.
      micro_batches: how many.
      noise_scale: the metrics have those of `noise_scale.noise_sums`, too; with at least two micro-batches.
      staged: the loss takes the whole batch and splits it itself, as on a mesh with stages; it gets the keys of all
        micro-batches, [micro_batches].

    Returns:
      The loss (scalar, mean), its gradient (None for parameters that are not trained), the metrics' sums
      (scalars), and the weights of the objective's terms.
    """
    weights = model.weights(batch)
    if micro_batches == 1 or staged:
        share, counts = _share(model, params, frozen, weights), _statistics(params, model)
        rngs = jax.random.fold_in(rng, 0)
        if staged:
            rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(micro_batches))
        trained = only_trained(params, model.specs)
        counts = None if counts is None or not staged else _count(share, trained)(batch, rngs, counts)
        (loss, sums), grads = jax.value_and_grad(share, has_aux=True)(trained, batch, rngs, counts)
        return loss, grads, sums, weights

    loop = functools.partial(_over_micro_batches, model=model, micro_batches=micro_batches)
    if noise_scale:
        return (*loop(batch, rng, params, frozen, weights, noise_scale=True), weights)
    if data_shards() == 1 or _draws(batch, rng, params, frozen, weights, model, micro_batches):
        return (*loop(batch, rng, params, frozen, weights), weights)
    return (*apart(functools.partial(loop, total=sum_over_data), batch, rng, params, frozen, weights), weights)


def _share(model: Model, params: Params, frozen: Any, weights: dict[str, Array]) -> Callable[..., tuple[Array, Sums]]:
    """(trained parameters, rows, key, statistics) -> the rows' share of the objective, and their metrics' sums."""

    def share(trained: Params, part: Batch, rng: Array, statistics: Any = None) -> tuple[Array, Sums]:
        whole = with_trained(params, trained, model.specs)
        whole = whole if statistics is None else merge(whole, statistics, model.specs, is_statistic)
        objective, metrics = model.loss(whole, part, rng, frozen)
        if objective.keys() != weights.keys():
            raise ValueError(f"Model.weights names {sorted(weights)}, Model.loss {sorted(objective)}")
        measured = {name: objective[name] for name in model.measured}
        minimised = {name: total for name, (total, _) in objective.items() if name not in measured}
        # A batch without any weight (no token was selected) has sum 0, and so loss and gradient 0.
        terms = [total / jnp.where(weights[k] > 0, weights[k], 1) for k, total in minimised.items()]
        return functools.reduce(jnp.add, terms), jax.tree.map(jnp.sum, metrics | measured)

    return share


def _draws(
    batch: Batch, rng: Array, params: Params, frozen: Any, weights: dict[str, Array], model: Model, micro_batches: int
) -> bool:
    """Whether the loss of a micro-batch draws random numbers."""
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) // micro_batches, *x.shape[1:]), x.dtype), batch)
    return draws(_share(model, params, frozen, weights), only_trained(params, model.specs), rows, rng)


def _statistics(params: Params, model: Model) -> Params | None:
    """Zeros for the parameters of role "statistic"; None: there are none."""
    counted = any(map(is_statistic, jax.tree.leaves(model.specs, is_leaf=is_spec)))
    return jax.tree.map(jnp.zeros_like, only(params, model.specs, is_statistic)) if counted else None


def _count(share: Callable[..., Any], trained: Params) -> Callable[..., Params]:
    """(rows, key, zeros) -> what the rows add to the statistics: the derivative by them."""
    return jax.grad(lambda *of: share(trained, *of)[0], argnums=2)


def _over_micro_batches(
    batch: Batch,
    rng: Array,
    params: Params,
    frozen: Any,
    weights: dict[str, Array],
    *,
    model: Model,
    micro_batches: int,
    noise_scale: bool = False,
    total: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[Array, Params, Sums]:
    """Loss, gradient and metrics' sums, one micro-batch after another. `total` adds up what devices apart have."""
    share, trained = _share(model, params, frozen, weights), only_trained(params, model.specs)
    value_and_grad = jax.value_and_grad(share, has_aux=True)
    # Each part takes rows from the whole batch, so that no row moves to another device.
    parts = jax.tree.map(lambda x: split_microbatches(x, micro_batches), batch)
    statistics = _statistics(params, model)
    if statistics is not None:
        nothing, count = statistics, _count(share, trained)

        def add_counts(index, total, rows):
            return jax.tree.map(jnp.add, total, count(rows, jax.random.fold_in(rng, index), nothing))

        statistics = total(fori_over_batches(add_counts, nothing, parts, micro_batches))
    shapes = jax.eval_shape(value_and_grad, trained, jax.tree.map(lambda x: x[0], parts), rng, statistics)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes)
    if noise_scale:
        with_statistics = functools.partial(value_and_grad, statistics=statistics)
        return accumulate(with_statistics, zeros, trained, parts, rng, model)

    def add(index, total, rows):
        return jax.tree.map(jnp.add, total, value_and_grad(trained, rows, jax.random.fold_in(rng, index), statistics))

    (loss, sums), grads = total(fori_over_batches(add, zeros, parts, micro_batches))
    return loss, grads, sums

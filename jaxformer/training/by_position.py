"""The loss of tokens by their place in the document, in the same pass over the text as the loss of all.

A row's metrics are sums with the weights of its tokens. So the loss at some places is that of the same batch with
weight 0 everywhere else; the layers below the loss, which read no weights, are computed once for all buckets.

>>> buckets(6)
[(0, 0), (1, 1), (2, 3), (4, 5)]
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.training.metrics import WeightedMean, combined
from jaxformer.types import Array, Batch, Model, Params, Sums


def buckets(length: int) -> list[tuple[int, int]]:
    """(first, last) place of each bucket in a document of `length` tokens: 0, 1, 2 to 3, 4 to 7, ..."""
    firsts = [0, *(1 << n for n in range((length - 1).bit_length()))]
    return [(first, min(max(2 * first - 1, 0), length - 1)) for first in firsts]


def eval_by_position(params: Params, batch: Batch, frozen: object = None, *, model: Model) -> Sums:
    """As `eval_step.eval_step`, and of each bucket its loss, under the name of `name_of`.

    Raises:
      ConfigError: the model predicts labels, whose loss is not one of tokens.
    """
    if model.predict is not None:
        raise ConfigError(
            "--by-position: the run predicts labels, and its loss is not one of tokens; accepted: without"
        )
    places = buckets(batch.tokens.shape[1] + _before(batch))

    def within(first: Array, last: Array) -> Sums:
        inside = (batch.positions >= first) & (batch.positions <= last)
        part = batch._replace(weights=jnp.where(inside, batch.weights, 0))
        return model.loss(params, part, None, frozen)[1]

    firsts, lasts = zip((0, np.iinfo(np.int32).max), *places, strict=True)
    found = jax.vmap(within)(jnp.array(firsts, jnp.int32), jnp.array(lasts, jnp.int32))
    found = jax.tree.map(lambda x: x.astype(jnp.float32).reshape(len(x), -1), found)
    sums, weights = found["loss"]
    by_place = {name_of(*place): (sums[i], weights[i]) for i, place in enumerate(places, start=1)}
    return jax.tree.map(lambda x: x[0], found) | by_place


def _before(batch: Batch) -> int:
    """Tokens of a memory, in which places are counted too."""
    return batch.inputs["memory_tokens"].shape[1] if batch.inputs and "memory_tokens" in batch.inputs else 0


def name_of(first: int, last: int) -> str:
    """The name of a bucket's loss among metrics."""
    return f"loss_at_{first}_to_{last}"


def taken_out(
    found: Mapping[str, Mapping[str, WeightedMean]], shares: Mapping[str, float], length: int
) -> tuple[dict[str, dict[str, WeightedMean]], list[dict[str, float]]]:
    """The metrics of each source without the losses of buckets, and these by the shares of the sources.

    Args:
      found: by name of the source, of `evaluate` with `eval_by_position`.
      shares: of the sources, which add up to 1.
      length: tokens of a row, and of the memory before it.

    Returns:
      The other metrics; and for each bucket that has tokens in every source its `first` and `last` place, `loss`,
      `loss_stderr`, and `weight`, the number of tokens.
    """
    whole, names = combined(found, shares), {name_of(*place): place for place in buckets(length)}
    rest = {of: {name: mean for name, mean in means.items() if name not in names} for of, means in found.items()}
    rows = [
        {"first": first, "last": last, "loss": mean.mean, "loss_stderr": mean.stderr, "weight": mean.weight}
        for name, (first, last) in names.items()
        if not math.isnan((mean := whole[name]).mean)
    ]
    return rest, rows

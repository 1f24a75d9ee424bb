"""Feed-forward layers over a few tokens at a time, so that their hidden layer is never there for a whole row.

Source: Kitaev et al. 2020, section 3 (chunking).
"""

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional.layer import Context, Sublayer
from jaxformer.types import Array, Params


def in_chunks(sublayer: Sublayer) -> Sublayer:
    """A sublayer that treats each token alone, computed in `execution.feed_forward_chunks` parts of each row.

    The backward pass computes the hidden layer of one part at a time again. Rows that do not divide are computed whole,
    and so is a sublayer with terms of the objective, which need not be sums over tokens.
    """

    def apply(params: Params, x: Array, cfg: ModelConfig, context: Context):
        chunks = context.execution.feed_forward_chunks
        if chunks == 1 or x.ndim != 3 or x.shape[1] % chunks or context.cache is not None or sublayer.terms:
            return sublayer.apply(params, x, cfg, context)

        def one(params: Params, part: Array, number: Array) -> Array:
            rng = None if context.rng is None else jax.random.fold_in(context.rng, number)
            return sublayer.apply(params, part, cfg, context._replace(rng=rng))[0]

        again = jax.checkpoint(one, prevent_cse=False)
        parts = jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, x.shape[2]), 1, 0)
        _, out = jax.lax.scan(lambda _, part: (None, again(params, *part)), None, (parts, jnp.arange(chunks)))
        return jnp.moveaxis(out, 0, 1).reshape(x.shape), None, {}

    return sublayer._replace(apply=apply)

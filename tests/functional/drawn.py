"""Parameters drawn by NumPy, which compiles nothing, where a test needs some and not those that a run begins with; and
what a model says of a row at once and token by token."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import decoding
from jaxformer.models.families import family_of
from jaxformer.specs import is_spec


def params_of(specs, seed=0):
    """Normal numbers: around 1 in norms, so that no scale is near 0, and of deviation 0.2 elsewhere."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(float(s.role == "norm"), 0.2, s.shape), jnp.float32), specs, is_leaf=is_spec
    )


def decode(params, tokens, lengths, cfg, steps):
    """Logits of whole rows [B, T, V]; [B, V] after each prompt and each of the tokens that follow it; and the cache."""
    rows, width = np.arange(len(tokens)), lengths.max() + 1

    @jax.jit
    def begin(params, tokens, lengths):
        hidden, cache = decoding.prefill(params, tokens[:, :width], lengths, cfg, tokens.shape[1])
        return family_of(cfg).apply(params, tokens, cfg), decoding.logits(params, hidden), cache

    @jax.jit
    def go_on(params, token, cache):
        hidden, cache = decoding.step(params, token, cfg, cache)
        return decoding.logits(params, hidden), cache

    whole, logits, cache = begin(params, tokens, lengths)
    found = [logits]
    for step in range(steps - 1):
        logits, cache = go_on(params, tokens[rows, lengths + step], cache)
        found.append(logits)
    return np.asarray(whole), found, cache

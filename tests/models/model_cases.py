"""Small models of every kind, their random parameters, and packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
from flat_config import model_config

from jaxformer.functional import positions as pos
from jaxformer.specs import is_spec

B, T = 2, 8
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 1, 1]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2]])


def config(**fields):
    return model_config(
        **{"num_layers": 2, "width": 16, "num_heads": 4, "context_length": T, "vocab_size": 20, **fields}
    )


def random_params(specs, seed=0):
    """Normal numbers everywhere, so that a forgotten bias or scale shows."""
    rng = np.random.default_rng(seed)

    def draw(spec):
        scale = spec.axes[-1:] == ("norm",)
        return rng.normal(float(scale), 0.3, spec.shape).astype(np.float32)

    return jax.tree.map(draw, specs, is_leaf=is_spec)


def float64(params):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), params)


def reference_extras(params, cfg):
    """(frequencies, bias, yarn's factor) for the reference of `cfg`."""
    if cfg.positions.kind == "rotary":
        rotary = cfg.positions
        original = rotary.original_length or cfg.context_length
        frequencies, scale = pos.rotary_frequencies(cfg.head_size, rotary.base, rotary.scaling, rotary.factor, original)
        return frequencies, None, scale
    if cfg.positions.kind == "alibi":
        return None, reference.alibi(T, T, cfg.attention.num_heads), 1.0
    if cfg.positions.kind == "t5":
        buckets = [[reference.t5_bucket(s - t, not cfg.causal) for s in range(T)] for t in range(T)]
        return None, np.moveaxis(np.asarray(params["embedding"]["t5"], np.float64)[np.array(buckets)], -1, 0), 1.0
    return None, None, 1.0


def influence(apply, specs, allowed, rows=None):
    """Asserts which tokens the logits of each position depend on: exactly those allowed, exactly zero for others.

    Every token has a table row of its own, so the gradient of a table row is the influence of one token.

    Args:
      apply: (params, tokens) -> logits; the output table must not be the embedding's.
      specs: of the model; vocab_size is B * T.
      allowed: bool [B, T, T], query by key.
      rows: queries to look at; None: all.
    """
    batch, length, _ = allowed.shape
    rows = np.arange(length) if rows is None else np.array(rows)
    params = jax.tree.map(jnp.array, random_params(specs))
    tokens = jnp.arange(batch * length).reshape(batch, length)
    rng = np.random.default_rng(7)

    @jax.jit
    def by_row(table):
        def logits(table):
            return apply(params | {"embedding": params["embedding"] | {"tokens": table}}, tokens)

        out, backward = jax.vjp(logits, table)
        cotangents = np.zeros((len(rows), *out.shape), out.dtype)
        cotangents[np.arange(len(rows)), :, rows] = rng.normal(size=out.shape[-1])
        return jax.vmap(lambda c: backward(c)[0])(jnp.array(cotangents))

    gradients = np.asarray(by_row(params["embedding"]["tokens"]))[:, : batch * length]
    assert np.isfinite(gradients).all()
    felt = (gradients != 0).any(axis=-1).reshape(len(rows), batch, length)
    np.testing.assert_array_equal(np.moveaxis(felt, 0, 1), allowed[:, rows])

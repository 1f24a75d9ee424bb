"""Attention, every combination of its options: who is not seen has exactly no influence; float64 references."""

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from attention_cases import BATCH, HEADS, LONG, SHORT, WIDTH, bias_cases, mask_cases

from jaxformer import masks
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import tiles, xla


def check_laws_and_reference(mask, bias, groups, soft_cap, dropout, implementation="xla"):
    """In float64: the value against the reference, and exactly zero gradients wherever attending is not allowed."""
    length = SHORT
    described, allowed = mask_cases(length)[mask]
    added, added_reference = bias_cases(length)[bias]
    allowed = np.broadcast_to(allowed, (BATCH, HEADS, length, length))

    @jax.jit
    def run(query, key, value, cotangents):
        def attend(*arrays, rate=dropout):
            options = {"soft_cap": soft_cap, "dropout_rate": rate, "rng": jax.random.key(1) if rate else None}
            return attention(*arrays, described, bias=added, implementation=implementation, **options)

        out, backward = jax.vjp(attend, query, key, value)
        plain = attend(query, key, value, rate=0.0) if dropout else out
        return out, plain, *jax.vmap(backward)(cotangents)

    with jax.enable_x64(True):
        arrays = cases.inputs(length, groups, jnp.float64)
        cotangents = np.zeros((length, BATCH, length, HEADS, WIDTH))  # each of one query alone
        every = np.arange(length)
        cotangents[every, :, every] = np.random.default_rng(5).normal(size=(BATCH, HEADS, WIDTH)) + 3
        out, plain, d_query, d_key, d_value = map(np.asarray, run(*arrays, cotangents))

    assert all(np.isfinite(x).all() for x in (out, d_query, d_key, d_value))
    nothing = ~allowed.any(axis=-1)  # [B, H, T]: queries that see no key
    assert (np.moveaxis(out, 2, 1)[nothing] == 0).all()
    by_group = allowed.reshape(BATCH, groups, HEADS // groups, length, length).any(axis=2)
    for t in every:
        others = np.delete(d_query[t], t, axis=1)
        assert (others == 0).all(), "a query's output depends on another query"
        seen = np.moveaxis(by_group[:, :, t], 1, 2)  # [B, S, G]
        assert (d_key[t][~seen] == 0).all() and (d_value[t][~seen] == 0).all(), f"query {t} leaks"
        if not dropout:
            assert (d_value[t][seen] != 0).any(axis=-1).all(), f"query {t} does not see all it may"
    query, key, value = (np.asarray(x) for x in arrays)
    options = {"allowed": allowed, "bias": added_reference, "soft_cap": soft_cap}
    # 1e-6: ALiBi's slopes are float32 numbers, all else is float64.
    tolerance = 1e-6 if bias == "alibi" else 1e-12
    np.testing.assert_allclose(plain, reference.attention(query, key, value, **options), atol=tolerance)


# Of each way that a mask goes through the kernels one: causal or not, with a window, of all heads or of each.
WAYS = ("causal", "causal_window_segments_padding", "prefix_padding", "causal_array")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case[0] in WAYS else pytest.mark.slow) for case in cases.pairwise()],
    ids=lambda case: "-".join(map(str, case)),
)
def test_laws_and_reference(case):
    check_laws_and_reference(*case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, mask",
    [("xla", mask) for mask in WAYS] + [("chunked", mask) for mask in cases.AXES["mask"]],  # splash: test_splash.py
)
def test_laws_and_reference_of_every_three_options_in_blocks(implementation, mask, monkeypatch):
    """Every three options together with masks that go different ways, every two with the others."""
    for module in (xla, tiles):
        monkeypatch.setattr(module, "QUERY_BLOCK", 4)  # two whole blocks and a part of one
    monkeypatch.setattr(tiles, "KEY_BLOCK", 5)  # its halves: test_chunked.py
    covered = cases.pairwise(cases.AXES | {"mask": WAYS}, strength=3) if mask in WAYS else cases.pairwise()
    for case in covered:
        if case[0] == mask:
            check_laws_and_reference(*case, implementation)


def rows_of(length):
    """All queries, or those around the seams of the blocks."""
    block = xla.QUERY_BLOCK
    return np.arange(length) if length < 20 else np.array([0, 7, block - 1, block, block + 1, length - 1])


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_not_seen_changes_nothing_bitwise(length, dtype):
    """Compiled, in the dtypes that train: new content after a query, or in another document, leaves its bits alone."""
    mask, allowed = mask_cases(length)["causal_segments"]

    @jax.jit
    def attend(query, key, value):
        return attention(query, key, value, mask)

    query, key, value = cases.inputs(length, 2, dtype)
    before = np.asarray(attend(query, key, value).astype(jnp.float32))
    for t in rows_of(length):
        hidden = jnp.array(~allowed[:, 0, t], dtype)[:, :, None, None] * 100
        after = np.asarray(attend(query, key + hidden, value - hidden).astype(jnp.float32))
        np.testing.assert_array_equal(after[:, t], before[:, t])
        assert length - 1 == t or not np.array_equal(after, before)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_query_without_keys_gives_zeros_and_finite_gradients(dtype):
    query, key, value = cases.inputs(SHORT, 2, dtype)
    mask = masks.padding(jnp.array([[False] * SHORT, [True] * SHORT]))

    @jax.jit
    def value_and_grads(query, key, value):
        def total(*arrays):
            out = attention(*arrays, mask, soft_cap=2.0)
            return jnp.sum(jnp.square(out.astype(jnp.float32)) + out), out

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    grads, out = value_and_grads(query, key, value)
    assert not np.asarray(out[0]).any() and np.asarray(out[1]).all()
    for grad in grads:
        assert np.isfinite(grad.astype(jnp.float32)).all() and not np.asarray(grad[0]).any()
        assert np.asarray(grad[1]).any()

"""Masks: every description says what the pair-by-pair reference says; cropping and combining keep the meaning."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest

from jaxformer import masks

T, S = 7, 7
PREFIX = [3, 0]
PADDING = [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
SEGMENTS = [[1, 1, 1, 2, 2, 2, 0], [4, 4, 5, 5, 5, 5, 5]]
DENSE = np.random.default_rng(0).random((2, 3, T, S)) < 0.6

KINDS = {
    "causal": (masks.causal, {"causal": True}),
    "window": (lambda: masks.window(3), {"window": 3}),
    "prefix": (lambda: masks.prefix(jnp.array(PREFIX)), {"prefix": PREFIX}),
    "padding": (lambda: masks.padding(jnp.array(PADDING)), {"padding": PADDING}),
    "segments": (lambda: masks.segments(jnp.array(SEGMENTS)), {"segments": SEGMENTS}),
}


def full(mask, queries=T, keys=S):
    return np.broadcast_to(np.asarray(masks.expand(mask, queries, keys)), (2, 3, queries, keys))


@pytest.mark.parametrize("names", [c for n in (1, 2, 3) for c in itertools.combinations(KINDS, n)], ids="-".join)
def test_every_combination_equals_the_reference(names):
    combined, rules = masks.Mask(), {}
    for name in names:
        make, rule = KINDS[name]
        combined, rules = combined & make(), rules | rule
    np.testing.assert_array_equal(full(combined), np.broadcast_to(reference.allowed(T, S, **rules), (2, 3, T, S)))
    with_dense = full(combined & masks.dense(DENSE))
    np.testing.assert_array_equal(with_dense, reference.allowed(T, S, **rules) & DENSE)


def test_nothing_said_is_everything_allowed():
    assert masks.expand(None, T, S) is None
    assert masks.expand(masks.Mask(), T, S) is None


@pytest.mark.parametrize("queries, keys", [(3, 7), (7, 3), (1, 5)])
def test_lengths_may_differ(queries, keys):
    mask = masks.causal() & masks.window(3)
    np.testing.assert_array_equal(
        masks.expand(mask, queries, keys)[None], reference.allowed(queries, keys, causal=True, window=3)
    )
    cross = masks.segments(jnp.ones((2, queries), int), jnp.arange(keys)[None].repeat(2, 0))
    assert np.asarray(masks.expand(cross, queries, keys)).sum(axis=-1).tolist() == [[[1] * queries]] * 2


def test_windows_combine_to_the_smaller_and_keys_to_their_intersection():
    assert (masks.window(3) & masks.window(5)).window == 3
    both = masks.padding(jnp.array([[True, True, False]])) & masks.padding(jnp.array([[True, False, True]]))
    assert both.keys.tolist() == [[True, False, False]]


def test_dense_parts_of_different_rank_combine():
    a, b = DENSE[0, 0], DENSE[:, :1]
    np.testing.assert_array_equal(full(masks.dense(a) & masks.dense(b)), np.broadcast_to(a & b, (2, 3, T, S)))
    np.testing.assert_array_equal(full(masks.dense(b) & masks.dense(a)), np.broadcast_to(a & b, (2, 3, T, S)))


@pytest.mark.parametrize("name", ["prefix", "segments"])
def test_two_of_a_kind_that_cannot_be_combined_are_refused(name):
    mask = KINDS[name][0]()
    with pytest.raises(ValueError, match=rf"both sides have \w*{name}\w*; expand one of them"):
        _ = mask & mask


def test_only_masks_combine_with_masks():
    array = jnp.ones((3, 3), bool)
    for other in (True, array, np.array(array)):
        for join in (lambda x: masks.causal() & x, lambda x: x & masks.causal()):
            with pytest.raises(TypeError, match=r"Mask &: \w+ is no Mask; accepted: an array of bool inside dense\(\)"):
                join(other)
        for join in (lambda x: masks.causal() | x, lambda x: x | masks.causal()):
            with pytest.raises(TypeError, match=r"Mask \|: masks combine with & only; accepted: dense\("):
                join(other)
    with pytest.raises(TypeError, match=r"Mask \|"):
        _ = masks.causal() | masks.window(2)


def test_python_s_and_is_refused():
    """`causal() and segments(...)` would be the segments alone: every query would see the future."""
    with pytest.raises(TypeError, match="masks combine with &"):
        _ = masks.causal() and masks.segments(jnp.ones((1, 3), int))


@pytest.mark.parametrize("make", [masks.padding, masks.dense])
def test_a_mask_to_be_added_is_refused_and_0_and_1_are_read(make):
    """As bool, 0 and -inf would hide what they show and show what they hide."""
    with pytest.raises(TypeError, match="has dtype float32; accepted: bool, True where attending is allowed"):
        make(jnp.array([[0.0, -jnp.inf]]))
    made = make(jnp.array([[1, 0]]))
    assert (made.keys if made.dense is None else made.dense).tolist() == [[True, False]]


def test_an_index_replaces_the_place_in_the_sequence():
    """A decoder's cache: two new tokens at 5 and 6, five slots holding tokens 2..6 in another order, one empty."""
    query_index, key_index = jnp.array([5, 6]), jnp.array([5, 6, 2, -1, 4])
    mask = masks.Mask(causal=True, window=3, query_index=query_index, key_index=key_index)
    assert masks.expand(mask, 2, 5).astype(int)[0].tolist() == [[1, 0, 0, 0, 1], [1, 1, 0, 0, 1]]
    rows = masks.Mask(causal=True, query_index=jnp.array([[0], [9]]), key_index=key_index)
    assert masks.expand(rows, 1, 5).astype(int)[:, 0, 0].tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 0, 1]]


def test_an_empty_slot_is_never_seen_even_without_another_condition():
    mask = masks.Mask(key_index=jnp.array([0, -1, 1]))
    assert np.asarray(masks.expand(mask, 2, 3)).reshape(2, 3).astype(int).tolist() == [[1, 0, 1], [1, 0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, columns",
    [
        (slice(0, 3), slice(0, 3)),
        (slice(4, 7), slice(2, 7)),
        (slice(2, 3), slice(0, 7)),
    ],
)
def test_crop_is_a_slice_of_the_whole(rows, columns):
    """Of every two kinds, and of all with every shape of an array of pairs."""
    shapes = (None, DENSE, DENSE[:, :1, :1], DENSE[0, 0], DENSE[0, 0, :, :1], DENSE[0, 0, 0])
    combined = [c for n in (1, 2, 5) for c in itertools.combinations(KINDS, n)]
    cases = [*zip(combined, itertools.cycle(shapes), strict=False), *((tuple(KINDS), shape) for shape in shapes)]
    for names, allowed in cases:
        mask = masks.Mask()
        for name in names:
            mask = mask & KINDS[name][0]()
        whole = mask if allowed is None else mask & masks.dense(allowed)
        part = masks.crop(whole, T, S, rows, columns)
        got = full(part, rows.stop - rows.start, columns.stop - columns.start)
        np.testing.assert_array_equal(got, full(whole)[:, :, rows, columns], err_msg=str(names))


def test_crop_of_a_mask_with_an_index():
    whole = masks.Mask(causal=True, query_index=jnp.array([[3, 4, 5]]), key_index=jnp.array([5, -1, 3, 4]))
    part = masks.crop(whole, 3, 4, slice(1, 3), slice(1, 4))
    np.testing.assert_array_equal(masks.expand(part, 2, 3), masks.expand(whole, 3, 4)[:, :, 1:3, 1:4])


def test_a_mask_travels_through_jit_and_vmap():
    @jax.jit
    def opened(mask):
        return masks.expand(mask, T, S)

    mask = masks.causal() & masks.segments(jnp.array(SEGMENTS))
    np.testing.assert_array_equal(opened(mask), masks.expand(mask, T, S))
    each = jax.vmap(lambda s: masks.expand(masks.causal() & masks.segments(s[None]), T, S)[0])(jnp.array(SEGMENTS))
    np.testing.assert_array_equal(each, masks.expand(mask, T, S))


@pytest.mark.parametrize("make", [masks.window, lambda size: masks.Mask(window=size)])
def test_a_window_below_one_is_refused(make):
    for size in (0, -1, 2.5, "3"):
        with pytest.raises(ValueError, match=f"window: size {size}; accepted: an integer of at least 1"):
            make(size)
    assert make(np.int64(3)).window == 3


def test_what_masks_are_made_of_is_named():
    with pytest.raises(ValueError, match=r"padding: keys has shape \(2,\); accepted: \[B, S\] bool \(of lengths"):
        masks.padding(jnp.array([3, 5]))
    for lengths in (3, jnp.ones((2, 1), int)):
        with pytest.raises(ValueError, match=r"prefix: lengths has shape \(.*\); accepted: \[B\], one for each row"):
            masks.prefix(lengths)


def test_masks_are_small():
    """Described, not materialised: no leaf of a [B, T] problem has T * T entries."""
    length = 1000
    mask = (
        masks.causal() & masks.window(9) & masks.segments(jnp.zeros((2, length), int)) & masks.prefix(jnp.ones(2, int))
    )
    assert max(leaf.size for leaf in jax.tree.leaves(mask)) == 2 * length
    cropped = masks.crop(mask, length, length, slice(0, 100), slice(0, 200))
    assert max(leaf.size for leaf in jax.tree.leaves(cropped)) <= 2 * length

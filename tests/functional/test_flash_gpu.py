"""The GPU kernels, interpreted: equal to float64 for every mask, bias, shape and dtype; exactly nothing where nothing
is to be seen; which tiles they visit; what "auto" makes of them. What XLA compiles of them is tested in tests/plan."""

import functools
import itertools
import types

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from flat_config import model_config

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import positions
from jaxformer.functional.attention import attention
from jaxformer.functional.attention_choice import QUADRATIC, choose, choose_for
from jaxformer.functional.position_encodings import score_bias
from jaxformer.kernels.attention import distance_bias, flash_gpu, flash_gpu_blocks, flash_gpu_vjp
from jaxformer.kernels.attention.counter_dropout import kept, mix
from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock
from jaxformer.kernels.attention.flash_gpu_visits import visits
from jaxformer.modules import make_model
from jaxformer.parallel import context
from jaxformer.parallel.mesh import make_mesh

B, T, H, K = 2, 77, 4, 24
RATE = 0.3


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """In blocks of several sizes, none of which divides the row."""
    sizes = {"forward": FlashBlock(32, 16, 4, 1), "keys": FlashBlock(16, 32, 4, 1), "queries": FlashBlock(16, 16, 4, 1)}
    monkeypatch.setattr(flash_gpu, "INTERPRET", True)
    monkeypatch.setattr(flash_gpu_vjp, "block_of", lambda kernel, *shape: sizes[kernel])


def documents(length):
    """Packed documents; in the second row with padding, which has a number of its own, at the end."""
    return np.stack([np.arange(length) * 5 // length, np.arange(length) // 30 + 3 * (np.arange(length) > length - 9)])


@functools.cache
def mask_cases(length):
    """name -> (mask, the reference's rules)."""
    packed, prefix = documents(length).astype(np.int32), np.array([length // 2, 0])
    padding = np.stack([np.arange(length) >= 2, np.arange(length) < length - 20])
    early = np.stack([np.arange(length) % 15 < 4, np.arange(length) % 30 < 20])  # the prefix of each document
    place = np.arange(length)
    scattered = np.random.default_rng(3).integers(0, 3, (2, length)).astype(np.int32)
    return {
        "none": (masks.Mask(), {}),
        "causal": (masks.causal(), {"causal": True}),
        "window": (masks.window(9), {"window": 9}),
        "causal_window": (masks.causal() & masks.window(40), {"causal": True, "window": 40}),
        "segments": (masks.segments(jnp.array(packed)), {"segments": packed}),
        "causal_segments": (masks.causal() & masks.segments(jnp.array(packed)), {"causal": True, "segments": packed}),
        "segments_in_any_order": (masks.segments(jnp.array(scattered)), {"segments": scattered}),
        "window_segments_padding": (
            masks.window(9) & masks.segments(jnp.array(packed)) & masks.padding(padding),
            {"window": 9, "segments": packed, "padding": padding},
        ),
        "causal_padding": (masks.causal() & masks.padding(padding), {"causal": True, "padding": padding}),
        "prefix": (masks.prefix(jnp.array(prefix)), {"prefix": prefix}),
        "prefixes_of_documents": (
            masks.prefix(jnp.array(early)) & masks.segments(jnp.array(packed)),
            {"segments": packed, "dense": ((place <= place[:, None]) | early[:, None])[:, None]},
        ),
        "prefix_padding": (
            masks.prefix(jnp.array(prefix)) & masks.padding(padding), {"prefix": prefix, "padding": padding}
        ),
    }  # fmt: skip


def alibi(table, heads=H):
    return distance_bias.linear(functools.partial(positions.alibi, num_heads=heads), positions.alibi_slopes(heads))


def t5(bidirectional, table, heads=H):
    steps = positions.t5_steps(bidirectional)
    return distance_bias.stepwise(functools.partial(positions.t5_bias, bidirectional=bidirectional), table, *steps)


BIASES = {"none": None, "alibi": alibi, "t5": functools.partial(t5, False), "t5_both": functools.partial(t5, True)}


def arrays(groups, dtype=jnp.float32, length=T, keys=T, heads=H, width=K):
    """query, key, value, the gradient of the output, and T5's table."""
    rng = np.random.default_rng(0)
    shapes = [(B, length, heads, width), *[(B, keys, groups, width)] * 2, (B, length, heads, width)]
    return [
        *(jnp.array(rng.normal(size=s), dtype) for s in shapes),
        jnp.array(rng.normal(size=(32, heads)), jnp.float32),
    ]


@functools.partial(jax.jit, static_argnums=0)
def everything(run, *given):
    """Output of run(q, k, v, table), and its gradients; `given`: those four, the output's gradient before the table."""
    q, k, v, g, table = given
    out, back = jax.vjp(run, q, k, v, table)
    return out, *back(g)


@jax.jit
def attended(mask, q, k, v, g):
    """Output, and the gradients of the three; one program for all masks that have the same arrays."""
    out, back = jax.vjp(lambda *x: attention(*x, mask, implementation="flash_gpu"), q, k, v)
    return out, *back(g)


@functools.partial(jax.jit, static_argnums=(0, 1))
def exact(bias, soft_cap, allowed, keep, q, k, v, g, table):
    """Attention of as many heads of keys in float64, written out, so that its gradients are JAX's own; and those."""

    def run(q, k, v, table):
        scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
        if bias != "none":
            made = BIASES[bias](table, q.shape[2])
            scores = scores + made(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))[None].astype(scores.dtype)
        top = jax.lax.stop_gradient(jnp.max(jnp.where(allowed, scores, -1e9), axis=-1, keepdims=True))
        weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - top, 0)), 0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total) * keep
        return jnp.einsum("bhts,bshk->bthk", weights, v)

    out, back = jax.vjp(run, q, k, v, table)
    return out, *back(g)


@functools.partial(jax.jit, static_argnums=(1, 2))
def kept_of_all(rng, number, shape):
    """[number, T, S]: which weights of each row and head are kept."""
    seed = jax.random.bits(rng, (2,), jnp.uint32)
    at = [jnp.arange(n, dtype=jnp.uint32) for n in shape]
    return jax.vmap(lambda n: kept((seed[0], seed[1]), n, *at, RATE))(jnp.arange(number, dtype=jnp.uint32))


def check(
    mask, rules, *, groups=2, bias="none", soft_cap=None, dropout=False, dtype=jnp.float32, tolerance=2e-5, **shape
):
    """Output and gradients against float64; exactly zero output and gradients where nothing is seen."""
    given = arrays(groups, dtype, **shape)
    length, keys, heads = given[0].shape[1], given[1].shape[1], given[0].shape[2]
    allowed = np.broadcast_to(reference.allowed(length, keys, **rules), (B, heads, length, keys))
    options = {"soft_cap": soft_cap, "dropout_rate": RATE if dropout else 0.0, "implementation": "flash_gpu"}

    def run(q, k, v, table):
        made = None if bias == "none" else BIASES[bias](table)
        return attention(q, k, v, mask, bias=made, rng=jax.random.key(5) if dropout else None, **options)

    found = everything(run, *given)
    keep = np.ones(allowed.shape)
    if dropout:
        drawn = kept_of_all(jax.random.key(5), B * heads, (length, keys))
        keep = np.reshape(drawn, allowed.shape) / (1 - RATE)
    with jax.enable_x64(True):
        q, k, v, g, table = (np.asarray(x).astype(np.float64) for x in given)
        k, v = (np.repeat(x, heads // groups, axis=2) for x in (k, v))
        out, d_query, *of_keys, d_table = map(np.asarray, exact(bias, soft_cap, allowed, keep, q, k, v, g, table))
    of_keys = [x.reshape(B, keys, groups, heads // groups, -1).sum(3) for x in of_keys]
    for one, other in zip(found, (out, d_query, *of_keys, d_table), strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=tolerance * scale)
    nothing = np.moveaxis(~allowed.any(axis=-1), 1, 2)
    assert (np.asarray(found[0])[nothing] == 0).all() and (np.asarray(found[1])[nothing] == 0).all()
    unseen = ~np.moveaxis(allowed.reshape(B, groups, -1, length, keys).any(axis=(2, 3)), 1, 2)
    assert all((np.asarray(grad)[unseen] == 0).all() for grad in found[2:4])


def test_everything_at_once():
    check(*mask_cases(T)["causal_segments"], bias="alibi", soft_cap=2.0, dropout=True)


# Every two options of different kinds meet, of masks and biases those for which the kernels are different programs.
AXES = {
    "mask": ["none", "causal", "causal_window", "causal_segments", "window_segments_padding", "prefix_padding"],
    "bias": ["none", "alibi", "t5_both"],
    "groups": [4, 2, 1],
    "soft_cap": [None, 2.0],
    "dropout": [False, True],
}
OTHERS = [
    ("window", "t5", 2, None, True), ("segments", "none", 1, 2.0, False), ("segments_in_any_order", "t5", 4, 2.0, True),
    ("causal_padding", "alibi", 2, None, True), ("prefix", "t5", 1, 2.0, False), ("causal", "t5", 2, None, False),
    ("prefixes_of_documents", "none", 2, None, False),
]  # fmt: skip


def test_every_mask_and_bias_is_among_the_cases():
    of_both = zip(*(case[:2] for case in cases.pairwise(AXES) + OTHERS), strict=True)
    assert [set(names) for names in of_both] == [set(mask_cases(T)), set(BIASES)]


@pytest.mark.slow
@pytest.mark.parametrize("name, bias, groups, soft_cap, dropout", cases.pairwise(AXES) + OTHERS)
def test_every_option_with_every_other(name, bias, groups, soft_cap, dropout):
    check(*mask_cases(T)[name], bias=bias, groups=groups, soft_cap=soft_cap, dropout=dropout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"length": 1, "keys": 1}, {"length": 5, "keys": 90, "width": 1}, {"length": 90, "keys": 5, "width": 256},
        {"length": 64, "keys": 64, "width": 32}, {"heads": 6, "groups": 2, "width": 80},
    ],
    ids=str,
)  # fmt: skip
def test_shapes(shape):
    """Rows that blocks divide and do not, down to one token; widths that are filled up to a power of two, and are one;
    a number of heads that is none."""
    length, keys = shape.get("length", T), shape.get("keys", T)
    mask, rules = (masks.causal(), {"causal": True})
    if length == keys:
        mask, rules = mask & masks.segments(jnp.array(documents(length))), rules | {"segments": documents(length)}
    check(mask, rules, **shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 0.02), (jnp.float16, 0.003)])
def test_short_floats(dtype, tolerance):
    check(*mask_cases(T)["causal_segments"], soft_cap=20.0, dtype=dtype, tolerance=tolerance)


@pytest.mark.slow
def test_positions_that_the_mask_numbers_itself():
    q, k, v, g, table = arrays(2)
    index = jnp.stack([jnp.arange(T)[::-1], (jnp.arange(T) * 7) % T])
    empty = jnp.where(jnp.arange(T) % 5 == 0, -1, index)
    mask = masks.Mask(causal=True, window=30, query_index=index, key_index=empty)

    def run(implementation, q, k, v, table):
        return attention(q, k, v, mask, implementation=implementation)

    found, right = (everything(functools.partial(run, name), q, k, v, g, table) for name in ("flash_gpu", "xla"))
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
def test_what_is_hidden_has_no_influence(garbage):
    """A document's keys and values change no bit of another's; padding, nothing at all, and has gradients of 0."""
    q, k, v, g, _ = arrays(2)
    segments = jnp.array(documents(T))
    other = (segments == 2)[..., None, None]
    signs = jnp.where(jnp.arange(K) % 2 == 0, 1.0, -1.0) if np.isfinite(garbage) else 1.0
    spoiled = [jnp.where(other, garbage * signs, x) for x in (k, v)]

    packed = masks.causal() & masks.segments(segments)
    clean, dirty = (attended(packed, q, *x, g) for x in ((k, v), spoiled))
    elsewhere = np.asarray(segments) != 2
    for one, two in zip(clean[:2], dirty[:2], strict=True):
        assert (np.asarray(one)[elsewhere] == np.asarray(two)[elsewhere]).all()
    if not np.isfinite(garbage):
        for values in (dirty[0], attended(packed, q, k, spoiled[1], g)[0]):
            assert np.isnan(np.asarray(values)[~elsewhere]).any(axis=(-1, -2)).all(), "those who see it do not say so"
    padded = masks.causal() & masks.padding(jnp.asarray(elsewhere))
    clean, dirty = (attended(padded, q, *x, g) for x in ((k, v), spoiled))
    for one, two in zip(clean, dirty, strict=True):
        assert (np.asarray(one) == np.asarray(two)).all()
    assert all((np.asarray(grad)[~elsewhere] == 0).all() for grad in dirty[2:4])


@pytest.mark.slow
def test_the_gradient_of_one_query_reaches_what_it_sees_and_nothing_else():
    q, k, v, g, _ = arrays(2)
    segments = documents(T)
    seen = np.broadcast_to(reference.allowed(T, T, causal=True, segments=segments), (B, 1, T, T))[:, 0]
    mask = masks.causal() & masks.segments(jnp.array(segments))
    for t in (0, 15, 16, 31, 40, T - 1):
        alone = np.where(np.arange(T)[:, None, None] == t, g, 0)
        _, _, d_key, d_value = map(np.asarray, attended(mask, q, k, v, alone))
        for grad in (d_key, d_value):
            assert (grad[~seen[:, t]] == 0).all(), f"query {t} leaks"
        assert (d_value[seen[:, t]] != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("groups, bias", [(4, "alibi"), (2, "t5")])
def test_on_a_mesh_every_device_does_its_own_rows_and_heads(groups, bias):
    """Dropout and biases too are those of the whole batch and of all heads. One key head for all: test_cudnn.py."""
    given = arrays(groups)
    mask = masks.causal() & masks.segments(jnp.array(documents(T))) & masks.padding(jnp.ones((1, T), bool))

    def whole(mask, q, k, v, g, table):
        options = {"dropout_rate": RATE, "rng": jax.random.key(3), "implementation": "flash_gpu"}
        run = lambda q, k, v, table: attention(q, k, v, mask, bias=BIASES[bias](table), **options)  # noqa: E731
        out, back = jax.vjp(run, q, k, v, table)
        return out, *back(g)

    alone = jax.jit(whole)(mask, *given)
    with jax.set_mesh(make_mesh(MeshConfig(2, 1, 4), jax.devices())):
        found = jax.jit(whole)(mask, *given)
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("groups, window", [(4, 20), (2, None)])
def test_ring_attention_is_attention_over_whole_rows(groups, window):
    """Of packed rows in zigzag order, or in theirs with a window, with padding, on context 4 x data 2 devices."""
    length = 80
    q, k, v, g, _ = arrays(groups, length=length, keys=length)
    segments, padding = jnp.array(documents(length)), jnp.arange(length)[None] < jnp.array([[length], [length - 7]])
    mask = masks.Mask(causal=True, window=window) & masks.segments(segments) & masks.padding(padding)

    def whole(q, k, v, table):
        return attention(q, k, v, mask, soft_cap=3.0, implementation="xla")

    def ring(q, k, v, table):
        cut = context.sequence_sharding(length, zigzag=window is None)
        order = None if cut.order is None else jnp.asarray(cut.order)
        own = masks.Mask(causal=True, window=window, query_index=order, key_index=order, parts=cut.parts)
        own = own & masks.segments(cut.arrange(segments)) & masks.padding(cut.arrange(padding))
        assert cut.parts == 4
        parts = [cut.shard(x) for x in (q, k, v)]
        return cut.unshard(attention(*parts, own, soft_cap=3.0, implementation="flash_gpu"))

    right = everything(whole, q, k, v, g, jnp.zeros(()))
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=1, context=4, tensor=1), jax.devices())):
        found = everything(ring, q, k, v, g, jnp.zeros(()))
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    unseen = np.asarray(~padding)
    assert all((np.asarray(grad)[unseen] == 0).all() for grad in found[2:4])


@pytest.mark.slow
def test_the_log_sum_and_its_gradient():
    """Attention to two halves of the keys, put together by their log-sums, is attention to all."""
    q, k, v, g, _ = arrays(2)
    options = {"scale": 0.2, "soft_cap": None, "dropout_rate": 0.0, "rng": None}

    def halves(q, k, v, table):
        parts = [
            flash_gpu.attend_with_log_sum(q, k[:, half], v[:, half], masks.Mask(), None, **options)
            for half in (slice(0, 30), slice(30, T))
        ]
        total = jnp.logaddexp(*(log_sum for _, log_sum in parts))
        return sum(out * jnp.exp(log_sum - total).swapaxes(1, 2)[..., None] for out, log_sum in parts)

    def whole(q, k, v, table):
        return attention(q, k, v, scale=0.2, implementation="xla")

    for one, other in zip(*(everything(f, q, k, v, g, jnp.zeros(())) for f in (halves, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    padded = masks.padding(jnp.array([[False] * T, [True] * T]))
    log_sum = jax.jit(lambda *x: flash_gpu.attend_with_log_sum(*x, padded, None, **options)[1])(q, k, v)
    assert (log_sum[0] == -jnp.inf).all() and jnp.isfinite(log_sum[1]).all()


@pytest.mark.slow
def test_weights_of_large_scores_still_add_up_to_one():
    """In the backward pass too, where the log of their sum alone would round the number of keys away."""
    q, k, v, _, _ = arrays(4)
    far = distance_bias.linear(lambda i, j: -1e9 * jnp.abs(i[:, None] - j[None, :])[None], [1e9] * H)
    mask = masks.segments(jnp.tile(jnp.arange(T) % 10, (B, 1))) & masks.padding(jnp.arange(T)[None] % 20 >= 10)

    def total(v, implementation):
        return jnp.sum(attention(q, k, v, mask, bias=far, implementation=implementation))

    found, right = (jax.jit(jax.grad(total), static_argnums=1)(v, name) for name in ("flash_gpu", "xla"))
    np.testing.assert_allclose(np.sum(found), B * T * H * K, rtol=1e-5)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.slow
def test_vmap_as_sweeps_use_it():
    q, k, v, g, _ = arrays(2)
    mask = masks.causal() & masks.segments(jnp.array(documents(T)))

    two = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    mapped = jax.vmap(attended, (None, 0, 0, 0, None))(mask, *two, g)
    for found, one, other in zip(mapped, *(attended(mask, *(x[n] for x in two), g) for n in (0, 1)), strict=True):
        np.testing.assert_allclose(found, jnp.stack([one, other]), atol=1e-5)


@functools.cache
def visited_cases():
    """name -> (mask, which pairs it allows [B or 1, T, T])."""
    found = {name: (mask, reference.allowed(T, T, **rules)[:, 0]) for name, (mask, rules) in mask_cases(T).items()}
    found["wide_window"] = masks.window(60), reference.allowed(T, T, window=60)[:, 0]
    index = np.arange(T) * 3 // 2 - 4
    own = masks.Mask(causal=True, window=30, query_index=jnp.array(index[::-1]), key_index=jnp.array(index))
    found["own_index"] = own, np.asarray(masks.expand(own, T, T)).reshape(1, T, T)
    return found


@pytest.mark.parametrize("by_key, name", [
    *((False, name) for name in visited_cases()),
    *(pytest.param(True, name, marks=() if name in ("own_index", "causal_window") else pytest.mark.slow)
      for name in visited_cases()),
])  # fmt: skip
def test_visits(name, by_key):
    """No allowed pair is outside of what is visited, and all pairs of an open tile are allowed."""
    mask, allowed = visited_cases()[name]
    block = (16, 32)
    find = jax.jit(lambda mask: visits(flash_gpu._without_padding(mask), T, T, *block, by_key=by_key))
    found = np.asarray(find(mask))

    def tiles(beyond):  # queries beyond the row are nobody's
        padded = np.pad(allowed, ((0, 0), (0, -T % 16), (0, 0)), constant_values=beyond)
        padded = np.pad(padded, ((0, 0), (0, 0), (0, -T % 32)))
        split = padded.reshape(len(allowed), -1, 16, padded.shape[2] // 32, 32).transpose(0, 1, 3, 2, 4)
        return split.swapaxes(1, 2) if by_key else split

    met, whole = tiles(False).any(axis=(3, 4)), tiles(True).all(axis=(3, 4))
    for row, i in itertools.product(range(len(met)), range(met.shape[1])):
        first, end, first_open, end_open = found[min(row, len(found) - 1), i]
        assert not met[row, i, :first].any() and not met[row, i, end:].any()
        assert whole[row, i, first_open:end_open].all()
        assert 0 <= first <= first_open <= end_open <= end <= met.shape[2]


def test_packed_documents_are_all_that_is_visited():
    """Documents of 16, 32 and 80 tokens in blocks of 16: 1, 2 and 5 blocks each, causal: 1 + 3 + 15 tiles."""
    segments = jnp.array(np.repeat([4, 5, 7], [16, 32, 80]))[None]
    find = jax.jit(lambda mask: visits(mask, 128, 128, 16, 16, by_key=False))
    found = np.asarray(find(masks.causal() & masks.segments(segments)))[0]
    assert (found[:, 1] - found[:, 0]).tolist() == [1, 1, 2, 1, 2, 3, 4, 5]
    assert (found[:, 3] - found[:, 2]).tolist() == [0, 0, 1, 0, 1, 2, 3, 4]  # all but those on the diagonal are open


def test_the_hash_is_uniform_and_has_no_pattern():
    """Shares of kept weights over rows, columns, heads, and of neighbours that agree, within 5 standard deviations."""
    n, heads = 256, 16
    seed = jnp.uint32(11), jnp.uint32(12)
    at = jnp.arange(n, dtype=jnp.uint32)
    each = jax.jit(kept, static_argnums=4)
    x = np.stack([each(seed, jnp.uint32(h), at, at, RATE) for h in range(heads)])
    p, deviation = 1 - RATE, np.sqrt(RATE * (1 - RATE))
    for axes in ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        mean = x.mean(axis=axes or None)
        count = x.size / np.asarray(mean).size
        assert np.abs(mean - p).max() < 5 * deviation / np.sqrt(count)
    both = p * p
    for shift, axis in itertools.product((1, 2, 8, 64), (0, 1, 2)):
        if shift >= x.shape[axis]:
            continue
        agree = (x & np.roll(x, shift, axis)).mean()
        assert abs(agree - both) < 5 * np.sqrt(both * (1 - both) / x.size) * 1.5, (shift, axis)
    other = np.asarray(each((jnp.uint32(11), jnp.uint32(13)), jnp.uint32(0), at, at, RATE))
    assert abs((other & x[0]).mean() - both) < 5 * np.sqrt(both / n**2)
    assert np.unique(np.asarray(jax.jit(mix)(jnp.arange(2**16, dtype=jnp.uint32)))).size == 2**16


@pytest.mark.parametrize("bidirectional", [False, True])
def test_steps_are_the_buckets(bidirectional):
    edges, entries = positions.t5_steps(bidirectional)
    far = np.arange(-300, 301)
    step = np.searchsorted(edges, far, side="right")
    expected = [reference.t5_bucket(int(d), bidirectional) for d in far]
    assert np.asarray(entries)[step].tolist() == expected


def test_auto_takes_it_on_gpus_where_there_is_more_than_causality(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(compute_capability="9.0")])
    x = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)
    segments = jnp.zeros((2, 4096), jnp.int32)
    dense = masks.dense(jnp.ones((2, 1, 4096, 4096), bool))

    def chosen(mask, bias=None, shape=x, soft_cap=None):
        return choose_for(shape, shape, shape, mask, bias, soft_cap, 0.0, None)

    packed = masks.causal() & masks.segments(segments)
    assert chosen(masks.causal()) == "cudnn"
    with caplog.at_level("INFO", "jaxformer"):
        assert chosen(packed) == "flash_gpu"
    assert caplog.messages[-1].endswith("on cuda; cudnn would keep 32 MiB of allowed pairs")
    assert chosen(masks.window(9)) == chosen(masks.causal(), soft_cap=2.0) == "flash_gpu"
    assert chosen(packed, alibi(None, 8)) == "flash_gpu" and chosen(packed, lambda q, k: q[:, None] - k) == "chunked"
    assert chosen(dense) == "cudnn"  # 32 MiB, no more than the mask itself
    assert chosen(dense & packed, shape=jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.float32)) == "chunked"
    short = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
    assert chosen(masks.causal(), shape=short) == "xla"
    many = jax.ShapeDtypeStruct((256, 128, 8, 64), jnp.bfloat16)  # short, but 128 MiB of scores
    assert chosen(masks.Mask(causal=True, window=9), shape=many) == "flash_gpu"


def test_choose_on_other_platforms_is_as_before():
    assert choose(4096, 4096, platform="tpu", able=("splash",), scores=2 * QUADRATIC) == "splash"
    assert choose(1024, 1024, platform="tpu", able=("flash_gpu",), scores=2 * QUADRATIC) == "xla"
    assert choose(1024, 1024, platform="cpu", able=("flash_gpu",), scores=2 * QUADRATIC) == "xla"
    assert choose(1024, 1024, platform="cuda", scores=2 * QUADRATIC) == "chunked"


def test_what_it_cannot_do_is_refused():
    q, k, v, *_ = arrays(2)
    wide = jnp.ones((1, 4, 1, 320))
    refused = [
        ((q, k, v), {"mask": masks.dense(jnp.ones((T, T), bool))}, "a mask with dense"),
        ((q, k, v), {"bias": jnp.zeros((T, T))}, "a bias that is not of the distance alone"),
        ((wide, wide, wide), {}, "heads 320 wide"),
        ((q, k, v.astype(jnp.bfloat16)), {}, "arrays of different dtypes"),
        ((q, k, v), {"mask": masks.Mask(parts=2), "bias": alibi(None)}, "a bias and context parallelism"),
    ]
    for given, options, why in refused:
        with pytest.raises(ValueError, match=f"'flash_gpu' cannot do {why}.*accepted there: auto, xla, chunked"):
            attention(*given, implementation="flash_gpu", **options)
    with pytest.raises(ConfigError, match=r"config.execution.attention: flash_gpu cannot do heads 512 wide"):
        make_model(model_config(width=1024, num_heads=2, vocab_size=64), LossConfig(), Execution(attention="flash_gpu"))
    for kind in ("alibi", "t5"):
        make_model(model_config(vocab_size=64, positions=kind), LossConfig(), Execution(attention="flash_gpu"))


@pytest.mark.slow
def test_described_biases_are_the_functions_they_were():
    for kind in ("alibi", "t5"):
        cfg = model_config(vocab_size=64, positions=kind)
        params = {"t5": jnp.asarray(np.random.default_rng(0).normal(size=(32, cfg.attention.num_heads)), jnp.float32)}
        bias = score_bias(params, cfg)
        leaves, structure = jax.tree.flatten(bias)
        again = jax.tree.unflatten(structure, leaves)
        assert isinstance(again, distance_bias.DistanceBias) and len(leaves) == (kind == "t5")
        at = jnp.arange(40)
        far = np.arange(40)[None, :] - np.arange(40)[:, None]
        heads = cfg.attention.num_heads
        if kind == "alibi":
            expected = -np.asarray(again.slopes)[:, None, None] * np.abs(far)
        else:
            steps = np.asarray(again.steps())
            expected = steps[:, np.searchsorted(again.edges, far, side="right")]
        np.testing.assert_allclose(again(at, at), np.broadcast_to(expected, (heads, 40, 40)), rtol=1e-6)


def test_measured_blocks_come_first(monkeypatch):
    row = {"chip": "NVIDIA H100", "kernel": "forward", "width": 64, "bytes": 2, "length": 1024, "block": [64, 32, 8, 4]}
    monkeypatch.setattr(flash_gpu_blocks, "measured", lambda: (row, row | {"length": 32768, "block": [128, 32, 8, 4]}))

    def found(chip, length):
        return flash_gpu_blocks.block_of("forward", chip, 64, jnp.bfloat16, length)

    assert found("NVIDIA H100 80GB HBM3", 2000) == FlashBlock(64, 32, 8, 4)
    assert found("NVIDIA H100 80GB HBM3", 20000) == FlashBlock(128, 32, 8, 4)
    assert found("NVIDIA A100-SXM4-80GB", 2000) == flash_gpu_blocks.RESIDENT["forward"][0][1]
    for kernel, width, dtype in itertools.product(flash_gpu_blocks.KERNELS, (16, 64, 256), (jnp.float16, jnp.float32)):
        assert flash_gpu_blocks.block_of(kernel, "", width, dtype, 64).warps >= 4

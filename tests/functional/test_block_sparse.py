"""Sparse patterns: chunked visits the blocks of a table and is xla, which expands the mask; in float64."""

import functools

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks, patterns
from jaxformer.config.sparse import Dilated, Strided
from jaxformer.functional.attention import attention
from jaxformer.functional.attention_choice import unsupported, with_window
from jaxformer.kernels.attention import block_tables

T, HEADS = 37, cases.HEADS
MARKS = np.zeros((2, T), bool)
MARKS[0, [0, 20]], MARKS[1, 9] = True, True
SEGMENTS = jnp.array(np.stack([np.arange(T) >= 20, np.arange(T) // 9]))
PADDING = jnp.arange(2 * T).reshape(2, T) % 7 > 0
TABLE = patterns.random_table(8, 2, seed=3, heads=HEADS)


def near(q, k):
    return abs(q - k) < 4


# name -> (arguments of either, the rule by NumPy as a function of positions)
PATTERNS = {
    "local": ([patterns.local(4)], near),
    "dilated": ([patterns.dilated(3, 5)], lambda q, k: (abs(q - k) < 15) & ((q - k) % 5 == 0)),
    "strided": ([patterns.strided(6)], lambda q, k: (abs(q - k) < 6) | ((q - k) % 6 == 0)),
    "fixed": ([patterns.fixed(8, 3)], lambda q, k: (q // 8 == k // 8) | (k % 8 >= 5)),
    "global": (
        [patterns.local(4), patterns.global_tokens(2, last=3, length=T)],
        lambda q, k: near(q, k) | (q < 2) | (k < 2) | (q >= T - 3) | (k >= T - 3),
    ),
    "seen": ([patterns.local(4), patterns.global_tokens(2, see=False)], lambda q, k: near(q, k) | (k < 2)),
    "marked": (
        [patterns.local(4), patterns.global_tokens(jnp.array(MARKS))],
        lambda q, k: near(q, k) | MARKS[:, None, :, None] | MARKS[:, None, None, :],
    ),
    "blocks": (
        [patterns.neighbours(5), patterns.random_blocks(5, TABLE)],
        lambda q, k: (abs(q // 5 - k // 5) <= 1) | (TABLE[:, q // 5] == (k // 5)[..., None]).any(-1)[None],
    ),
    "all": (
        [patterns.random_blocks(5, TABLE), patterns.strided(6), patterns.global_tokens(jnp.array(MARKS), see=False)],
        lambda q, k: (abs(q - k) < 6) | ((q - k) % 6 == 0) | MARKS[:, None, None, :]
        | (TABLE[:, q // 5] == (k // 5)[..., None]).any(-1)[None],
    ),
}  # fmt: skip
RESTS = {
    "": masks.Mask(),
    "causal": masks.causal(),
    "segments": masks.segments(SEGMENTS),
    "causal window segments padding": (
        masks.causal() & masks.window(30) & masks.segments(SEGMENTS) & masks.padding(PADDING)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_tables, "SMALLEST", 2)
    monkeypatch.setattr(block_tables, "LARGEST", 8)
    monkeypatch.setattr(block_tables, "USUAL", 7)


def positions(length=T):
    return np.arange(length)[:, None], np.arange(length)[None]


@pytest.mark.parametrize("name", PATTERNS)
def test_expanded_patterns_are_the_rules(name):
    of, rule = PATTERNS[name]
    wanted = np.broadcast_to(rule(*positions()), (2, HEADS, T, T))
    found = masks.expand(masks.either(*of), T, T)
    np.testing.assert_array_equal(np.broadcast_to(found, wanted.shape), wanted)
    causal = masks.expand(masks.causal() & masks.either(*of), T, T)
    np.testing.assert_array_equal(np.broadcast_to(causal, wanted.shape), wanted & np.tri(T, dtype=bool))


@functools.partial(jax.jit, static_argnums=4)
def value_and_gradients(q, k, v, mask, name):
    """Output, log-sums and gradients."""

    def total(q, k, v):
        out, log_sum = attention(q, k, v, mask, implementation=name, return_log_sum=True, soft_cap=2.0)
        finite = jnp.where(jnp.isfinite(log_sum), log_sum, 0.0)
        number = jnp.sum(jnp.sin(out + jnp.arange(out.size).reshape(out.shape))) + jnp.sum(jnp.cos(finite))
        return number, (out, log_sum)

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)


*ONE, ALL = RESTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rest",  # each pattern with all that can be beside it, and in turn with one thing or nothing
    [
        ("all", ALL),
        *((name, ALL) for name in list(PATTERNS)[:-1]),
        *((name, ONE[n % len(ONE)]) for n, name in enumerate(PATTERNS)),
    ],
)
def test_chunked_is_xla(name, rest):
    with jax.enable_x64(True):
        mask = masks.either(*PATTERNS[name][0]) & RESTS[rest]
        allowed = np.broadcast_to(masks.expand(mask, T, T), (2, HEADS, T, T))  # one program of xla for all masks
        arrays = cases.inputs(T, 2, jnp.float64)
        reference = value_and_gradients(*arrays, masks.dense(jnp.asarray(allowed)), "xla")
        found = value_and_gradients(*arrays, mask, "chunked")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), reference, found)


def test_a_comb_of_a_model_is_no_wider_than_its_row():
    """A table for `chunked` has a place for every remainder."""
    assert Dilated(size=4, step=2**30).patterns(64, causal=True) == (patterns.dilated(4, 64),)
    assert Strided(stride=2**30).patterns(64, causal=True) == patterns.strided(64)


def test_windows_longer_than_any_row_are_the_whole_row():
    q = jnp.array(np.random.default_rng(0).normal(size=(1, 9, 1, 4)), jnp.float32)
    for huge, whole in (
        (patterns.dilated(2**30, 2**30), patterns.dilated(1, 9)),
        (patterns.dilated(2**40, 2), patterns.dilated(9, 2)),
        (patterns.local(2**31), patterns.local(9)),
    ):
        found, expected = (attention(q, q, q, masks.either(of), implementation="xla") for of in (huge, whole))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 7), (7, 1)])
def test_rows_of_one_token(queries, keys):
    """An axis of size 1 is a row's only token, and not one that broadcasts."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.array(rng.normal(size=(2, n, 1, 4)), jnp.float32) for n in (queries, keys, keys))
    mask = masks.either(patterns.dilated(2, 3)) & masks.padding(jnp.ones((2, keys), bool))
    found, expected = (attention(q, k, v, mask, implementation=name) for name in ("chunked", "xla"))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_window_of_the_whole_row_is_dense_bit_by_bit():
    q, k, v = cases.inputs(T, 2, jnp.float32)

    def f(q, k, v, mask):
        out = attention(q, k, v, mask, implementation="xla")
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))
    for rest in (masks.causal(), masks.segments(SEGMENTS)):
        whole, sparse = (run(q, k, v, mask) for mask in (rest, rest & masks.either(patterns.local(T))))
        jax.tree.map(np.testing.assert_array_equal, whole, sparse)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", "chunked"])
def test_what_is_outside_the_pattern_has_no_influence(name):
    """Keys and values that no query of some heads' block sees are NaN; outputs and gradients are the same bits."""
    q, k, v = cases.inputs(T, HEADS, jnp.float32)
    mask = masks.causal() & masks.segments(SEGMENTS) & masks.either(*PATTERNS["all"][0])
    allowed = np.broadcast_to(masks.expand(mask, T, T), (2, HEADS, T, T))
    at = 30
    hidden = jnp.asarray(~allowed[:, :, at].swapaxes(1, 2))[..., None]  # [B, S, H, 1]

    def f(q, k, v):
        out = attention(q, k, v, mask, implementation=name)[:, at]
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))
    clean, poisoned = run(q, k, v), run(q, *(jnp.where(hidden, jnp.nan, x) for x in (k, v)))
    np.testing.assert_array_equal(clean[0][1], poisoned[0][1])
    np.testing.assert_array_equal(clean[1][0][:, at], poisoned[1][0][:, at])
    for grad in clean[1][1:]:
        assert np.all(np.where(hidden, grad, 0.0) == 0.0) and np.any(grad != 0.0)


@pytest.mark.parametrize(
    "name, size, rest",
    [
        pytest.param("local", 2, masks.causal(), marks=pytest.mark.slow),
        ("blocks", 5, masks.Mask()),
        pytest.param("seen", 7, masks.causal(), marks=pytest.mark.slow),
    ],
)
def test_visits_are_the_blocks_that_hold_a_pair(name, size, rest, monkeypatch):
    """The bias is asked for each pair of blocks that is visited."""
    monkeypatch.setattr(block_tables, "SMALLEST", size)
    monkeypatch.setattr(block_tables, "LARGEST", size)
    seen = []

    def bias(q, k):
        jax.debug.callback(lambda q, k: seen.append((int(q), int(k))), q[0], k[0])
        return jnp.zeros((1, len(q), len(k)))

    of = [*PATTERNS[name][0][:1], patterns.random_blocks(5, TABLE[:1])] if name == "blocks" else PATTERNS[name][0]
    mask = rest & masks.either(*of)
    q, k, v = cases.inputs(T, 2, jnp.float32)
    run = jax.jit(functools.partial(attention, bias=bias, implementation="chunked"))
    jax.block_until_ready(run(q, k, v, mask))
    jax.effects_barrier()
    allowed = np.broadcast_to(masks.expand(mask, T, T), (1, 1, T, T))[0, 0]
    allowed = np.pad(allowed, ((0, -T % size), (0, -T % size)))
    rows, columns = allowed.reshape(len(allowed) // size, size, -1, size).any((1, 3)).nonzero()
    assert sorted(seen) == sorted(zip((rows * size).tolist(), (columns * size).tolist(), strict=True))
    assert len(seen) < (len(allowed) // size) ** 2


def test_random_tables_depend_on_their_arguments_alone():
    np.random.seed(1)
    one = patterns.random_table(16, 3, seed=5, heads=2)
    np.random.seed(2)
    np.testing.assert_array_equal(one, patterns.random_table(16, 3, seed=5, heads=2))
    assert (one != patterns.random_table(16, 3, seed=6, heads=2)).any() and (one[0] != one[1]).any()
    causal = patterns.random_table(16, 3, seed=5, causal=True)
    np.testing.assert_array_equal(causal[:, :9], patterns.random_table(9, 3, seed=5, causal=True))
    rows = np.arange(16)[:, None]
    assert np.all(causal[0] <= rows) and np.all((causal[0] < rows - 1) | (causal[0] == rows))
    assert all(len(set(row)) == 3 for row in one.reshape(-1, 3).tolist())


LONG = (jnp.ones((1, 1024, 1, 64), jnp.bfloat16),) * 3
REFUSED = [
    (lambda: patterns.local(0), "local: size 0; accepted: an integer of at least 1"),
    (lambda: patterns.fixed(4, 5), "fixed: last 5; accepted: 1 to block 4"),
    (lambda: patterns.neighbours(4, -1), "neighbours: reach -1; accepted: an integer of at least 0"),
    (lambda: patterns.neighbours(4, 1.5), "neighbours: reach 1.5; accepted: an integer of at least 0"),
    (lambda: patterns.global_tokens(True), "global_tokens: bool[], last 0; accepted: a number, or "),
    (lambda: patterns.global_tokens(1, last=1), "global_tokens: 1, last 1, length None; accepted: counts, last with "),
    (lambda: patterns.global_tokens(np.ones((2, 3))), "global_tokens: float32[2, 3], last 0; accepted: a number, or "),
    (lambda: patterns.random_blocks(4, [[0], [2]]), "random_blocks: table (1, 2, 1); accepted: [blocks, r] or "),
    (lambda: masks.either(), "either: 0 patterns, 0 arrays of global tokens; accepted: 1 or more, 1"),
    (lambda: masks.either(patterns.local(1)) & masks.either(patterns.local(2)), "Mask &: both sides have patterns; "),
    (
        lambda: attention(*cases.inputs(8, 2, jnp.float32), masks.either(patterns.random_blocks(2, TABLE[:3, :4] % 4))),
        "attention: random blocks of 3 heads for 4; accepted: one table, or one for each",
    ),
    (
        lambda: attention(*cases.inputs(8, 2, jnp.float32), masks.Mask(parts=2) & masks.either(patterns.strided(2))),
        "attention: a mask of patterns over rows in 2 parts, of which a ring of devices would visit all; accepted: ",
    ),
    (
        lambda: attention(*LONG, masks.either(patterns.strided(32)), implementation="cudnn"),
        "attention: implementation 'cudnn' cannot do a mask of patterns; accepted there: auto, xla, chunked",
    ),
]  # fmt: skip


@pytest.mark.parametrize("make, line", REFUSED, ids=[line[:30] for _, line in REFUSED])
def test_refusals(make, line):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_pattern_that_is_a_window_goes_to_kernels_that_have_windows():
    x = jnp.ones((1, 1024, 1, 64), jnp.bfloat16)
    mask = masks.causal() & masks.either(patterns.local(100))
    for name in ("splash", "flash_gpu"):
        assert unsupported(name, x, x, x, mask, None, None, 0.0, None) is None
    assert with_window(mask & masks.window(60)) == masks.causal() & masks.window(60)


@pytest.mark.slow
def test_on_eight_devices():
    """Rows and heads on their own devices, lists of each head, marks of each row, a bias of each head."""
    q, k, v = cases.inputs(T, 4, jnp.float32)
    bias = jax.random.normal(jax.random.key(0), (4, T, T))
    mask = masks.causal() & masks.segments(SEGMENTS) & masks.either(*PATTERNS["all"][0])

    def f(q, k, v, bias):
        return jnp.sum(jnp.sin(attention(q, k, v, mask, bias=bias, implementation="chunked")))

    alone = jax.jit(jax.grad(f, (0, 1, 2, 3)))(q, k, v, bias)
    mesh = jax.make_mesh((2, 1, 1, 4), ("data", "fsdp", "context", "tensor"), (jax.sharding.AxisType.Auto,) * 4)
    with jax.set_mesh(mesh):
        spread = jax.jit(jax.grad(f, (0, 1, 2, 3)))(q, k, v, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), alone, spread)

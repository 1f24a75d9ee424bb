"""What a mask hides has no influence whatever stands there: NaN, infinities and huge numbers change not one bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import params_of
from flat_config import model_config

from jaxformer import masks
from jaxformer.config import MeshConfig
from jaxformer.decoding import cache
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import cudnn, nonfinite, splash, tiles, xla
from jaxformer.kernels.attention.decode import attend_one
from jaxformer.models import gpt
from jaxformer.parallel import context
from jaxformer.parallel.mesh import make_mesh

B, H, G, K = 2, 4, 2, 4
GARBAGE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 3e38}
SHORT, LONG = 13, xla.QUERY_BLOCK + 13  # `xla` as one block of queries and as several
OPTIONS = {
    "plain": {},
    "soft_cap": {"soft_cap": 2.0},
    "dropout": {"dropout_rate": 0.3},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that hold keys of both kinds, keys of one, and a last one that is filled up."""
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 4)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 6)


def hidden_from_all(length):
    """name -> mask; the last three keys of each row are hidden from all queries."""
    seen = np.tile(np.arange(length) < length - 3, (B, 1))
    zeros, ones, slots = map(
        jnp.asarray, (np.zeros((B, length), int), ~seen + 0, np.where(seen, np.arange(length), -1))
    )
    seen = jnp.asarray(seen)
    return {
        "padding": masks.padding(seen),
        "causal_padding": masks.causal() & masks.padding(seen),
        "dense": masks.dense(np.asarray(seen)[:, None, None]),
        "segments": masks.segments(zeros, ones),
        "empty_slots": masks.Mask(key_index=slots),
    }


def arrays(length, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(B, length, H, K), (B, length, G, K), (B, length, G, K), (H, length, length), (B, length, H, K)]
    return [jnp.array(rng.normal(size=shape), dtype) for shape in shapes]


def spoiled(x, where, garbage):
    """`x` [B, S, ...] with garbage at [S] places; of both signs if huge, whose sums are then NaN."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    filling = np.full(x.shape, garbage).astype(x.dtype)
    if np.isfinite(garbage):
        filling[..., ::2] *= -1
    return np.where(np.reshape(where, shape), filling, np.asarray(x))


def runner(implementation, mask, options):
    """A function of query, key, value, bias and g: output and gradients by the first four; compiled once."""

    @jax.jit
    def run(query, key, value, bias, g):
        def attend(*x):
            rng = jax.random.key(7) if options.get("dropout_rate") else None
            return attention(*x[:3], mask, bias=x[3], rng=rng, implementation=implementation, **options)

        out, back = jax.vjp(attend, query, key, value, bias)
        return out, *back(g)

    return lambda *x: [np.asarray(each.astype(jnp.float32)) for each in run(*x)]


def same(found, wanted):
    for name, one, other in zip(("out", "query", "key", "value", "bias"), found, wanted, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("chunked", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "length, options",
    [
        (SHORT, "soft_cap"),
        pytest.param(LONG, "plain", marks=pytest.mark.slow),
        *(pytest.param(SHORT, options, marks=pytest.mark.slow) for options in ("plain", "dropout")),
    ],
)
def test_keys_that_nobody_sees(implementation, length, options):
    query, key, value, bias, g = arrays(length)
    query = 8 * np.asarray(query)  # whose products with huge keys of both signs are infinite, and their sums NaN
    unseen_keys = np.arange(length) >= length - 3
    names = ("causal_padding",) if length == LONG else hidden_from_all(length)
    if options == "dropout":
        names = ("padding",)
    for name in names:
        mask = hidden_from_all(length)[name]
        compiled = runner(implementation, mask, OPTIONS[options])
        run = lambda *x, compiled=compiled: compiled(query, *x, g)  # noqa: E731
        wanted = run(key, value, bias)
        assert all(np.isfinite(x).all() for x in wanted) and (wanted[2][:, -3:] == 0).all()
        assert (wanted[3][:, -3:] == 0).all() and (wanted[4][..., -3:] == 0).all()
        for garbage in GARBAGE.values():
            same(run(spoiled(key, unseen_keys, garbage), value, bias), wanted)
            same(run(key, spoiled(value, unseen_keys, garbage), bias), wanted)
            spoiled_bias = np.where(unseen_keys, np.float32(garbage), bias)
            both = [spoiled(x, unseen_keys, garbage) for x in (key, value)]
            same(run(*both, spoiled_bias), wanted)


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "chunked"])
def test_keys_that_nobody_sees_in_bfloat16(implementation):
    query, key, value, bias, g = arrays(SHORT, jnp.bfloat16)
    unseen_keys = np.arange(SHORT) >= SHORT - 3
    mask = hidden_from_all(SHORT)["padding"]
    run = runner(implementation, mask, {})
    wanted = run(query, key, value, bias, g)
    for garbage in GARBAGE.values():
        both = [spoiled(x, unseen_keys, garbage) for x in (key, value)]
        same(run(query, *both, bias, g), wanted)


def half_hidden(length):
    """name -> mask; the first half of the queries does not see the second half of the keys."""
    half = np.tile(np.arange(length) >= length // 2, (B, 1)).astype(int)
    return {
        "causal": masks.causal(),
        "causal_segments": masks.causal() & masks.segments(half),
        "segments": masks.segments(half),
        "dense": masks.dense((half[:, None, :, None] == 1) | (half[:, None, None, :] == 0)),
    }


@pytest.mark.parametrize("implementation", ["xla", pytest.param("chunked", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "length, options", [(SHORT, "soft_cap"), *(pytest.param(n, "plain", marks=pytest.mark.slow) for n in (SHORT, LONG))]
)
def test_outputs_and_gradients_of_the_queries_that_do_not_see_them(implementation, length, options):
    """Keys, values and biases that others see; and those others' outputs are not finite: nothing is hushed up."""
    query, key, value, bias, g = arrays(length)
    half = length // 2
    late = np.arange(length) >= half
    for name, mask in half_hidden(length).items():
        if length == LONG and name not in ("causal", "causal_segments"):
            continue
        g = np.where((np.arange(length) < half)[None, :, None, None], g, np.float32(0))
        run = runner(implementation, mask, OPTIONS[options])
        wanted = run(query, key, value, bias, g)
        assert all(np.isfinite(x).all() for x in wanted)
        for garbage, (keys, values) in itertools.product(GARBAGE, ((True, False), (False, True), (True, True))):
            those = (
                spoiled(key, late, GARBAGE[garbage]) if keys else key,
                spoiled(value, late, GARBAGE[garbage]) if values else value,
            )
            found = run(query, *those, bias, g)
            for one, other in zip(found[:2], wanted[:2], strict=True):
                np.testing.assert_array_equal(one[:, :half], other[:, :half])
            # An infinite key may as well have the score -inf, and so no weight.
            assert not keys or garbage != "nan" or not np.isfinite(found[0][:, half:]).any()
            assert not values or not np.isfinite(found[0][:, half:]).any(), "what is seen must show"


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_query_that_sees_nothing_among_garbage(implementation):
    """Zeros, and zero gradients, though nothing of its row is a number."""
    query, key, value, bias, g = arrays(SHORT)
    everything = jnp.ones(SHORT, bool)
    mask = masks.padding(jnp.array([[False] * SHORT, [True] * SHORT]))
    rows = np.array([True, False])[:, None, None, None]
    run = runner(implementation, mask, {})
    for garbage in GARBAGE.values():
        those = [np.where(rows, spoiled(x, everything, garbage), x) for x in (key, value)]
        out, d_query, d_key, d_value, _ = run(query, *those, bias, g)
        for x in (out, d_query, d_key, d_value):
            assert (x[0] == 0).all() and np.isfinite(x[1]).all() and x[1].any()


@pytest.mark.slow
def test_what_is_seen_and_finite_is_used_as_it_is():
    """Up to `largest`, beyond which a value counts as infinite; values of another width than keys; float16."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        limit = nonfinite.largest(dtype)
        x = jnp.ones((1, 2, 1, 1), dtype)
        for implementation in ("xla", "chunked"):
            out = attention(x, x, limit * x, masks.causal(), implementation=implementation)
            assert (out == limit).all()
    with jax.enable_x64(True):
        assert nonfinite.largest(jnp.float64) == 2.0**510
    key, value = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 2, 1, 3)).at[0, 1, 0, 2].set(jnp.nan)
    for implementation in ("xla", "chunked"):
        out = attention(key, key, value, masks.causal(), implementation=implementation)
        assert (out[0, 0] == 1).all() and np.isnan(out[0, 1]).all()


@pytest.mark.parametrize("options", [pytest.param("plain", marks=pytest.mark.slow), "soft_cap"])
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_forward_mode_does_not_see_it_either(implementation, options):
    query, key, value, _, g = arrays(SHORT)
    unseen_keys = np.arange(SHORT) >= SHORT - 3
    mask = hidden_from_all(SHORT)["padding"]

    @jax.jit
    def tangent(*primals):
        def attend(query, key, value):
            return attention(query, key, value, mask, implementation=implementation, **OPTIONS[options])

        return jax.jvp(attend, primals, (g, value, key))[1]

    wanted = tangent(query, key, value)
    for garbage in GARBAGE.values():
        both = [spoiled(x, unseen_keys, garbage) for x in (key, value)]
        np.testing.assert_array_equal(tangent(query, *both), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2}, {"context": 2}], ids=["rows", "ring"])
def test_on_a_mesh(mesh):
    """Where each device has its own rows, and where keys go round."""
    length = 16
    query, key, value, _, g = arrays(length)
    unseen_keys = np.arange(length) >= length - 3
    mask = hidden_from_all(length)["padding"]
    made = make_mesh(MeshConfig(**{"data": 1, **mesh}), jax.devices()[:2])

    @jax.jit
    def run(query, key, value):
        cut = context.sequence_sharding(length, zigzag=False)

        def attend(*x):
            return cut.unshard(
                attention(*map(cut.shard, x), masks.Mask(keys=mask.keys, parts=cut.parts), implementation="chunked")
            )

        out, back = jax.vjp(attend, query, key, value)
        return out, *back(g)

    with jax.set_mesh(made):
        wanted = run(query, key, value)
        assert all(np.isfinite(x).all() for x in wanted)
        for garbage in GARBAGE.values():
            found = run(query, *(spoiled(x, unseen_keys, garbage) for x in (key, value)))
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["cudnn", pytest.param("splash", marks=pytest.mark.slow)])
def test_padding_of_the_kernels_of_others(name, monkeypatch):
    """Which see zeros there; what they do with NaN elsewhere is theirs."""
    monkeypatch.setattr(cudnn, "BACKEND", "xla")
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32,))
    monkeypatch.setattr(splash, "INTERPRET", True)
    length, rng = 128, np.random.default_rng(0)
    query, key, value, g = (jnp.array(rng.normal(size=(B, length, h, 64)), jnp.float32) for h in (H, G, G, H))
    unseen_keys = np.arange(length) >= length - 3
    mask = hidden_from_all(length)["causal_padding"]
    module = {"cudnn": cudnn, "splash": splash}[name]

    @jax.jit
    def run(query, key, value):
        def attend(*x):
            return module.attend(*x, mask, None, scale=0.125, soft_cap=None, dropout_rate=0.0, rng=None)

        out, back = jax.vjp(attend, query, key, value)
        return out, *back(g)

    wanted = run(query, key, value)
    for garbage in GARBAGE.values():
        found = run(query, *(spoiled(x, unseen_keys, garbage) for x in (key, value)))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_one_token_against_empty_slots():
    """Keys of any kind and values that are finite; that those are, `prefill` sees to."""
    rng = np.random.default_rng(0)
    query = jnp.array(rng.normal(size=(B, 1, H, K)), jnp.float32)
    key, value = (jnp.array(rng.normal(size=(B * G, SHORT, K)), jnp.float32) for _ in range(2))
    empty = np.arange(SHORT) >= SHORT - 3
    mask = masks.Mask(query_index=jnp.full((B, 1), SHORT), key_index=jnp.where(empty, -1, jnp.arange(SHORT))[None])
    run = jax.jit(lambda key, value: attend_one(query, key, value, mask, None, scale=0.5, soft_cap=2.0))
    wanted = run(key, value)
    for garbage in GARBAGE.values():
        np.testing.assert_array_equal(run(spoiled(key, empty, garbage), value), wanted)
    np.testing.assert_array_equal(run(key, spoiled(value, empty, 3e38)), wanted)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_cache_holds_nothing_but_the_prompts(window):
    """A token whose embedding is NaN, behind the shorter prompt: states and slots do not know."""
    cfg = model_config(num_layers=2, width=16, num_heads=4, context_length=16, vocab_size=20, window=window)
    params = params_of(gpt.specs(cfg))
    tokens, lengths = np.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]), jnp.array([5, 2])
    behind = np.where(np.arange(5) < [[5], [2]], tokens, 19)
    table = np.where(np.arange(20)[:, None] == 19, np.float32(np.nan), params["embedding"]["tokens"])
    params = {**params, "embedding": {**params["embedding"], "tokens": jnp.asarray(table)}}

    @jax.jit
    def states(tokens):
        hidden, kept = cache.prefill(params, tokens, lengths, cfg, 9)
        after, kept = cache.step(params, jnp.array([8, 9]), cfg, kept)
        return hidden, after, kept.layers

    wanted, found = states(tokens), states(behind)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))

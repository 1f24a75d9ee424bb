"""The GPU kernels under masks of patterns, interpreted: equal to float64, exactly nothing where nothing is seen, which
tiles are visited and how each is told to be masked; what they refuse, and what "auto" makes of it."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import from_mapping, masks, patterns
from jaxformer.config import MeshConfig
from jaxformer.functional import attention_choice, positions
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import block_tables, distance_bias, flash_gpu, flash_gpu_patterns, flash_gpu_vjp
from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock
from jaxformer.kernels.attention.flash_gpu_lists import lists
from jaxformer.models.attention_support import unsupported_by
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan import kernel_costs

B, T, H, K = 2, 77, 2, 16
MARKS = np.zeros((B, T), bool)
MARKS[0, [0, 20]], MARKS[1, 9] = True, True
PACKED = jnp.array(np.stack([np.arange(T) >= 20, np.arange(T) // 9]).astype(np.int32))
PADDING = jnp.arange(B * T).reshape(B, T) % 7 > 0
TABLE = patterns.random_table(3, 1, seed=3, heads=H)
SIZES = {"forward": FlashBlock(32, 16, 4, 1), "keys": FlashBlock(16, 32, 4, 1), "queries": FlashBlock(16, 16, 4, 1)}
PATTERNS = {
    "local": [patterns.local(4), patterns.local(20)],
    "dilated": [patterns.dilated(3, 5)],
    "strided": [patterns.strided(6)],
    "fixed": [patterns.fixed(8, 3)],
    "global": [patterns.local(4), patterns.global_tokens(2, last=3, length=T)],
    "seen": [patterns.local(4), patterns.global_tokens(2, see=False)],
    "marked": [patterns.local(4), patterns.global_tokens(jnp.array(MARKS))],
    "blocks": [patterns.neighbours(16, 0), patterns.random_blocks(32, TABLE)],
    "all": [patterns.strided(6), patterns.fixed(16, 2), patterns.global_tokens(jnp.array(MARKS), see=False)],
}
RESTS = {
    "": masks.Mask(),
    "causal": masks.causal(),
    "prefixes": masks.prefix(jnp.array(np.arange(B * T).reshape(B, T) % 9 < 3)) & masks.segments(PACKED),
    "causal window segments padding": (
        masks.causal() & masks.window(30) & masks.segments(PACKED) & masks.padding(PADDING)
    ),
}  # fmt: skip
QUICK = ("all", "causal"), ("blocks", "causal")
CASES = [
    pytest.param(name, rest, marks=() if (name, rest) in QUICK else pytest.mark.slow)
    for name in PATTERNS for rest in RESTS
]  # fmt: skip


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(flash_gpu, "INTERPRET", True)
    monkeypatch.setattr(flash_gpu_vjp, "block_of", lambda kernel, *shape: SIZES[kernel])


def arrays(groups=1, heads=H):
    """query, key, value, and the gradient of the output."""
    rng = np.random.default_rng(0)
    shapes = [(B, T, heads, K), *[(B, T, groups, K)] * 2, (B, T, heads, K)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0)
def attended(options, mask, q, k, v, g):
    """Output, and the gradients of the three."""
    options = dict(options)
    out, back = jax.vjp(lambda *x: attention(*x, mask, **options), q, k, v)
    return out, *back(g)


def by(implementation, mask, *given, **options):
    return attended((("implementation", implementation), *options.items()), mask, *given)


@pytest.mark.parametrize("name, rest", CASES)
def test_output_and_gradients(name, rest):
    """Those of float64, of keys that heads share; exactly 0 where nothing is seen."""
    mask, given = RESTS[rest] & masks.either(*PATTERNS[name]), arrays()
    found = by("flash_gpu", mask, *given)
    with jax.enable_x64(True):
        right = by("xla", mask, *(np.asarray(x, np.float64) for x in given))
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    allowed = np.broadcast_to(masks.expand(mask, T, T), (B, H, T, T))
    nothing = np.moveaxis(~allowed.any(-1), 1, 2)
    assert (np.asarray(found[0])[nothing] == 0).all() and (np.asarray(found[1])[nothing] == 0).all()
    unseen = ~allowed.any((1, 2))
    assert all((np.asarray(grad)[unseen] == 0).all() for grad in found[2:])


@pytest.mark.parametrize("rest", ["causal", pytest.param("causal window segments padding", marks=pytest.mark.slow)])
def test_what_is_not_seen_has_no_influence(rest):
    """Not even NaN: the same bits."""
    mask = RESTS[rest] & masks.either(patterns.strided(6), patterns.global_tokens(2))
    q, k, v, g = arrays()
    seen = np.broadcast_to(masks.expand(mask, T, T), (B, H, T, T)).any((0, 1))[50]
    hidden = jnp.where(jnp.asarray(~seen)[None, :, None, None], jnp.nan, 0.0)
    one, other = (
        np.asarray(by("flash_gpu", mask, q, k + more, v + more, jnp.zeros_like(g))[0]) for more in (0.0, hidden)
    )
    assert 0 < seen.sum() < 30
    np.testing.assert_array_equal(one[:, 50], other[:, 50])


def tiles_of(group, mask, block):
    """(allowed, patterned), each [B or 1, H or 1, blocks, block.queries, key blocks, block.keys] in the group's order:
    the pairs that the mask without patterns allows, and the group's patterns without the groups before."""
    at = [order.positions()[: order.tokens] for order in (group.query, group.key)]
    rest = masks.expand(replace(mask, patterns=()), T, T)
    of = [
        np.ones((1, 1, T, T), bool) if rest is None else np.array(rest),
        np.array(masks.expand(masks.Mask(
            patterns=group.patterns, global_queries=mask.global_queries, global_keys=mask.global_keys), T, T)),
    ]  # fmt: skip
    if group.excluded:
        before = masks.Mask(patterns=group.excluded, global_queries=mask.global_queries, global_keys=mask.global_keys)
        of[1] = of[1] & ~np.array(masks.expand(before, T, T))
    out = []
    for pairs in of:
        pairs = pairs.reshape((1,) * (4 - pairs.ndim) + pairs.shape)
        pairs = pairs[:, :, at[0]][..., at[1]] & (at[0] >= 0)[:, None] & (at[1] >= 0)
        short = (-len(at[0]) % block.queries, -len(at[1]) % block.keys)
        pairs = np.pad(pairs, ((0, 0), (0, 0), (0, short[0]), (0, short[1])))
        out.append(pairs.reshape(*pairs.shape[:2], -1, block.queries, pairs.shape[3] // block.keys, block.keys))
    return out


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_lists(name, rest):
    """Every pair that is allowed lies in a tile of a list; what needs no mask, or no pattern, is told so; the lists by
    key name the same tiles."""
    mask = flash_gpu._without_padding(RESTS[rest] & masks.either(*PATTERNS[name]))
    for found in block_tables.groups(mask.patterns, T, T):
        group, (block,) = flash_gpu_patterns._in_tiles(found, (SIZES["forward"],), T, T)
        rows = flash_gpu_patterns._regrouped(mask, group)
        by_query, by_key = (np.asarray(lists(group, rows, block, by_key=of)) for of in (False, True))
        allowed, patterned = tiles_of(group, mask, block)
        pairs, known = allowed & patterned, set()
        shape = np.broadcast_shapes(allowed.shape[:2], patterned.shape[:2])
        assert all(size in (1, whole) for size, whole in zip(by_query.shape, shape, strict=False))
        for b, h, i in np.ndindex(*shape, pairs.shape[2]):
            row = by_query[b % by_query.shape[0], h % by_query.shape[1], i]
            opened, whole, count = row[:3]
            listed = row[3 : 3 + count].tolist()
            needed = np.flatnonzero(pairs[b % len(pairs), h % pairs.shape[1], i].any((0, 2)))
            assert len(set(listed)) == count and opened <= whole <= count and set(needed) <= set(listed)
            for place, j in enumerate(listed):
                inside = patterned[b % len(patterned), h % patterned.shape[1], i, :, j]
                free = allowed[b % len(allowed), h % allowed.shape[1], i, :, j]
                real = min(block.queries, group.query.tokens - i * block.queries)  # of queries beyond nothing is kept
                assert place >= whole or (inside[:real] | ~free[:real]).all()
                assert place >= opened or (inside & free)[:real].all()
                known.add((b, h, i, j))
        for b, h, j in np.ndindex(*shape, pairs.shape[4]):
            row = by_key[b % by_key.shape[0], h % by_key.shape[1], j]
            assert {(b, h, i, j) for i in row[3 : 3 + row[2]].tolist()} == {
                at for at in known if at[::3] == (b, j) and at[1] == h
            }


def test_tiles_beyond_the_patterns_are_not_visited():
    """Of 64 rows of 64 tokens each: two tiles of a window, eight of the row's comb."""
    length, block = 4096, FlashBlock(64, 64, 4, 1)
    mask = masks.causal() & masks.either(patterns.strided(64))
    shares = [
        flash_gpu_patterns.visited_share(replace(mask, patterns=(each,)), length, block) for each in mask.patterns
    ]
    np.testing.assert_allclose(shares, [(2 * 64 - 1) / 64**2, 1 / 64])
    both = flash_gpu_patterns.visited_share(mask, length, block)
    assert both == pytest.approx(np.mean(shares), rel=1e-6)
    cfg = from_mapping({"model": {"context_length": length, "width": 128, "vocab_size": 64, "attention": {
        "kind": "strided", "stride": 64, "num_heads": 2}}}).model  # fmt: skip
    assert kernel_costs._shares_of(cfg, "NVIDIA H100")["flash_gpu_forward"] < 0.05


@pytest.mark.slow
def test_a_bias_of_the_distance_and_a_soft_cap():
    alibi = distance_bias.linear(functools.partial(positions.alibi, num_heads=H), positions.alibi_slopes(H))
    mask = masks.causal() & masks.either(patterns.local(9), patterns.global_tokens(2))
    q, k, v, g = arrays()

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, q, k, v):
        options = {"bias": alibi, "soft_cap": 2.0, "implementation": name}
        out, back = jax.vjp(lambda *x: attention(*x, mask, **options), q, k, v)
        return out, *back(g)

    for one, other in zip(run("flash_gpu", q, k, v), run("xla", q, k, v), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_dropout_is_that_of_the_same_mask_without_patterns():
    rng, (q, k, v, _) = jax.random.key(5), arrays()
    options = {"dropout_rate": 0.3, "implementation": "flash_gpu"}
    found = attention(q, k, v, masks.either(patterns.neighbours(16, 0)), rng=rng, **options)
    blocks = masks.segments(jnp.arange(T)[None] // 16)
    same = attention(q, k, v, blocks, rng=jax.random.fold_in(rng, 0), **options)
    np.testing.assert_allclose(found, same, atol=1e-6)
    without = attention(q, k, v, blocks, implementation="flash_gpu")
    assert np.abs(np.asarray(found - without)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", "all"])
def test_the_same_on_eight_devices(name):
    """Heads of random blocks on devices of their own, and rows of marks."""
    mask, given = masks.causal() & masks.either(*PATTERNS[name]), arrays(groups=2)
    wanted = by("xla", mask, *given)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])):
        found = by("flash_gpu", mask, *given)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_what_the_kernels_cannot_do_and_what_auto_makes_of_the_rest(monkeypatch):
    q, k, v, _ = arrays()
    table = patterns.random_table(8, 1, seed=0)
    index = jnp.arange(T)
    for mask, line in (
        (masks.either(patterns.random_blocks(10, table)), r"random blocks of 10 tokens \(multiples of 16\)"),
        (masks.either(patterns.random_blocks(16, table), patterns.dilated(3, 5)), "random blocks and patterns of"),
        (masks.either(patterns.local(3), patterns.local(4)) & masks.Mask(query_index=index, key_index=index),
         "a mask of patterns and indices"),
        (masks.either(patterns.local(3), patterns.local(4)) & masks.dense(jnp.ones((T, T), bool)),
         "a mask of patterns and an array"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"implementation 'flash_gpu' cannot do {line}"):
            attention(q, k, v, mask, implementation="flash_gpu")
    alibi = distance_bias.linear(functools.partial(positions.alibi, num_heads=H), positions.alibi_slopes(H))
    with pytest.raises(ValueError, match="cannot do a bias and patterns of tokens far apart; accepted there: auto"):
        attention(q, k, v, masks.either(patterns.strided(6)), bias=alibi, implementation="flash_gpu")
    with pytest.raises(ValueError, match="cannot do a bias that is not of the distance alone"):
        numbered = masks.Mask(query_index=index, key_index=index)
        attention(q, k, v, numbered, bias=jnp.zeros((1, 1, T, T)), implementation="flash_gpu")
    monkeypatch.setattr(attention_choice, "this_platform", lambda: "cuda")
    long = jax.ShapeDtypeStruct((1, 8192, H, K), jnp.bfloat16)
    strided = masks.causal() & masks.either(patterns.strided(64))
    assert attention_choice.choose_for(long, long, long, strided, None, None, 0.0, None) == "flash_gpu"
    assert attention_choice.choose_for(long, long, long, strided, alibi, None, 0.0, None) == "chunked"
    sizes = {"context_length": 2048, "width": 128, "vocab_size": 64}
    for kind, position, why in (
        ("strided", "rotary", None), ("strided", "alibi", "a bias and patterns of tokens far apart"),
        ("longformer", "alibi", None), ("bigbird", "rotary", None),
    ):  # fmt: skip
        cfg = from_mapping(
            {"model": {**sizes, "positions": position, "attention": {"kind": kind, "num_heads": 2}}}
        ).model
        assert unsupported_by("flash_gpu", cfg) == why, (kind, position)

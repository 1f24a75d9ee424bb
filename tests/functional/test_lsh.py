"""LSH attention against NumPy, written out by sets of keys; what no token may see; decoding; counts; refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import decode, params_of

from jaxformer import decoding, from_mapping, masks
from jaxformer.config import MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.attention import attention
from jaxformer.functional.lsh import lsh_attention, unit_keys
from jaxformer.functional.lsh_hashing import hash_buckets, num_buckets, random_rotations
from jaxformer.models import gpt
from jaxformer.models.flops import flops_per_token
from jaxformer.parallel.mesh import check_context, make_mesh
from jaxformer.plan import costs, hlo
from jaxformer.specs import abstract_params

B, T, H, K, C = 2, 24, 2, 4, 4
RNG = np.random.default_rng(0)
QUERY_KEY, VALUE = RNG.normal(size=(2, B, T, H, K))
ROTATIONS = RNG.normal(size=(H, K, 3, 2))
SEGMENTS = np.sort(RNG.integers(1, 4, size=(B, T)), axis=1)
MODES = [  # causal, across_buckets, duplicates: every pair of two of them
    (True, False, False),
    *(pytest.param(*mode, marks=pytest.mark.slow) for mode in itertools.product((False, True), repeat=3)
      if sum(mode) % 2 and mode != (True, False, False)),
]  # fmt: skip


def times_seen(buckets, segments, causal, across):
    """[T, T]: in how many rounds each query sees each key, from the order in which the tokens are sorted."""
    rounds, length = buckets.shape
    times = np.zeros((length, length), int)
    orders = [sorted(range(length), key=lambda t, r=r: (segments[t], buckets[r, t], t)) for r in range(rounds)]
    whole = [t for order in orders for t in order]
    for at, i in enumerate(whole):
        start = at // C * C - C  # of the chunk before; of the first chunk the last one of all
        r = at // length
        if across or not causal:
            near = [(start + n) % len(whole) for n in range(2 * C)]
        else:
            near = [at - n for n in range(1, C + 1) if at - n >= r * length]
        for place in near:
            j = whole[place]
            same = across or (place // length == r and buckets[r, i] == buckets[r, j])
            times[i, j] += bool(same and segments[i] == segments[j] and (j < i if causal else j != i))
    return times


def written_out(causal, across, duplicates, segments):
    buckets = np.asarray(hash_buckets(jnp.asarray(QUERY_KEY), jnp.asarray(ROTATIONS)))
    key = QUERY_KEY / np.sqrt((QUERY_KEY**2).mean(-1, keepdims=True) + 1e-6) / np.sqrt(K)
    out = np.zeros_like(VALUE)
    for b, h in np.ndindex(B, H):
        times = times_seen(buckets[b, h], segments[b], causal, across)
        weights = np.exp(QUERY_KEY[b, :, h] @ key[b, :, h].T) * (times if duplicates else times > 0)
        total = weights.sum(1, keepdims=True)
        out[b, :, h] = np.where(total > 0, weights @ VALUE[b, :, h] / np.where(total > 0, total, 1), VALUE[b, :, h])
    return out


def test_a_bucket_of_two_hashes_is_the_pair_of_their_values():
    parts = RNG.normal(size=(H, K, 3, 2)), RNG.normal(size=(H, K, 3, 3))
    both = np.asarray(hash_buckets(jnp.asarray(QUERY_KEY), tuple(map(jnp.asarray, parts))))
    for b, t, h, r in itertools.product(range(B), range(T), range(H), range(3)):
        first, second = (np.argmax([*(x := QUERY_KEY[b, t, h] @ part[h, :, r]), *-x]) for part in parts)
        assert both[b, h, r, t] == first + 4 * second
    assert both.max() > 4 * 4 and num_buckets(parts) == 4 * 6


def test_many_buckets_cost_the_sum_of_their_factors():
    """Of a row so long that one hash would take more work than attention, and of its hashes' default."""
    cfg = config(buckets=None, chunk=4, num_heads=2).attention
    assert cfg.factors(32) == (16,) and cfg.factors(2**14) == (90, 92)
    rotations = random_rotations(jax.random.key(0), 2, 16, 1, cfg.factors(2**14))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2**14, 2, 16)), jnp.float32)
    compiled = jax.jit(hash_buckets).lower(x, rotations).compile()
    assert costs.flops(hlo.read(compiled.as_text())) == 2 * 2**14 * 2 * 16 * (90 + 92) / 2
    _, counts = np.unique(np.asarray(compiled(x, rotations))[0, 0, 0], return_counts=True)
    assert len(counts) > 10 * (90 + 92) and counts.max() < 200  # they are told apart


@pytest.mark.parametrize("causal, across, duplicates", MODES)
def test_as_written_out(causal, across, duplicates):
    """With and without documents, and of a length that chunks do not divide."""
    options = {"chunk": C, "causal": causal, "across_buckets": across, "duplicates": duplicates}
    alone = np.zeros((B, T), int)
    with jax.enable_x64(True):
        packed, whole, shorter = jax.jit(
            lambda x, v, r: (
                lsh_attention(x, v, r, segments=jnp.asarray(SEGMENTS), **options),
                lsh_attention(x, v, r, **options),
                lsh_attention(x[:, :-1], v[:, :-1], r, **options) if causal and not across else None,
            )
        )(QUERY_KEY, VALUE, ROTATIONS)
        np.testing.assert_allclose(packed, written_out(causal, across, duplicates, SEGMENTS), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(whole, written_out(causal, across, duplicates, alone), rtol=1e-9, atol=1e-12)
    if causal and not across:
        np.testing.assert_allclose(shorter, np.asarray(whole)[:, :-1], rtol=1e-9)


@pytest.mark.parametrize("causal, across, duplicates", MODES)
def test_no_token_sees_another_document_or_what_comes_later(causal, across, duplicates):
    """Exactly, in value and gradient, and if the others are NaN. With `across_buckets` later tokens may change which
    earlier keys are seen, so that there it holds of the gradient."""
    options = {"chunk": C, "causal": causal, "across_buckets": across, "duplicates": duplicates}
    segments = np.array([[1] * 10 + [2] * 14])

    @jax.jit
    def run(x, v):
        return lsh_attention(x, v, jnp.asarray(ROTATIONS, jnp.float32), segments=segments, **options)

    def with_at(x, cut, numbers):
        x = x.copy()
        x[:, cut] = numbers
        return x

    x, v = (a[:1].astype(np.float32) for a in (QUERY_KEY, VALUE))
    one = np.asarray(run(x, v))
    for cut in (slice(0, 10), slice(10, 24)):
        for other in (-3.0 * x[:, cut], np.nan):
            changed = np.asarray(run(with_at(x, cut, other), with_at(v, cut, other)))
            kept = [t for t in range(T) if not cut.start <= t < cut.stop]
            np.testing.assert_array_equal(one[:, kept], changed[:, kept])
    if causal:
        moved = jax.device_get(jax.jit(jax.grad(lambda x, v: jnp.sum(run(x, v)[:, :17] ** 2), argnums=(0, 1)))(x, v))
        assert all(not np.any(g[:, 17:]) and np.any(g[:, 10:17]) for g in moved)
        if not across:
            later = np.asarray(run(with_at(x, slice(17, None), np.nan), with_at(v, slice(17, None), np.nan)))
            np.testing.assert_array_equal(one[:, :17], later[:, :17])


@pytest.mark.slow
def test_more_rounds_come_closer_to_attention_to_all_keys():
    """And with one chunk for all it is that."""
    x, v = (jnp.asarray(RNG.normal(size=(2, 64, 4, 8)), jnp.float32) for _ in range(2))
    others = masks.dense(~np.eye(64, dtype=bool))

    @jax.jit
    def run(x, v):
        full = attention(x, unit_keys(x), v, masks.causal() & others, scale=1.0).at[:, 0].set(v[:, 0])
        errors = []
        for rounds in (1, 4, 16):
            rotations = random_rotations(jax.random.key(0), 4, 8, rounds, 8)
            errors.append(jnp.mean((lsh_attention(x, v, rotations, chunk=8, causal=True) - full) ** 2))
        one = lsh_attention(x, v, jnp.ones((4, 8, 2, 1)), chunk=64, causal=True, across_buckets=True)
        return full, errors, one

    full, near, one = run(x, v)
    assert near[0] > 2 * near[1] > 4 * near[2], near
    np.testing.assert_allclose(one, full, rtol=1e-5, atol=1e-6)


def test_a_token_without_another_key_takes_its_own_value():
    x, v, rotations = (a.astype(np.float32) for a in (QUERY_KEY, VALUE, ROTATIONS))
    run = jax.jit(lambda *a, segments: lsh_attention(*a, chunk=C, causal=True, segments=segments))
    np.testing.assert_array_equal(run(x, v, rotations, segments=np.broadcast_to(np.arange(T), (B, T))), v)
    found = np.asarray(run(x, v, rotations, segments=np.zeros((B, T), int)))
    np.testing.assert_array_equal(found[:, 0], v[:, 0])


def config(**attention_fields):
    sizes = {"num_layers": 2, "width": 32, "vocab_size": 20, "context_length": 32}
    attention_fields = {"kind": "lsh", "num_heads": 2, "chunk": 4, "buckets": 4, **attention_fields}
    return from_mapping({"model": {**sizes, "attention": attention_fields}}).model


def model(**attention_fields):
    cfg = config(**attention_fields)
    return cfg, params_of(gpt.specs(cfg))


@pytest.mark.slow
@pytest.mark.parametrize("duplicates, buckets", [(False, 4), (True, 4), (False, (2, 4))])
def test_decoding_is_the_full_forward_pass(duplicates, buckets):
    cfg, params = model(duplicates=duplicates, buckets=buckets)
    tokens, lengths = RNG.integers(0, 20, (3, 30)), np.array([15, 1, 9])
    full, found, _ = decode(params, tokens, lengths, cfg, steps=13)
    for step, logits in enumerate(found):
        np.testing.assert_allclose(logits, full[np.arange(3), lengths + step - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"across_buckets": True, "chunk": 32}], ids=["chunks", "one chunk"])
def test_operations_are_those_of_the_program(fields):
    cfg, params = model(**fields)
    compiled = jax.jit(lambda p, t: gpt.apply(p, t, cfg)).lower(params, jnp.zeros((2, 32), int)).compile()
    assert costs.flops(hlo.read(compiled.as_text())) == 2 * 32 * flops_per_token(cfg).forward


@pytest.mark.slow
def test_rotations_are_drawn_anew_only_where_that_is_asked_for():
    tokens = jnp.asarray(RNG.integers(0, 20, (1, 32)))
    for redraw in (False, True):
        cfg, params = model(redraw=redraw)
        run = jax.jit(lambda rng, cfg=cfg, params=params: gpt.apply(params, tokens, cfg, rng=rng))
        one, same, other = (run(jax.random.key(n)) for n in (0, 0, 1))
        np.testing.assert_array_equal(one, same)
        assert np.array_equal(one, other) != redraw


@pytest.mark.slow
def test_the_same_on_eight_devices():
    cfg, params = model()
    tokens = jnp.asarray(RNG.integers(0, 20, (8, 32)))
    segments = jnp.asarray(np.sort(RNG.integers(1, 4, (8, 32)), axis=1))
    step = jax.jit(
        jax.value_and_grad(lambda p: jnp.mean(jnp.sin(gpt.apply(p, tokens, cfg, segments=segments)[..., 0])))
    )
    wanted = step(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])):
        found = jax.device_get(jax.jit(step)(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_what_it_cannot_do_is_refused():
    for fields, line in (
        ({"buckets": 7}, "config.model.attention.buckets: 7; accepted: even"),
        ({"buckets": 1}, "config.model.attention.buckets: 1; accepted: at least 2"),
        ({"buckets": (4, 5)}, "config.model.attention.buckets: 5; accepted: even"),
        (
            {"buckets": ()},
            "config.model.attention.buckets: \\(\\); accepted: none, or an even number, or even factors of one",
        ),
        ({"buckets": (1024, 1026)}, "config.model.attention.buckets: 1050624 in all; accepted: at most 1048576"),
        ({"chunk": 0}, "config.model.attention.chunk: 0; accepted: at least 1"),
        (
            {"num_heads": 3},
            "config.model.attention.num_heads: 3 does not divide model.width 32; accepted: "
            "a divisor of it, or a model.attention.head_width",
        ),
    ):
        with pytest.raises(ConfigError, match=line):
            config(**fields)
    cfg = config(across_buckets=True)
    with pytest.raises(
        ConfigError, match=r"^config.model.attention.across_buckets: True; generating text needs chunks"
    ):
        decoding.generate({}, [[1, 2]], cfg, max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"^config.mesh.context: 2; model.attention.kind=lsh needs whole rows"):
        check_context(cfg, make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"^lsh: the mask has a prefix; accepted: causality and segments"):
        jax.eval_shape(
            lambda p: gpt.apply(p, jnp.zeros((1, 8), int), cfg, prefix=jnp.zeros((1, 8), bool)),
            abstract_params(gpt.specs(cfg)),
        )
    x = jnp.ones((1, 8, 4, 4))
    for rotations in (jnp.ones((2, 4, 3, 2)), (jnp.ones((4, 4, 3, 2)), jnp.ones((2, 4, 3, 2)))):
        with pytest.raises(ValueError, match=r"lsh_attention: rotations \(2, 4, 3, 2\); accepted: \(4, 4\) and rounds"):
            lsh_attention(x, x, rotations)
    with pytest.raises(ValueError, match=r"lsh_attention: rotations of 2, 3 rounds; accepted: as many for each factor"):
        lsh_attention(x, x, (jnp.ones((4, 4, 3, 2)), jnp.ones((4, 4, 2, 2))))
    with pytest.raises(ValueError, match=r"random_rotations: buckets \(4, 5\); accepted: even, at least 2"):
        random_rotations(jax.random.key(0), 4, 4, 3, (4, 5))


def test_bfloat16():
    """Gradients compile on CPU, and are those of the same numbers in float32 within what bfloat16 rounds."""
    # Of few digits, so that hashes are the same and no token is in another bucket.
    rotations = random_rotations(jax.random.key(0), H, K, 2, 4).astype(jnp.bfloat16).astype(jnp.float32)
    x, value = (jnp.asarray(each, jnp.bfloat16) for each in (QUERY_KEY, VALUE))

    def loss(x, value, weight):
        out = lsh_attention(x, value, rotations, chunk=8, causal=True, segments=jnp.asarray(SEGMENTS))
        return jnp.sum(out * weight.astype(out.dtype))

    weight = jnp.asarray(np.sign(VALUE[::-1]), jnp.bfloat16)
    exact = jax.grad(loss, (0, 1))(*(each.astype(jnp.float32) for each in (x, value, weight)))
    for got, wanted in zip(jax.jit(jax.grad(loss, (0, 1)))(x, value, weight), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=5e-2, atol=5e-2)

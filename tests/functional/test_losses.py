"""The chunked loss: equal to the naive one in value and gradient, and never the logits of the whole batch."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest

from jaxformer.config import from_mapping
from jaxformer.functional import block_loss
from jaxformer.functional.losses import cross_entropy, token_loss
from jaxformer.parallel.mesh import make_mesh

B, T, D, V = 3, 10, 4, 13
RNG = np.random.default_rng(0)
HIDDEN, TABLE, BIAS = RNG.normal(size=(B, T, D)), RNG.normal(size=(V, D)) * 2, RNG.normal(size=V)
TARGETS = RNG.integers(0, V, (B, T)).astype(np.int32)
WEIGHTS = RNG.random((B, T)) * (RNG.random((B, T)) < 0.7)
OPTIONS = [
    dict(label_smoothing=smoothing, z_loss=z) for smoothing, z in itertools.product((0.0, 0.1), (0.0, 1e-2))
]  # fmt: skip
CHUNKS = [None, 1, 9, 12, 1000]  # all at once; one column each; 3 columns (4 chunks, padded); 4 (3, padded); all


def arrays(dtype=None):
    return tuple(jnp.array(x, dtype) for x in (HIDDEN, TABLE, BIAS))


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1, 2))
def naive_gradients(hidden, table, bias, label_smoothing, z_loss):
    """The same loss with all logits at once, differentiated by jax.grad."""
    logits = jnp.einsum("btd,vd->btv", hidden, table) + bias[None, None]
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, jnp.array(TARGETS)[..., None], axis=-1)[..., 0]
    each = (1 - label_smoothing) * nll - label_smoothing * jnp.mean(log_p, axis=-1)
    each = each + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(each * jnp.array(WEIGHTS))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_cross_entropy(options):
    logits = HIDDEN @ TABLE.T + BIAS
    wanted = reference.cross_entropy(logits, TARGETS, **options)
    with jax.enable_x64(True):
        got = cross_entropy(jnp.array(logits), jnp.array(TARGETS), **options)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_cross_entropy_says_of_dtypes_and_impossible_tokens(dtype):
    logits = jnp.array([[0.0, 1.0, -jnp.inf]], dtype)
    cases = ((0, 0.0, (1.3125, 1.3125)), (2, 0.0, (math.inf,) * 2), (0, 0.1, (math.inf, 1.3125)))

    @jax.jit
    def run(logits):
        found = [jax.vjp(lambda x, t=t, s=s: cross_entropy(x, jnp.array([t]), s), logits) for t, s, _ in cases]
        return [(out, backward((jnp.ones(1, dtype), jnp.zeros(1, dtype)))[0]) for out, backward in found]

    for (out, gradient), (_, _, expected) in zip(jax.device_get(run(logits)), cases, strict=True):
        assert [x.dtype for x in out] == [dtype] * 2
        np.testing.assert_allclose([float(x[0]) for x in out], expected, rtol=1e-2)
        assert np.isfinite(gradient.astype(np.float32)).all()


@pytest.mark.parametrize(
    "options, chunk_tokens", [*((o, 9) for o in OPTIONS[:-1]), *((OPTIONS[-1], c) for c in CHUNKS)]
)
def test_sums_and_gradients_equal_the_naive_loss(options, chunk_tokens):
    loss, nll = reference.cross_entropy(HIDDEN @ TABLE.T + BIAS, TARGETS, **options)
    right = (HIDDEN @ TABLE.T + BIAS).argmax(axis=-1) == TARGETS
    with jax.enable_x64(True):

        def total(hidden, table, bias):
            out = token_loss(
                hidden, table, jnp.array(TARGETS), jnp.array(WEIGHTS), bias, chunk_tokens=chunk_tokens, **options
            )
            return 3 * out.total, out

        both = jax.jit(lambda *a: (jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*a), total(*a)[1]))
        (grads, out), only_sums = both(*arrays())
        wanted = [3 * np.asarray(x) for x in naive_gradients(*arrays(), **options)]
    for got in (out, only_sums):
        np.testing.assert_allclose(got.total, (loss * WEIGHTS).sum(), rtol=1e-12)
        np.testing.assert_allclose(got.weight, WEIGHTS.sum(), rtol=1e-12)
        np.testing.assert_allclose(got.nll_rows, (nll * WEIGHTS).sum(axis=1), rtol=1e-12)
        np.testing.assert_allclose(got.correct_rows, (right * WEIGHTS).sum(axis=1), rtol=1e-12)
        np.testing.assert_allclose(got.weight_rows, WEIGHTS.sum(axis=1), rtol=1e-12)
    for got, theirs in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, theirs, rtol=1e-10, atol=1e-12)
    assert not np.asarray(grads[0])[WEIGHTS == 0].any()


def test_without_bias():
    out = jax.jit(token_loss)(*arrays(jnp.float32)[:2], jnp.array(TARGETS), jnp.array(WEIGHTS, jnp.float32))
    loss, _ = reference.cross_entropy(HIDDEN @ TABLE.T, TARGETS)
    np.testing.assert_allclose(out.total, (loss * WEIGHTS).sum(), rtol=1e-5)


def test_parts_of_a_batch_add_up():
    """Micro-batches of unequal weight: sums add, and are divided once."""

    @jax.jit
    def each(hidden, table, bias, weights):
        return [
            token_loss(hidden[rows], table, jnp.array(TARGETS[rows]), weights[rows], bias)
            for rows in (slice(0, 3), slice(0, 1), slice(1, 3))
        ]

    whole, *parts = jax.device_get(each(*arrays(jnp.float32), jnp.array(WEIGHTS, jnp.float32)))
    np.testing.assert_allclose(parts[0].total + parts[1].total, whole.total, rtol=1e-6)
    np.testing.assert_allclose(parts[0].weight + parts[1].weight, whole.weight, rtol=1e-6)


def test_positions_of_weight_zero_change_nothing_bitwise():
    """Nor need their targets be tokens: -1 is what "no pair" and padding say."""
    hidden, table, bias = arrays(jnp.float32)
    off = WEIGHTS == 0

    @jax.jit
    def run(hidden, targets):
        def total(hidden, table, bias):
            out = token_loss(hidden, table, targets, jnp.array(WEIGHTS, jnp.float32), bias, chunk_tokens=9)
            return out.total, out

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(hidden, table, bias)

    plain = run(hidden, TARGETS)
    other = run(np.where(off[..., None], np.float32(7), hidden), np.where(off, -1, TARGETS))
    for a, b in zip(*map(jax.tree.leaves, (plain, other)), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)


def test_metrics_and_weights_pass_no_gradient():
    hidden, table, bias = arrays(jnp.float32)

    def metrics(hidden, table, bias):
        out = token_loss(hidden, table, jnp.array(TARGETS), jnp.array(WEIGHTS, jnp.float32), bias)
        return jnp.sum(out.nll_rows) + jnp.sum(out.correct_rows)

    @jax.jit
    def gradients(hidden, table, bias, weights):
        by_weight = jax.grad(lambda w: token_loss(hidden, table, jnp.array(TARGETS), w).total)
        return *jax.grad(metrics, argnums=(0, 1, 2))(hidden, table, bias), by_weight(weights)

    assert not any(np.asarray(g).any() for g in gradients(hidden, table, bias, jnp.array(WEIGHTS, jnp.float32)))


def test_bfloat16_hidden_states_keep_float32_sums_and_table_gradients():
    hidden, table, bias = arrays(jnp.float32)
    hidden = hidden.astype(jnp.bfloat16)
    exact = [np.asarray(x, np.float64) for x in (hidden, table.astype(jnp.bfloat16), bias)]

    def total(hidden, table, bias):
        out = token_loss(hidden, table, jnp.array(TARGETS), jnp.array(WEIGHTS, jnp.float32), bias, chunk_tokens=9)
        return out.total, out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(hidden, table, bias)
    assert all(x.dtype == jnp.float32 for x in out)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
    loss, _ = reference.cross_entropy(exact[0] @ exact[1].T + exact[2], TARGETS)
    np.testing.assert_allclose(out.total, (loss * WEIGHTS).sum(), rtol=1e-5)  # logits are not rounded to bfloat16
    with jax.enable_x64(True):
        wanted = naive_gradients(*map(jnp.array, exact), label_smoothing=0.0, z_loss=0.0)
    for got, theirs in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), theirs, atol=2**-6)


def test_huge_logits_are_finite():
    hidden, table, _ = arrays(jnp.float32)
    run = jax.value_and_grad(
        lambda h: token_loss(h, table, jnp.array(TARGETS), jnp.ones((B, T)), label_smoothing=0.1).total
    )
    out, grad = jax.jit(run)(hidden * 1e4)
    assert np.isfinite(out) and np.isfinite(grad).all()


def largest(text):
    """Most elements of any floating-point array in a compiled program or a jaxpr."""
    return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"\b(?:f|bf)\d+\[([\d,]+)\]", text))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.slow
@pytest.mark.optimized
def test_the_compiled_gradient_never_holds_the_logits_of_the_batch(dtype):
    rows, length, width, vocab, chunk = 4, 64, 8, 96, 32
    hidden, table = jnp.ones((rows, length, width), dtype), jnp.ones((vocab, width))
    targets, weights = jnp.zeros((rows, length), int), jnp.ones((rows, length))

    def compiled(chunk_tokens):
        def total(hidden, table):
            return token_loss(hidden, table, targets, weights, chunk_tokens=chunk_tokens).total

        return jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, table).compile().as_text()

    assert largest(compiled(rows * length)) >= rows * length * vocab  # the ruler measures
    assert largest(compiled(chunk)) == chunk * vocab


@pytest.mark.parametrize("vocab", [256, 50_304, 256_000])
def test_the_chunk_chosen_from_the_vocabulary_bounds_the_logits(vocab):
    rows, length, width = 8, 1024, 64

    def total(hidden, table, targets, weights):
        return token_loss(hidden, table, targets, weights).total

    shapes = [((rows, length, width), float), ((vocab, width), float), ((rows, length), int), ((rows, length), float)]
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(
        *(jax.ShapeDtypeStruct(shape, jnp.int32 if kind is int else jnp.float32) for shape, kind in shapes)
    )
    allowed = max(block_loss.MOST_LOGITS, block_loss.MIN_POSITIONS * rows * vocab, vocab * width)
    assert largest(str(jaxpr)) <= allowed
    assert vocab == 256 or allowed < rows * length * vocab / 4


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What XLA would be given on an NVIDIA GPU, computed here."""

    def chosen(*arrays, cuda=None, default=None, **others):
        return (cuda or default)(*arrays)

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_the_loss_of_a_gpu_is_the_same(options, soft_cap, request):
    """It reads the logits once, by `logit_sums`: sums, hits and gradients as everywhere."""

    def found():
        def loss(*operands):
            out = token_loss(operands[0], operands[1], TARGETS, WEIGHTS, operands[2], soft_cap=soft_cap, **options)
            return out.total, out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays())

    with jax.enable_x64(True):
        expected = found()
        request.getfixturevalue("as_on_a_gpu")
        assert "reduce[" in str(jax.make_jaxpr(lambda h: token_loss(h, TABLE, TARGETS, WEIGHTS).total)(HIDDEN))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found(), expected)


def test_a_gpu_s_vocabulary_may_lie_on_several_devices(as_on_a_gpu):
    """They exchange a few numbers of each position, and not its logits."""
    mesh = make_mesh(from_mapping({"mesh": {"data": 2, "fsdp": 1, "tensor": 4}}).mesh, jax.devices()[:8])
    rows, length, vocab, width = 8, 64, 1024, 32
    shapes = ((rows, length, width), (vocab, width), (rows, length), (rows, length))
    kinds = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    given = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    with jax.set_mesh(mesh):
        loss = jax.grad(lambda *x: token_loss(*x).total, argnums=(0, 1))
        text = jax.jit(loss).lower(*given).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    numbers = [math.prod(map(int, sizes.split(","))) for sizes in gathered]
    assert numbers and max(numbers) == rows // 2 * length * 4


def test_blocks_are_larger_on_gpus():
    """1 GiB of float32 logits there, 128 MiB elsewhere; on every device that shares the rows as many."""
    sizes = {name: block_loss.chosen_chunk(8, 50304, platform=name) for name in ("cpu", "tpu", "cuda")}
    assert sizes == {"cpu": 2**25 // 50304, "tpu": 2**25 // 50304, "cuda": 2**28 // 50304}
    assert block_loss.chosen_chunk(8, 50304, 4, "cuda") == 4 * sizes["cuda"]
    assert block_loss.chosen_chunk(64, 2**30, platform="cpu") == 16 * 64

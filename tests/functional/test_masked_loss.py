"""The loss of selected positions equals the loss of all of them, for any weights, and costs what is selected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.config import MeshConfig
from jaxformer.functional import layers, masked_loss
from jaxformer.functional.losses import token_loss
from jaxformer.functional.masked_loss import masked_token_loss
from jaxformer.parallel.mesh import batch_sharding, make_mesh

B, T, D, V = 3, 10, 4, 13
RNG = np.random.default_rng(0)
HIDDEN, TABLE, BIAS = RNG.normal(size=(B, T, D)), RNG.normal(size=(V, D)) * 2, RNG.normal(size=V)
HEAD = {"w": RNG.normal(size=(D, D)), "b": RNG.normal(size=D), "scale": RNG.normal(size=D)}
TARGETS = RNG.integers(0, V, (B, T)).astype(np.int32)
WEIGHTS = {
    "random": RNG.random((B, T)) * (RNG.random((B, T)) < 0.3),
    "half_of_every_row": np.argsort(RNG.random((B, T)), axis=1) % 2.0,
    "none": np.zeros((B, T)),
    "all": np.ones((B, T)),
    "one_row": np.eye(B)[1][:, None] * np.ones((B, T)),
    "the_last_only": np.arange(B * T).reshape(B, T) == B * T - 1.0,
}
CHUNKS = [None, 1, 6, 9, 1000]  # one block; blocks of 1, 2 (5 of them), 3 (4, the last cut), 10 columns


def transform(p, x):
    return layers.layer_norm(layers.gelu(layers.linear(x, p["w"], p["b"])), p["scale"])


OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def chosen(hidden, table, bias, head, weights, chunk_tokens):
    more = {"transform": transform, "transform_params": head, "chunk_tokens": chunk_tokens, **OPTIONS}
    return masked_token_loss(hidden, table, jnp.array(TARGETS), weights, bias, **more)


def plain(hidden, table, bias, head, weights):
    x = transform(head, hidden.reshape(-1, D)).reshape(hidden.shape)
    return token_loss(x, table, jnp.array(TARGETS), weights, bias, **OPTIONS)


def losses_and_gradients(loss):
    """A function to (sums, gradients of 3 * total), compiled once for all weights."""

    def total(*arguments, **options):
        out = loss(*arguments, **options)
        return 3 * out.total, out

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True), static_argnames="chunk_tokens")


OF_CHOSEN, OF_ALL = losses_and_gradients(chosen), losses_and_gradients(plain)
SUMS = jax.jit(chosen, static_argnames="chunk_tokens")  # without gradients they are a program of their own


def assert_same(got, wanted, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("kind, chunk_tokens", [
    *((k, 9) for k in WEIGHTS),
    *(pytest.param("random", c, marks=pytest.mark.slow) for c in CHUNKS if c != 9),
])  # fmt: skip
def test_equals_the_loss_of_all_positions(kind, chunk_tokens):
    with jax.enable_x64(True):
        arguments = (HIDDEN, TABLE, BIAS, HEAD, WEIGHTS[kind])
        got, sums = (run(*arguments, chunk_tokens=chunk_tokens) for run in (OF_CHOSEN, SUMS))
        wanted = OF_ALL(*arguments)
    assert_same(got, wanted, rtol=1e-10, atol=1e-12)
    assert_same(sums, wanted[0][1], rtol=1e-12)
    assert np.asarray(wanted[1][0]).any() == (kind != "none")


def test_under_vmap_each_case_has_its_own_number_of_blocks():
    def of(loss, weights, **options):
        def total(hidden):
            return loss(hidden, *map(jnp.array, (TABLE, TARGETS)), weights, **options).total

        return jax.value_and_grad(total)(jnp.array(HIDDEN))

    with jax.enable_x64(True):
        weights = jnp.array(np.stack(list(WEIGHTS.values())))
        got = jax.jit(jax.vmap(lambda w: of(masked_token_loss, w, chunk_tokens=6)))(weights)
        wanted = jax.jit(jax.vmap(lambda w: of(token_loss, w)))(weights)
    assert_same(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind, blocks", [("none", 0), ("the_last_only", 1), ("all", 5), ("half_of_every_row", 3)])
def test_only_blocks_that_are_needed_are_computed(kind, blocks):
    calls = []

    def counted(p, x):
        jax.debug.callback(lambda: calls.append(x.shape))
        return x

    def total(hidden):
        weights = jnp.array(WEIGHTS[kind], jnp.float32)
        return masked_token_loss(
            hidden, jnp.array(TABLE), jnp.array(TARGETS), weights, transform=counted, chunk_tokens=6
        ).total

    jax.block_until_ready(jax.jit(jax.grad(total))(jnp.array(HIDDEN, jnp.float32)))
    jax.effects_barrier()
    assert calls == [(6, D)] * blocks


def test_without_chunk_tokens_blocks_are_small_and_bound_the_logits(monkeypatch):
    seen = []

    def noted(p, x):
        seen.append(x.shape[0])
        return x

    def trace(batch, positions, vocab):
        shapes = [((batch, positions, 8), float), ((vocab, 8), float), ((batch, positions), int)]
        made = (jax.ShapeDtypeStruct(s, jnp.int32 if kind is int else jnp.float32) for s, kind in shapes)
        jax.eval_shape(lambda h, e, t: masked_token_loss(h, e, t, jnp.ones(t.shape), transform=noted), *made)
        return seen.pop()

    assert trace(24, 128, 2048) == 24 * 128 // masked_loss.BLOCKS
    assert trace(1, 512, 2048) == masked_loss.LEAST_TOKENS
    assert trace(64, 512, 2**20) == 64 * 16  # by the number of logits


def test_rows_split_over_devices_stay_there():
    """Equal to one device; and the only thing devices tell each other is sums."""
    mesh = make_mesh(MeshConfig())
    rows, length = 16, 32
    hidden = jnp.array(RNG.normal(size=(rows, length, D)), jnp.float32)
    targets = jnp.array(RNG.integers(0, V, (rows, length)))
    weights = jnp.array((RNG.random((rows, length)) < 0.15) | (np.arange(rows) == 3)[:, None], jnp.float32)
    table, head = jnp.array(TABLE, jnp.float32), jax.tree.map(lambda x: jnp.array(x, jnp.float32), HEAD)

    def loss(table, head, hidden, targets, weights):
        def total(hidden, table, head):
            out = masked_token_loss(hidden, table, targets, weights, transform=transform, transform_params=head)
            return out.total, out

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(hidden, table, head)

    split, whole = batch_sharding(mesh), jax.NamedSharding(mesh, P())
    program = jax.jit(loss, in_shardings=(whole, whole, split, split, split))
    arguments = (table, head, hidden, targets, weights)
    text = program.lower(*arguments).compile().as_text()
    assert "all-reduce" in text
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in text
    assert_same(program(*arguments), jax.jit(loss)(*arguments), rtol=1e-4, atol=1e-5)

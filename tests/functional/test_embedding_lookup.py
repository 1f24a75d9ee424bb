"""A table split over devices gives the rows, and gets the gradient, of a whole one."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.config import MeshConfig
from jaxformer.functional import layers
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.parallel import constraints, mesh

RNG = np.random.default_rng(0)
TABLE, TOKENS, G = RNG.normal(size=(10, 8)), RNG.integers(0, 10, size=(8, 5)), RNG.normal(size=(8, 5, 8))


def mesh_of(*sizes):
    return mesh.make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])


@pytest.mark.parametrize(
    ("sizes", "axis", "part"),  # data, fsdp, tensor, context; a device's rows, tokens and columns
    [
        ((1, 8, 1), "vocab", (8, 5, 1)),
        ((2, 2, 2), "vocab", (4, 5, 4)),
        ((1, 1, 2, 4), "vocab", (2, 5, 8)),
        ((2, 4, 1), "positions", (4, 5, 2)),
        ((2, 1, 4), "vocab", (4, 5, 8)),  # 4 does not divide 10: the table's rows are whole
        ((1, 3, 1), "vocab", (8, 5, 8)),  # nor 3 the columns
    ],
)
def test_a_split_table_is_the_whole_one(sizes, axis, part):
    def both(tokens, table, g):
        rows, backward = jax.vjp(lambda table: look_up(tokens, table, axis), table)
        return rows, backward(g)[0]

    with jax.enable_x64(True), jax.set_mesh(mesh_of(*sizes)):
        rows, gradient = jax.jit(both)(TOKENS, TABLE, G)
    np.testing.assert_array_equal(rows, TABLE[TOKENS])
    assert rows.sharding.shard_shape(rows.shape) == part
    wanted = np.zeros_like(TABLE)
    np.add.at(wanted, TOKENS, G)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    "sizes, rows, gradient",
    [
        (None, [0, 0, 9, 9, 9], [2, 2]),
        ((1, 8, 1), [0, 0, 9, 9, 9], [2, 2]),
        ((1, 1, 2, 4), [None, None, None, None, None], [1, 1]),
    ],
)
def test_ids_outside_the_table_are_as_documented(sizes, rows, gradient):
    """Counted from the end, clipped without a gradient, or zeros; 0 and 9 stand beside them."""
    tokens = np.tile([-11, -10, -1, 10, 2**31 - 1, 0, 9], (8, 1))
    table = jnp.asarray(TABLE, jnp.float32)
    with contextlib.nullcontext() if sizes is None else jax.set_mesh(mesh_of(*sizes)):
        found, backward = jax.vjp(jax.jit(lambda table: look_up(jnp.asarray(tokens), table, "vocab")), table)
        counted = np.asarray(backward(jnp.ones_like(found))[0])[[0, 9], 0] / 8
    for got, row in zip(np.asarray(found[0]), rows, strict=False):
        np.testing.assert_array_equal(got, 0 * table[0] if row is None else table[row])
    np.testing.assert_array_equal(counted, gradient)


def test_without_a_mesh_it_is_the_plain_one():
    tokens, table = jnp.array(TOKENS), jnp.array(TABLE, jnp.float32)
    look, plain = (jax.make_jaxpr(f)(tokens, table) for f in (lambda t, x: look_up(t, x, "vocab"), layers.embed))
    assert str(look) == str(plain)


@pytest.mark.parametrize("rows", [10, 512])
def test_columns_may_be_scattered_by_way_of_rows(rows):
    """What a TPU does where a device's columns do not fill its lanes: the sum that every other platform takes."""
    x = jnp.array(RNG.normal(size=(4, rows, 8)), jnp.float32)

    def scattered(x):
        return constraints.scatter_by_rows(x[0], "fsdp")

    with jax.set_mesh(mesh_of(1, 4, 1)):
        found = jax.jit(jax.shard_map(scattered, in_specs=P("fsdp"), out_specs=P(None, "fsdp")))(x)
    np.testing.assert_allclose(found, np.sum(x, axis=0), rtol=1e-5, atol=1e-6)
    assert found.sharding.shard_shape(found.shape) == (rows, 2)

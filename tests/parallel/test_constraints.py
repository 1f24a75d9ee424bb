"""Activations lie where the table says; rows are cut into parts and put together again."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxformer.config import MeshConfig
from jaxformer.functional.attention import attention
from jaxformer.functional.whole_weights import gathered_params
from jaxformer.masks import Mask
from jaxformer.parallel import constraints, context, mesh
from jaxformer.specs import ParamSpec, zeros


def mesh_of(*sizes):
    return mesh.make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])


def laid_out(m, shape, *axes):
    """How `pin` lays out an array of `shape` under the mesh."""
    with jax.set_mesh(m):
        return jax.jit(lambda x: constraints.constrain(x + 1, *axes))(jnp.zeros(shape)).sharding.shard_shape(shape)


def test_pin_needs_no_mesh_and_obeys_one():
    x = jnp.zeros((8, 4))
    np.testing.assert_array_equal(constraints.constrain(x, "batch_rows", None), x)
    assert laid_out(mesh_of(8, 1, 1), (8, 4), "batch_rows", None) == (1, 4)


def test_the_table():
    m = mesh_of(2, 1, 2, 2)  # data, fsdp, tensor, context
    assert laid_out(m, (8, 4), "batch_rows", None) == (4, 4)
    assert laid_out(m, (8, 4), "rows", None) == (2, 4)
    assert laid_out(m, (8, 4, 4, 3), "rows", None, "heads", None) == (2, 4, 2, 3)
    assert laid_out(m, (8, 4, 3), "rows", "tokens", None) == (2, 4, 3)
    with constraints.sequence_parallel(True):
        assert laid_out(m, (8, 4, 3), "rows", "tokens", None) == (2, 2, 3)
    assert laid_out(m, (6, 3), "rows", "mlp") == (6, 3)  # what does not divide stays whole


def test_parameters_are_pinned_as_the_matrices_of_products():
    """Heads and their width are one axis there; the gradient of a projection comes back split as the parameter is."""
    specs = {
        "w_query": ParamSpec((8, 4, 3), ("embed", "heads", "head_width"), zeros, "hidden"),
        "w_out": ParamSpec((4, 3, 8), ("heads", "head_width", "embed"), zeros, "hidden", 2),
        "w_key": ParamSpec(
            (8, 1, 3), ("embed", "kv_heads", "head_width"), zeros, "hidden"
        ),  # one head: on every device
        "scale": ParamSpec((3,), ("head_width",), zeros, "norm"),
    }
    params = {name: jnp.arange(np.prod(s.shape), dtype=jnp.float32).reshape(s.shape) for name, s in specs.items()}
    with jax.set_mesh(mesh_of(1, 2, 2)):
        pinned = jax.jit(lambda params: constraints.constrain_params(params, specs))(params)
    assert {name: x.sharding.shard_shape(x.shape) for name, x in pinned.items()} == {
        "w_query": (4, 2, 3), "w_out": (2, 3, 4), "w_key": (4, 1, 3), "scale": (3,)
    }  # fmt: skip
    for name, x in params.items():
        np.testing.assert_array_equal(pinned[name], x)


def test_gathered_parameters_are_rounded_and_their_gradients_are_not():
    """What is no hidden matrix, and what is not sharded along the width, stays as it is."""
    specs = {
        "w_up": ParamSpec((8, 6), ("embed", "mlp"), zeros, "hidden"),
        "w_router": ParamSpec((8, 6), ("embed", None), zeros, "output"),
        "experts": ParamSpec((4, 8, 6), ("experts", "embed", "mlp"), zeros, "hidden"),
        "bias": ParamSpec((6,), ("mlp",), zeros, "bias"),
    }
    rng = np.random.default_rng(0)
    params, g = ({n: rng.normal(size=s.shape).astype(np.float32) for n, s in specs.items()} for _ in range(2))

    def run(params, g):
        whole, pull = jax.vjp(lambda p: gathered_params(p, specs, "bfloat16"), params)
        return whole, constraints.constrain_params(pull(g)[0], specs)

    with jax.set_mesh(mesh_of(1, 4, 2)):
        whole, gradients = jax.jit(run)(params, g)
    for name, x in params.items():
        np.testing.assert_array_equal(gradients[name], g[name])
        np.testing.assert_array_equal(whole[name], x.astype(jnp.bfloat16).astype(np.float32) if name == "w_up" else x)
    assert whole["w_up"].sharding.shard_shape((8, 6)) == (8, 3) and gradients["w_up"].sharding.shard_shape((8, 6)) == (
        2,
        3,
    )


def test_inside_a_users_shard_map_the_axes_are_the_users():
    """There XLA splits nothing, and a pin would name an axis that it may not: functions work as on one device."""
    m = mesh_of(2, 2, 2)
    x = jax.random.normal(jax.random.key(0), (4, 6, 2, 8))
    seen = []

    def local(x):
        seen.append((constraints.mesh_axes(), context.sequence_sharding(6, zigzag=True)))
        return attention(constraints.constrain(x, "rows", None, "heads", None), x, x, mask=Mask(causal=True))

    rows = P(("data", "fsdp"))
    with jax.set_mesh(m):
        found = jax.jit(jax.shard_map(local, in_specs=rows, out_specs=rows))(x)
    assert seen == [({}, context.SequenceSharding(1))] * len(seen)
    np.testing.assert_allclose(found, attention(x, x, x, mask=Mask(causal=True)), rtol=1e-5, atol=1e-6)


def test_rows_are_cut_where_the_context_axis_divides_them():
    with jax.set_mesh(mesh_of(1, 1, 1, 4)):
        assert context.sequence_sharding(16, zigzag=False) == context.SequenceSharding(4)
        assert context.sequence_sharding(16, zigzag=True).order.tolist() == context.zigzag_order(16, 4).tolist()
        assert context.sequence_sharding(12, zigzag=True) == context.SequenceSharding() and context.sequence_sharding(
            12, zigzag=False
        ) == context.SequenceSharding(4)
    assert context.sequence_sharding(16, zigzag=True) == context.SequenceSharding()


def test_zigzag_gives_every_device_the_same_work():
    order = context.zigzag_order(64, 4).reshape(4, -1)
    assert len({int((part[:, None] >= np.arange(64)).sum()) for part in order}) == 1
    assert sorted(order.ravel()) == list(range(64))


def test_folding_is_undone():
    x = jnp.arange(2 * 16 * 3).reshape(2, 16, 3)
    for cut in (
        context.SequenceSharding(),
        context.SequenceSharding(4),
        context.SequenceSharding(4, context.zigzag_order(16, 4)),
    ):
        assert (cut.unshard(cut.shard(x)) == x).all()
        assert (cut.sum_shards(cut.shard(x)[..., 0].sum(axis=1)) == x[..., 0].sum(axis=1)).all()
    folded = context.SequenceSharding(4, context.zigzag_order(16, 4)).shard(x)
    assert folded.shape == (8, 4, 3) and (folded[1] == x[1][jnp.array([0, 1, 14, 15])]).all()

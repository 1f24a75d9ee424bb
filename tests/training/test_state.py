"""The state is born sharded, and the optimizer's part of it lives where the parameters do."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from toy import ToyBatches, make_config, make_model

from jaxformer.parallel.mesh import make_mesh
from jaxformer.training import state as states
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps

EXPECTED = {
    "embedding.tokens": P("tensor", "fsdp"),
    "blocks.w_up": P(None, "fsdp", "tensor"),
    "blocks.b_up": P(None, "tensor"),
    "blocks.w_down": P(None, "tensor", "fsdp"),
}


def by_name(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
    "name", [*(pytest.param(x, marks=pytest.mark.slow) for x in ("adamw", "lion", "muon")), "adafactor"]
)
def test_optimizer_state_lives_where_its_parameter_does(name):
    config = make_config(optimizer={"name": name, "ema_decay": 0.9}, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    mesh, model = make_mesh(config.mesh), make_model()
    optimizer = make_optimizer(config.optimizer, 12, model.specs)
    state = states.init_state(model, optimizer, 0, mesh, ema=True)
    shapes = {k: v.shape for k, v in by_name(state.params).items()}
    mirrored = 0
    for path, leaf in by_name(state).items():
        param = next((p for p in EXPECTED if path.endswith(p) and leaf.shape == shapes[p]), None)
        expected = EXPECTED[param] if param else P()
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, expected), leaf.ndim), (path, leaf.sharding)
        mirrored += param is not None
    moments = {"adamw": 2, "lion": 1, "adafactor": 2, "muon": 1}[name]  # adafactor: the momentum, and v unfactored
    extra = 2 if name == "muon" else 0  # adam's second moments of the table and the bias
    assert mirrored == 4 * (2 + moments) + extra
    shard = state.params["blocks"]["w_up"].addressable_shards[0].data
    assert shard.shape == (2, 4, 8)  # of (2, 8, 16)


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_mesh():
    model = make_model()
    optimizer = make_optimizer(make_config().optimizer, 12, model.specs)
    meshes = [make_mesh(make_config(mesh=m).mesh) for m in ({"data": 2, "fsdp": 4}, {"tensor": 8})]
    whole = states.init_state(model, optimizer, 3, make_mesh(make_config().mesh, jax.devices()[:1]))
    for mesh in meshes:
        state = states.init_state(model, optimizer, 3, mesh)
        jax.tree.map(np.testing.assert_array_equal, state, whole)
    other = states.init_state(model, optimizer, 4, meshes[0])
    assert not np.array_equal(other.params["blocks"]["w_up"], whole.params["blocks"]["w_up"])
    assert not np.array_equal(other.rng, whole.rng)


@pytest.mark.slow
def test_abstract_state_is_the_state():
    config = make_config(optimizer={"ema_decay": 0.9, "name": "muon"}, mesh={"fsdp": 2, "data": 4})
    model, mesh = make_model(), make_mesh(config.mesh)
    optimizer = make_optimizer(config.optimizer, 12, model.specs)
    state = states.init_state(model, optimizer, 0, mesh, ema=True)
    abstract = states.abstract_state(model, optimizer, mesh, ema=True)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for a, x in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (a.shape, a.dtype) == (x.shape, x.dtype) and a.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert states.averaged(state) is state.ema and states.averaged(state._replace(ema=None)) is state.params


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8)])
def test_eight_devices_train_as_one_does(shape):
    def losses(mesh_config, devices, micro_batches):
        config = make_config(mesh=mesh_config, train={"micro_batches": micro_batches, "batch_rows": 16})
        mesh = make_mesh(config.mesh, devices)
        model = make_model(dropout=0.2)
        with jax.set_mesh(mesh):
            run = compile_steps(model, make_optimizer(config.optimizer, 12, model.specs), mesh, config)
            state, out = run.init(), []
            batches = ToyBatches(16)
            for start in (0, 3):
                state, metrics = run.train(state, *run.place_chunk([batches[start + i] for i in range(3)]))
                out += [metrics.loss, metrics.grad_norm]
            sums = run.evaluate(state.params, run.device_put_batch(batches[99]), state.frozen)
            assert sums["loss"][0].is_fully_replicated
            return np.concatenate([*out, sums["loss"][0]])

    one = losses({}, jax.devices()[:1], 2)
    names = dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
    np.testing.assert_allclose(losses(names, None, 2), one, rtol=2e-5)

"""The schedule of a pipeline: where rows lie, which micro-batch is where, how often; and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config

from jaxformer.config import Config, Execution, MeshConfig, TrainConfig
from jaxformer.errors import ConfigError
from jaxformer.models import backbone
from jaxformer.parallel import circular, pipeline
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel.pipeline import MicroBatches
from jaxformer.specs import abstract_params


def config(micro=4, repeats=1):
    model = {"num_layers": 4, "width": 16, "num_heads": 4, "context_length": 8, "vocab_size": 32}
    return Config(
        model=model_config(**model),
        execution=Execution(gradient_accumulation_steps=micro, pipeline_repeats=repeats, layers="scan", remat="full"),
        mesh=MeshConfig(data=1, stage=None),
        train=TrainConfig(global_batch_size=48),
    )


def mesh_of(stages):
    return meshes.make_mesh(MeshConfig(data=1, stage=stages), jax.devices()[:stages])


def test_rows_lie_on_the_stages_that_keep_their_micro_batches():
    lie, rows = MicroBatches(stages=2, count=6), np.arange(36).reshape(18, 2)
    arranged = lie.arrange(rows)
    np.testing.assert_array_equal(lie.unshard(arranged), rows)
    of_stages = np.asarray(arranged[:, 0]).reshape(2, -1) // 2 % 6
    assert [sorted(set(each)) for each in of_stages.tolist()] == [[0, 1, 2], [3, 4, 5]]
    numbers = jnp.arange(6)
    told = lie.map(lambda x, number: x * 0 + number, arranged, numbers)
    np.testing.assert_array_equal(lie.unshard(told)[:, 0], np.arange(18) % 6)


@pytest.mark.parametrize("stages, micro, repeats, data", [(4, 8, 1, 1), (2, 6, 3, 2), (4, 4, 2, 1)])
def test_every_micro_batch_meets_every_layer_once(stages, micro, repeats, data):
    """Layers that multiply by 31 and add their number write down where a row has been; the terms count the visits."""
    mesh = meshes.make_mesh(MeshConfig(data=data, stage=stages), jax.devices()[: stages * data])
    lie, rows, layers = MicroBatches(stages, micro, repeats), 2 * micro * data, 2 * stages * repeats

    def apply(digits, common, rows, number, turn):
        x, there = rows["x"], rows["label"]
        for digit in digits[turn] if repeats > 1 else digits:
            x = 31 * x + digit
        return x, {"visits": jnp.ones(()), "labels": jnp.sum(there), "number": number}

    digits, of = jnp.arange(1, layers + 1, dtype=jnp.uint32), np.arange(rows, dtype=np.uint32)
    with jax.set_mesh(mesh):
        given = {"x": lie.arrange(jnp.asarray(of)), "label": lie.arrange(jnp.arange(rows) % micro)}
        run = jax.jit(lambda digits, rows: pipeline.run(apply, digits, (), rows, lie, own_data=data > 1))
        out, terms = jax.device_get(run(digits, given))
    for digit in range(1, layers + 1):
        of = 31 * of + np.uint32(digit)
    np.testing.assert_array_equal(lie.unshard(out), of)
    each = stages * repeats * sum(range(micro))
    # Of a data axis every group counts by itself what it has, and all see the numbers.
    counted = {"visits": data * stages * repeats * micro, "labels": each * rows // micro, "number": data * each}
    assert terms == counted


@pytest.mark.parametrize("stages, repeats", [(2, 2), (4, 2), (3, 4), (6, 4), (4, 6), (8, 8)])
def test_parts_go_to_their_stages_one_at_a_time(stages, repeats):
    everything = set()
    for each in circular.moves(stages, repeats):
        assert sorted(to for _, to, _ in each) == list(range(stages))
        everything |= {(stage * repeats + part, to, place) for stage, (part, to, place) in enumerate(each)}
    assert everything == {(c, c % stages, c // stages) for c in range(stages * repeats)}


def scans(jaxpr):
    """The lengths of the scans of a program that hand something to another device."""
    for eqn in jaxpr.eqns:
        inner = [each for value in eqn.params.values() for each in (value if isinstance(value, tuple) else (value,))]
        inner = [getattr(each, "jaxpr", each) for each in inner if hasattr(getattr(each, "jaxpr", each), "eqns")]
        if eqn.primitive.name == "scan" and any(e.primitive.name == "ppermute" for j in inner for e in j.eqns):
            yield eqn.params["length"]
        for each in inner:
            yield from scans(each)


@pytest.mark.parametrize("stages, micro, repeats", [(2, 2, 1), (2, 16, 2), (4, 8, 1)])
def test_the_share_of_the_ticks_that_is_useful(stages, micro, repeats):
    cfg = config(micro, repeats)
    params, tokens = abstract_params(backbone.specs(cfg.model)), jax.ShapeDtypeStruct((16, 8), jnp.int32)
    with jax.set_mesh(mesh_of(stages)):
        run = functools.partial(backbone.hidden, cfg=cfg.model, execution=cfg.execution)
        ticks = list(scans(jax.make_jaxpr(run)(params, tokens).jaxpr))
    schedule = circular.Schedule(stages, micro, repeats)
    assert ticks == [schedule.ticks] == [repeats * micro + stages - 1]
    assert schedule.useful == repeats * micro / ticks[0]


@pytest.mark.parametrize("micro", [1, 2, 6])
def test_every_stage_keeps_as_many_micro_batches(micro):
    line = f"config.execution.gradient_accumulation_steps: {micro}; each of mesh.stage 4 stages keeps as many "
    with pytest.raises(ConfigError, match=f"^{line}micro-batches as the others; accepted: multiples of 4$"):
        meshes.check_stages(config(micro), mesh_of(4))
    with jax.set_mesh(mesh_of(4)), pytest.raises(ValueError, match=f"^24 rows in {micro} micro-batches on 4 stages;"):
        pipeline.micro_batches(24, micro)


def test_a_stage_is_one_with_its_rows_whole():
    mesh = meshes.make_mesh(MeshConfig(data=1, stage=2, context=2), jax.devices()[:4])
    with pytest.raises(ConfigError, match=r"^config.mesh.stage: 2; mesh.context=2 sends keys and values"):
        meshes.check_stages(config(), mesh)


def test_what_decodes_has_no_stages():
    with pytest.raises(
        ConfigError, match=r"^config.mesh.stage: 2; decoding has no micro-batches for them; accepted: 1"
    ):
        meshes.check_without_stages(mesh_of(2), "decoding")
    meshes.check_without_stages(meshes.make_mesh(MeshConfig(), jax.devices()), "decoding")


def test_stages_are_the_outermost_axis_and_none_are_no_axis():
    mesh = meshes.make_mesh(MeshConfig(data=2, tensor=2, stage=None), jax.devices())
    assert dict(mesh.shape) == {"stage": 2, "data": 2, "fsdp": 1, "context": 1, "tensor": 2}
    assert meshes.make_mesh(MeshConfig(data=8, stage=None), jax.devices()).axis_names == meshes.AXES
    assert meshes.across_slices((4, 2, 2, 1, 1), 8, mesh.axis_names) == (4, 2, 1, 1, 1)
    meshes.check_batch(8, 4, mesh)  # micro-batches of two rows, each over the two devices of a stage
    with pytest.raises(ConfigError, match=r"of 1 rows does not divide over 2 devices \(mesh.data 2 x mesh.fsdp 1\)"):
        meshes.check_batch(8, 8, mesh)

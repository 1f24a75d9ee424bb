"""What a plan knows of stages before anything is compiled: bytes at the least, ticks, kept activations, candidates."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxformer.config import Config, Experts, from_mapping
from jaxformer.models.gpt import specs
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan.communication_bound import communication_bound
from jaxformer.plan.measures import pipeline_of, saved_activations
from jaxformer.plan.search import candidates
from jaxformer.plan.topology import Topology, parse
from jaxformer.specs import is_spec

ROWS, LENGTH, WIDTH, LAYERS = 32, 64, 32, 8


def config(micro=4, remat="full", repeats=1, **mesh) -> Config:
    model = {"num_layers": LAYERS, "width": WIDTH, "context_length": LENGTH, "vocab_size": 64, "tie_embeddings": False}
    execution = {"gradient_accumulation_steps": micro, "remat": remat, "pipeline_repeats": repeats}
    tree = {"model": model, "execution": execution, "train": {"global_batch_size": ROWS}, "mesh": mesh}
    return from_mapping(tree)


def bound(repeats=1, **mesh):
    cfg = config(repeats=repeats, **mesh)
    return communication_bound(cfg, specs(cfg.model), make_mesh(cfg.mesh, jax.devices()))


def test_bytes_at_the_least():
    number = 2 if config().model.dtype == "bfloat16" else 4
    rows = ROWS // 2  # those of the batch on a device of each stage
    assert bound(data=2, stage=4)["stage"] == 4 * rows * LENGTH * WIDTH * number
    # What goes round R times goes ahead R times and back once; and so do, once each way, the layers of other stages.
    layers = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(specs(config().model)["blocks"], is_leaf=is_spec))
    ahead = 3 / 2 * 4 * rows * LENGTH * WIDTH * number
    assert bound(repeats=2, data=2, stage=4)["stage"] == ahead + 2 * layers / 4 * 3 / 4
    # A stage has a part of the layers, whose products are summed for all rows of its devices.
    alone, staged = bound(data=4, tensor=2), bound(data=1, tensor=2, stage=4)
    assert staged["tensor"] == pytest.approx(alone["tensor"])
    # Each layer's gradient is summed over the devices of its stage alone, those of embeddings over all rows.
    shared = 2 * (64 * WIDTH * 2 + LENGTH * WIDTH + 2 * WIDTH) * 4  # two tables, positions, final norm
    assert bound(data=2, stage=4)["stage+data"] == pytest.approx(7 / 8 * shared)


def test_ticks():
    assert pipeline_of(config(), {"data": 8}) is None
    expected = {"stages": 4, "micro_batches": 16, "repeats": 1, "ticks": 19, "useful": 16 / 19}
    assert pipeline_of(config(micro=16), {"stage": 4}) == expected
    expected = {"stages": 4, "micro_batches": 16, "repeats": 2, "ticks": 35, "useful": 32 / 35}
    assert pipeline_of(config(micro=16, repeats=2, data=2, stage=4), {"stage": 4}) == expected


def kept(remat, **mesh):
    cfg = config(remat=remat, **mesh)
    return saved_activations(SimpleNamespace(config=cfg, mesh=make_mesh(cfg.mesh, jax.devices())))


def test_activations_that_a_stage_keeps():
    """Of as many rows on each device: without remat those of the layers of a stage, in every tick; with "full" the
    inputs of the stage and all of its layers once."""
    one, ticks, stages = kept("none", data=2, fsdp=4), 4 + 4 - 1, 4
    of_stage = 4 * kept("none", data=8)  # two data groups have four times the rows of eight
    assert kept("none", data=2, stage=4) == pytest.approx(of_stage * ticks / stages, rel=1e-6) and one > 0
    inputs = 4 * kept("full", data=8) / LAYERS
    assert kept("full", data=2, stage=4) == pytest.approx(inputs * ticks + of_stage / stages, rel=1e-6)


def test_the_search_tries_stages_in_turn():
    chip, shape = parse("h100:2x8")
    topology = Topology("h100:2x8", chip, shape, (0,) * 16)
    found = [(c.mesh.stage, c.mesh.data, c.mesh.fsdp, c.mesh.tensor) for c in candidates(config(micro=2), topology)]
    assert found[:4] == [(1, 1, 16, 1), (2, 1, 8, 1), (1, 2, 8, 1), (2, 8, 1, 1)]
    assert {stage for stage, *_ in found} == {1, 2}
    assert {c.mesh.stage for c in candidates(config(micro=1), topology)} == {1}


def test_the_search_tries_parts_of_the_experts_in_turn():
    """The most of a node first, of all nodes where an all-to-all can be sent, and each with stages too."""
    chip, shape = parse("h100:2x8")
    topology = Topology("h100:2x8", chip, shape, (0,) * 16)

    def found(exchange="auto", **fields):
        cfg = config(micro=2)
        model = replace(cfg.model, feed_forward=Experts(count=16, top_k=2, width=16, **fields))
        cfg = replace(cfg, model=model, execution=replace(cfg.execution, expert_exchange=exchange))
        return [(c.mesh.stage, c.mesh.expert, c.mesh.fsdp) for c in candidates(cfg, topology)]

    assert found("gather")[:5] == [(1, 8, 2), (1, 4, 4), (2, 8, 1), (1, 2, 8), (2, 4, 2)]
    assert found()[:3] == found(dispatch="capacity")[:3] == [(1, 16, 1), (1, 8, 2), (1, 4, 4)]
    assert {expert for _, expert, _ in found("gather")} == {1, 2, 4, 8}

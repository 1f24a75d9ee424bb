"""A plan's numbers agree with the specs, with the devices' links, and with a run that is really done."""

import ast
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from on_tpus import needs_libtpu, plans_on, printed

from jaxformer.config import from_mapping, load
from jaxformer.errors import ConfigError
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import RULES, make_mesh
from jaxformer.plan import collectives, measures, roofline, search, summary, topology
from jaxformer.plan.communication_bound import communication_bound
from jaxformer.plan.compiled_step import compile_step, target_config
from jaxformer.plan.topology import Topology
from jaxformer.runtime.hardware import CHIPS
from jaxformer.specs import is_spec
from jaxformer.training.optim import make_optimizer
from jaxformer.training.state import abstract_state

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "model": {
        "num_layers": 2, "width": 512, "num_heads": 8, "mlp_width": 1408, "context_length": 512, "vocab_size": 4096,
        "norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "use_bias": False, "tie_embeddings": False,
        "remat": "full", "layers": "scan", "dtype": "bfloat16",
    },
    "train": {"steps": 10, "batch_rows": 16, "steps_per_dispatch": 1},
    "optimizer": {"warmup_steps": 0},
}  # fmt: skip
GPT2 = {  # columns that do not fill a TPU's lanes (768 / 8), heads of 64, learned positions, one table
    "num_layers": 12, "width": 768, "num_heads": 12, "mlp_width": 3072, "context_length": 1024, "vocab_size": 8256,
    "norm": "layer_norm", "activation": "gelu_tanh", "positions": "learned", "use_bias": True, "tie_embeddings": True,
}  # fmt: skip


def small(**mesh):
    config = from_mapping(SMALL)
    return replace(config, mesh=replace(config.mesh, **mesh))


@pytest.mark.parametrize("name", ["llama_7b", "llama_70b", "gpt2_1_5b"])
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 1), (1, 2, 4), (8, 1, 1)])
def test_parameter_and_optimizer_bytes_follow_from_the_specs(name, sizes):
    """Four bytes for every number of the spec, over the devices that RULES splits it over; Adam's moments twice that,
    and one count. Counted here from shapes and names alone."""
    config = from_mapping(load(str(ROOT / f"configs/{name}.py")))
    data, fsdp, tensor = sizes
    if config.model.attention.num_heads % tensor:
        tensor, data = 1, data * tensor
    mesh = make_mesh(replace(config.mesh, data=data, fsdp=fsdp, tensor=tensor), jax.devices())
    model = make_model(config.model, config.loss)
    state = abstract_state(model, make_optimizer(config.optimizer, config.train.steps, model.specs), mesh)
    expected = 0
    for spec in jax.tree.leaves(model.specs, is_leaf=is_spec):
        parts = {"fsdp": fsdp, "tensor": tensor}
        divisor = math.prod(parts.get(a, 1) for axis in set(spec.axes) for a in RULES[axis] or ())
        expected += math.prod(spec.shape) // divisor * 4
    assert measures.local_bytes(state.params) == expected
    assert measures.local_bytes(state.opt_state) == 2 * expected + 4 * len(
        [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()]
    )


def test_the_minimum_by_hand():
    """One block's matrices and the two tables of the small model, by the formulas of the docstring."""
    config = small(data=2, fsdp=4, tensor=1)
    found = communication_bound(
        config, make_model(config.model, config.loss).specs, make_mesh(config.mesh, jax.devices())
    )
    blocks = 2 * (4 * 512 * 512 + 3 * 512 * 1408)
    norms = (2 * 2 + 1) * 512
    vocab = 4096 * 512
    rows = 16 * 512 // 8 * 512 * 2
    share = 3 / 4
    assert found["fsdp"] == share * (blocks * (2 * 2 + 4) + vocab * (2 + 4) + 2 * rows)
    assert found["data"] == 2 * 1 / 2 * (blocks + 2 * vocab) / 4 * 4
    assert found["data+fsdp"] == 2 * 7 / 8 * norms * 4
    assert found.keys() == {"fsdp", "data", "data+fsdp"}


def test_the_minimum_of_tensor_parallelism():
    config = small(data=1, fsdp=1, tensor=8)
    found = communication_bound(
        config, make_model(config.model, config.loss).specs, make_mesh(config.mesh, jax.devices())
    )
    tokens = 16 * 512
    # five sums a block ("full" computes attention again), two around the blocks, three numbers a token in the loss
    assert found == {"tensor": 2 * 7 / 8 * ((5 * 2 + 2) * tokens * 512 * 2 + 3 * tokens * 4)}


def links(name, shape, axes):
    chip, parsed = topology.parse(name)
    devices = np.arange(math.prod(parsed)).reshape(shape)

    class FakeMesh:
        pass

    mesh = FakeMesh()
    mesh.devices, mesh.axis_names, mesh.size = devices, ("data", "fsdp", "tensor"), devices.size
    mesh.shape = dict(zip(mesh.axis_names, shape, strict=True))
    return roofline.link_speed(Topology(name, chip, parsed, tuple(range(devices.size))), mesh, axes)


def test_links():
    """Inside a node NVLink; across nodes the network, which members of a group on one node share out."""
    h100 = CHIPS["h100"]
    assert links("h100:4x8", (1, 4, 8), "tensor") == h100.link
    assert links("h100:4x8", (1, 4, 8), "fsdp") == h100.network
    assert links("h100:4x8", (1, 32, 1), "fsdp") == min(h100.link, 8 * h100.network)
    assert links("v5e:4x4", (1, 16, 1), "fsdp") == 2 * CHIPS["v5e"].link
    assert links("v5e:4x4", (4, 4, 1), "fsdp") == CHIPS["v5e"].link


def test_compare_names_what_differs():
    old = {"topology": "cpu:8", "devices": 8, "mesh": {"fsdp": 8}, "config": {}, "memory": {"total": 10}, "flops": {},
           "collectives": [], "seconds": 1.0}  # fmt: skip
    new = {**old, "mesh": {"fsdp": 4}, "memory": {"total": 20}}
    assert summary.compare(old, old) == ["no difference"]
    assert summary.compare(old, new) == ["mesh.fsdp: 8 -> 4", "memory.total: 10 -> 20 (2.000)"]


def test_advice_that_a_run_accepts():
    """At most as many micro-batches as the devices have rows, those of mesh.expert too."""
    execution = {"remat": "full", "gradient_accumulation_steps": 1, "layers": "scan", "attention": "chunked"}
    memory = {"total": 20, "limit": 10, "state": 1, "gradients": 1, "temporaries": 18}
    plan = {"topology": "v5e:4x4", "memory": memory, "mesh": {"fsdp": 2, "expert": 8},
            "config": {"train": {"global_batch_size": 1024}, "execution": execution}}  # fmt: skip
    assert "try --config.execution.gradient_accumulation_steps=64 (now 1), " in summary.remedy(plan)


def test_the_context_axis_is_planned_as_a_run_would_use_it():
    """Rows in parts need the chunked implementation, and a search keeps the axis."""
    target = topology.make("cpu:8")
    one, two = small(context=1), small(context=2)
    chosen = [target_config(c, target, make_mesh(c.mesh, jax.devices())).execution.attention for c in (one, two)]
    assert chosen == ["xla", "chunked"]
    found = [c.mesh for c in search.candidates(two, target)]
    assert found and all(m.context == 2 and m.data * m.fsdp * m.tensor == 4 for m in found)
    odd = replace(two, model=replace(two.model, context_length=510))
    with pytest.raises(ConfigError, match="context_length"):
        compile_step(odd, target)
    kernel = replace(two, execution=replace(two.execution, attention="splash"))
    with pytest.raises(ConfigError, match=r"attention: splash cannot do rows cut by config.mesh.context 2; accepted"):
        compile_step(kernel, target)


def test_experts_are_planned_with_and_without_an_axis_of_theirs():
    target, tree = topology.make("cpu:8"), {"kind": "experts", "count": 4, "top_k": 1, "width": 16}
    chosen = []
    for mesh in ({"data": 8}, {"data": 2, "expert": 4}):
        model = {"num_layers": 1, "width": 16, "context_length": 32, "feed_forward": tree}
        execution = {"layers": "unroll", "steps_per_dispatch": 1}
        made = from_mapping({"model": model, "train": {"global_batch_size": 8}, "mesh": mesh, "execution": execution})
        compiled = compile_step(made, target)
        chosen.append(compiled.config.execution.expert_exchange)
    assert chosen == ["auto", "gather"]  # without an axis nothing is exchanged


@pytest.fixture(scope="module")
def cpu_plan():
    topology.prepare("cpu:8")
    return measures.make_plan(small(data=2, fsdp=2, tensor=2), topology.make("cpu:8"))


def test_a_plan_of_little_is_readable():
    """Nothing is 0.000e9, 0.0 ms or more than the whole; equal collectives share a line; a cut name says so."""
    sent = [
        collectives.Collective("all-gather", "fsdp", 4, 1e6, 2, "f32[8]", f"while/body/{'long_name/' * 9}dot{i // 10}")
        for i in range(13)
    ]
    roof = dict.fromkeys(("compute", "memory", "links", "step", "no_overlap"), 1.234e-7)
    plan = {
        "topology": "cpu:4", "devices": 4, "mesh": {"data": 1, "fsdp": 4}, "parameters": 2448, "tokens": 128,
        "seconds": 1.0, "memory": {"fits": None}, "replicated": [], "traffic": 1e6, "minimum": {}, "config": {},
        "flops": {"model": 106.9, "program": 25.0, "useful": 1.069},
        "collectives": measures._summed(sent, "count", "kind", "axes"),
        "largest": measures._summed(sent, "times", "kind", "axes", "shape", "source"),
        "roofline": {**roof, "bound": "links", "utilisation": 0.1, "utilisation_no_overlap": 0.1},
    }  # fmt: skip
    text = "\n".join(summary.lines(plan))
    assert " 2,448 parameters, " in text and "0.00012 ms" in text and "in 26" in text
    assert "93.5% of the model's, which counts masked scores too" in text and "106.9%" not in text
    listed = [line.split(None, 5)[2:] for line in text.partition("largest\n")[2].splitlines()[:2]]
    named = ".../" + "long_name/" * 6 + "dot"
    assert listed == [["all-gather", "fsdp", "20", f"x f32[8]                   {named}0"],
                      ["all-gather", "fsdp", "6", f"x f32[8]                   {named}1"]]  # fmt: skip
    plan["flops"]["useful"] = 0.5
    assert "of which the model's 50.0%" in "\n".join(summary.lines(plan))


def test_a_vocabulary_that_is_known_is_planned_with(tmp_path):
    """Symbols of a language, bytes, a tokenizer that exists: as many entries as the run will have, and no note."""
    from jaxformer.data import tokenizers
    from jaxformer.programs import plan

    tokenizers.train("bpe", ["one two three"], 300).save(tmp_path)
    language = {"weight": 1, "source": "markov", "language_symbols": 200, "language_order": 1}
    target, mesh = topology.make("cpu:1"), make_mesh(from_mapping({}).mesh, jax.devices()[:1])
    for data, entries in (
        ({"source": "markov", "language_symbols": 20}, 64),
        ({"mixture": {"a": language}}, 256),
        ({"tokenizer": "bytes"}, 320),
        ({"tokenizer_file": str(tmp_path / "tokenizer.json")}, 320),
    ):
        config = from_mapping({"data": data})
        planned = target_config(config, target, mesh)
        assert planned.model.vocab_size == entries, data
        assert plan.assumed(config, {"config": {"model": {"vocab_size": entries}}}) == []
    gone = from_mapping({"data": {"tokenizer_file": str(tmp_path / "none.json")}})
    assert plan.assumed(gone, {"config": {"model": {"vocab_size": 4096}}})


@pytest.mark.slow
def test_planning_says_what_it_compiles_and_what_it_assumes(monkeypatch, capsys):
    from jaxformer.programs import plan

    monkeypatch.setattr("sys.argv", ["plan", "gpt_tiny", "--topology=cpu:1", "--config.model.num_layers=1",
                                     "--config.model.width=24", "--config.model.context_length=16"])  # fmt: skip
    assert plan.main() == 0
    told = capsys.readouterr()
    mesh = "mesh data 1 x fsdp 1 x context 1 x tensor 1"
    assert told.err == f"compiling the train step for cpu:1, {mesh}, remat none\n"
    assert told.out.endswith("note: config.model.vocab_size: none; 4096 is assumed\n")
    config = from_mapping({"model": {"vocab_size": 64}})
    assert plan.assumed(config, {"config": {"model": {"vocab_size": 64}}}) == []


@pytest.mark.slow
def test_a_plan_on_cpu_devices(cpu_plan):
    """Complete, printable, JSON; nothing large replicated; the program computes what the model says, once again more
    where it rematerialises."""
    text = "\n".join(summary.lines(cpu_plan))
    assert "fits" in text and "all-gather" in text
    assert json.loads(json.dumps(cpu_plan))["mesh"] == {**cpu_plan["mesh"]}
    assert cpu_plan["replicated"] == [] and cpu_plan["memory"]["fits"] is None
    assert 0.7 < cpu_plan["flops"]["useful"] <= 1.0
    assert {"fsdp", "tensor", "data"} <= measures.by_axes(cpu_plan).keys()


@pytest.mark.slow
def test_search_ranks(monkeypatch):
    monkeypatch.setattr(search, "REMAT", ("full",))
    found = search.search(small(), topology.make("cpu:8"), tries=2)
    assert len(found) == 2
    totals = [one.plan["memory"]["total"] for one in found]
    assert totals == sorted(totals)
    assert len(search.lines(found)) == 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.optimized
def test_predicted_memory_is_within_a_tenth_of_a_real_runs_peak():
    config = {
        "model": {"num_layers": 4, "width": 512, "num_heads": 8, "context_length": 512, "vocab_size": 4096,
                  "layers": "scan"},
        "train": {"batch_rows": 8, "steps_per_dispatch": 1, "steps": 10},
        "optimizer": {"warmup_steps": 0},
    }  # fmt: skip
    found = json.loads(printed(str(Path(__file__).parent / "peak.py"), json.dumps(config)))
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.1)


ON_TPUS = {
    "data x fsdp": ({}, (2, 8, 1), ("fsdp", "data")),
    "fsdp x tensor": ({}, (2, 4, 2), ("fsdp", "tensor")),
    "gpt2": (GPT2, (2, 8, 1), ("fsdp",)),  # along data the table's gradient is summed twice: as input and as output
}


@pytest.fixture(scope="module")
def tpu_plans():
    """The plans of ON_TPUS, all of one process."""
    configs = [
        {
            **SMALL,
            "mesh": dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)),
            "model": {**SMALL["model"], **model},
        }
        for model, mesh, _ in ON_TPUS.values()
    ]
    return dict(zip(ON_TPUS, plans_on("v5e:4x4", configs), strict=True))


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ON_TPUS)
def test_on_tpus_collectives_stay_near_the_least(tpu_plans, name):
    """FSDP and tensor parallelism send at most 1.15 times the least, in the program that a v5e slice would run."""
    plan, axes = tpu_plans[name], ON_TPUS[name][2]
    sent = measures.by_axes(plan)
    for axis in axes:
        assert sent[axis] <= 1.15 * plan["minimum"][axis], (axis, sent, plan["minimum"], plan["largest"])
    assert sum(sent.values()) <= 1.15 * sum(plan["minimum"].values())
    assert plan["memory"]["fits"] is True


@pytest.mark.slow
@needs_libtpu
def test_a_mesh_axis_may_split_an_axis_of_the_torus():
    """8 is no product of axes of a 4 x 4 x 4 torus; neighbours in the mesh are still neighbours in the torus."""
    program = (
        "from jaxformer.config import MeshConfig; from jaxformer.plan import topology; "
        "from jaxformer.parallel.mesh import make_mesh; topology.prepare('v5p:4x4x4'); "
        "target = topology.make('v5p:4x4x4'); mesh = make_mesh(MeshConfig(data=8, fsdp=8), list(target.devices)); "
        "print(dict(mesh.shape), [d.coords for d in mesh.devices[0, :, 0, 0]])"
    )
    shape, places = re.fullmatch(r"({.*}) (\[.*\])", printed("-c", program)).groups()
    assert ast.literal_eval(shape) == {"data": 8, "fsdp": 8, "context": 1, "tensor": 1}
    coordinates = np.array(ast.literal_eval(places))
    assert len({tuple(c) for c in coordinates}) == 8
    assert sorted(np.ptp(coordinates, axis=0)) == [0, 1, 3]  # two neighbouring lines of the torus, not all over it

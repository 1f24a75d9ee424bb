"""A plan: what one compiled step needs, computes and sends, as plain JSON values."""

import math
from typing import Any

import jax
import numpy as np

from jaxformer.config import Config, to_dict
from jaxformer.functional.sublayers import stack_costs
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.parallel.circular import Schedule
from jaxformer.parallel.mesh import LARGE
from jaxformer.parallel.pipeline import STAGE
from jaxformer.plan import collectives, communication_bound, costs, hlo
from jaxformer.plan.compiled_step import CompiledStep, compile_step
from jaxformer.plan.grouped_costs import grouped_shares
from jaxformer.plan.kernel_costs import visited_shares
from jaxformer.plan.roofline import roofline
from jaxformer.plan.topology import Topology

Plan = dict[str, Any]
LISTED = 12  # collectives named by shape and source


def make_plan(config: Config, topology: Topology) -> Plan:
    """Compiles the train step and measures it, see `describe`.

    Raises:
      ConfigError: as in `compile_step`.
    """
    return describe(compile_step(config, topology), topology)


def describe(step: CompiledStep, topology: Topology) -> Plan:
    """The plan of a compiled step. What is in it, bytes and operations being those of one device in one update:

      topology, mesh, devices, seconds, parameters (of the model, all devices together), config
      memory       parameters, optimizer, other_state, batch, gradients, activations (an estimate, see
                   `saved_activations`), temporaries (XLA's, gradients and activations among them), total, limit, fits
      flops        model (ours, over all devices), program (of one device), useful: model / (program * devices)
      traffic      bytes to and from main memory
      collectives  [kind, axes, count, bytes] summed up; `largest` also by shape and source; `minimum` by axes
      stages       of a pipeline: how many, ticks of an update, the share of them that is useful; without one None
      replicated   large arrays of the state that every device along an axis holds alike
      roofline     see `roofline.roofline`

    Where a TPU's compiler gives up because the program does not fit, only what needs no program is there.
    """
    config = step.config
    memory = state_memory(step)
    limit = topology.chip.memory
    sizes = {name: int(size) for name, size in step.mesh.shape.items()}
    tokens = config.train.global_batch_size * config.model.context_length
    model_flops = training_flops(config.model, config.data, config.tune) * tokens
    counts = count_parameters(config.model)
    plan: Plan = {
        "topology": topology.name,
        "devices": len(topology.devices),
        "mesh": sizes,
        "parameters": counts.total,
        **({} if counts.active == counts.total else {"active": counts.active}),
        "tokens": tokens,
        "seconds": round(step.seconds, 1),
        "memory": memory,
        "flops": {"model": model_flops},
        "stages": pipeline_of(config, sizes),
        "replicated": replicated(step),
        "config": to_dict(config),
    }
    found = step.memory
    if found is None:
        total = memory["state"] + (step.needed or 0)
        memory |= {"temporaries": step.needed, "total": total, "limit": limit, "fits": False}
        return plan
    temporaries = int(found.temp_size_in_bytes)
    outputs = int(found.output_size_in_bytes - found.alias_size_in_bytes)
    total = int(found.argument_size_in_bytes) + outputs + temporaries
    fits = None if limit is None else total <= limit
    memory |= {"temporaries": temporaries, "total": total, "limit": limit, "fits": fits}

    program = hlo.read(step.text)
    sent = collectives.find(program, sizes)
    shares = visited_shares(config, topology) | grouped_shares(sizes, config.execution.expert_exchange)
    flops, traffic = costs.flops(program, shares), costs.traffic(program, shares)
    plan["flops"] |= {"program": flops, "useful": model_flops / (flops * len(topology.devices)) if flops else None}
    summed = _summed(sent, "count", "kind", "axes")
    return plan | {
        "traffic": traffic,
        "collectives": summed,
        "largest": _summed(sent, "times", "kind", "axes", "shape", "source")[:LISTED],
        "minimum": communication_bound.communication_bound(config, step.model.specs, step.mesh),
        "roofline": roofline(topology, step.mesh, flops, traffic, summed, model_flops),
    }


def pipeline_of(config: Config, sizes: dict[str, int]) -> dict[str, float] | None:
    """The schedule of a pipeline; None: there are no stages. What a stage computes in the other ticks counts among the
    program's operations, and so in the time of an update."""
    if STAGE not in sizes:
        return None
    micro_batches, repeats = config.execution.gradient_accumulation_steps, config.execution.pipeline_repeats
    schedule = Schedule(sizes[STAGE], micro_batches, repeats)
    return {
        "stages": sizes[STAGE], "micro_batches": micro_batches, "repeats": repeats, "ticks": schedule.ticks,
        "useful": schedule.useful,
    }  # fmt: skip


def by_axes(plan: Plan) -> dict[str, float]:
    """Bytes that one device sends in one update, by mesh axes."""
    out: dict[str, float] = {}
    for row in plan.get("collectives", ()):
        out[row["axes"]] = out.get(row["axes"], 0.0) + row["bytes"]
    return out


def local_bytes(tree: Any) -> int:
    """Bytes of one device's part of arrays that are described by shape and sharding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def state_memory(step: CompiledStep) -> dict[str, Any]:
    """Bytes of one device that follow from specs and shardings alone."""
    state = step.state
    parameters, optimizer = local_bytes(state.params), local_bytes(state.opt_state)
    whole = local_bytes(state)
    return {
        "parameters": parameters,
        "optimizer": optimizer,
        "other_state": whole - parameters - optimizer,
        "state": whole,
        "gradients": parameters,  # float32 and split as they are
        "activations": saved_activations(step),
    }


def saved_activations(step: CompiledStep) -> int:
    """Bytes of activations that the blocks keep for the backward pass of one micro-batch, on one device.

    "full" keeps a block's input; "attention" also attention's output, and its weights or what they are made of; "dots"
    also the products with weights, without attention's; "none" about everything that is computed, estimated as
    the products twice, the attention weights (where attention keeps them) and two norms. Reversible blocks keep two
    float32 streams in all. A stage of a pipeline keeps for all micro-batches, the idle ticks among them, what remat
    keeps, with "full" its input alone, and everything of its layers for the one micro-batch that it computes again.
    """
    model, execution, sizes = step.config.model, step.config.execution, dict(step.mesh.shape)
    each = 2 if model.dtype == "bfloat16" else 4
    tokens = communication_bound.tokens_per_device(step.config, {k: v for k, v in sizes.items() if v > 1})
    tensor, total = sizes.get("tensor", 1), 0
    for stack, share, by_name in stack_costs(model, model.context_length, execution):
        if stack.block == "reversible":
            total += int(share * tokens * 4 * 2 * model.width)
            continue
        costs = by_name.values()
        products = sum(cost.saved / tensor + model.width for cost in costs)
        kept = {
            "full": float(model.width),
            "attention": model.width + sum(cost.kept for cost in costs) / tensor,
            "dots": model.width + products,
            "none": 3 * model.width + 2 * products + sum(cost.saved_scores for cost in costs) / tensor,
        }
        numbers = stack.depth * kept[execution.remat]
        if STAGE in sizes:
            repeats = execution.pipeline_repeats
            ticks = Schedule(sizes[STAGE], execution.gradient_accumulation_steps, repeats).ticks
            depth = stack.depth / (sizes[STAGE] * repeats)
            if execution.remat == "full":
                numbers = ticks * kept["full"] + depth * kept["none"]
            else:
                numbers = ticks * depth * kept[execution.remat]
                numbers += 0 if execution.remat == "none" else depth * kept["none"]
        total += int(share * tokens * each * numbers)
    return total


def replicated(step: CompiledStep) -> list[dict[str, Any]]:
    """Large parameters, and what mirrors them, that a mesh axis does not split though it splits others."""
    found = []
    axes = [a for a in ("fsdp", "tensor") if step.mesh.shape.get(a, 1) > 1]
    for path, leaf in jax.tree_util.tree_leaves_with_path((step.state.params, step.state.opt_state)):
        used = {a for entry in leaf.sharding.spec if entry for a in (entry if isinstance(entry, tuple) else (entry,))}
        missing = [a for a in axes if a not in used]
        if missing and math.prod(leaf.shape) > LARGE:
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            kind = "parameters" if path[0].idx == 0 else "optimizer"
            found.append({"name": name, "in": kind, "along": "+".join(missing), "bytes": local_bytes(leaf)})
    return sorted(found, key=lambda row: -row["bytes"])


def _summed(sent: list[collectives.Collective], count: str, *names: str) -> list[dict[str, Any]]:
    """How often (under the name `count`) and how many bytes, of those that agree in these fields; most bytes first."""
    rows: dict[tuple, dict[str, Any]] = {}
    for one in sent:
        alike = {name: getattr(one, name) for name in names}
        row = rows.setdefault(tuple(alike.values()), {**alike, count: 0, "bytes": 0.0})
        row[count] += one.times
        row["bytes"] += one.total
    return sorted(rows.values(), key=lambda row: -row["bytes"])

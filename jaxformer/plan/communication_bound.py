"""A lower bound of what a device sends in one update on a given mesh, to compare a compiled program with.

  fsdp     every micro-batch: each parameter gathered for the forward pass and once more for the backward pass (the
           blocks'; a table is needed once), in the dtype of the computation; its gradient summed and split, float32.
           An embedding may send the rows that were looked up instead of its table, where they are fewer bytes.
  tensor   every micro-batch: activations summed after each sublayer, forward and backward (a parallel block sums once
           each way), and after all but the last once more where the backward pass recomputes blocks; once after the
           embedding and once for the loss's gradient; three numbers a token for the loss itself.
  context  every micro-batch and layer: what sublayers send around the ring (`layer.Cost`), keys and values, once
           forward (twice where the backward pass recomputes blocks), and they and their gradients backward.
  stage    every micro-batch: its activations go to the next stage, and what stages keep of other micro-batches to the
           one before (`parallel.pipeline`), forward, and their gradients the other way. Where micro-batches go round
           several times, they go ahead as often and back once; and once an update each part of the layers that
           another stage keeps goes to the stage that runs it, and its gradient back, float32 (`parallel.circular`).
  expert   with fsdp, for parameters of other layers; and every micro-batch and layer of experts: each token to its
           experts and back, forward and backward, by the cheaper of an all-to-all and of sending all tokens to all.
  data     gradients of what a device keeps, summed once, float32; also over fsdp, context and stage for parameters that
           they do not split (norms).

A balance loss of experts over several micro-batches has all choices counted first (`training.gradients`), which is one
more forward pass up to the last router.

Rings as in `collectives`.
"""

import math
from typing import Any

import jax

from jaxformer.config import Config
from jaxformer.functional.sublayers import stack_costs
from jaxformer.parallel.constraints import ACTIVATION_RULES
from jaxformer.parallel.mesh import partition
from jaxformer.parallel.pipeline import STAGE
from jaxformer.specs import ParamSpec, is_spec

GRADIENT_BYTES = 4


def communication_bound(config: Config, specs: Any, mesh: Any) -> dict[str, float]:
    """Bytes one device sends in one update at the least, by mesh axes ("fsdp", "tensor", "data+fsdp", ...).

    Args:
      config: model and train are read.
      specs: of the model.
      mesh: its axes and their sizes.
    """
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    out: dict[str, float] = {}

    def add(axes: tuple[str, ...], amount: float) -> None:
        if amount > 0:
            out["+".join(axes)] = out.get("+".join(axes), 0.0) + amount

    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        _parameter(add, jax.tree_util.keystr(path, simple=True, separator="."), spec, config, mesh, sizes)
    if "tensor" in sizes:
        add(("tensor",), _tensor(config, sizes))
    if "expert" in sizes and config.model.feed_forward.has_experts:
        add(("expert",), _experts(config, sizes["expert"]) * tokens_per_device(config, sizes))
    if "context" in sizes:
        add(("context",), _context(config, sizes))
    if STAGE in sizes:
        repeats, stages = config.execution.pipeline_repeats, sizes[STAGE]
        ways = (repeats + 1) * (2 + int(_counts_first(config)))
        numbers = ways * tokens_per_device(config, sizes) * config.model.width
        add((STAGE,), config.execution.gradient_accumulation_steps * numbers * _compute_bytes(config))
        if repeats > 1:
            away = sum(c // repeats != c % stages for c in range(stages * repeats)) / (stages * repeats)
            add((STAGE,), away * _layers_of_a_stage(specs, mesh))
    return out


def _layers_of_a_stage(specs: Any, mesh: Any) -> float:
    """Bytes of a device's parameters of its stage, and of their gradients."""
    total = 0.0
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        if spec.num_stacked:
            axes = partition(spec.shape, spec.axes, mesh, jax.tree_util.keystr(path, simple=True, separator="."))
            used = [a for e in axes if e for a in (e if isinstance(e, tuple) else (e,))]
            numbers = math.prod(spec.shape) / math.prod(mesh.shape[a] for a in used)
            total += numbers * GRADIENT_BYTES * (1 + int(spec.trained))
    return total


def tokens_per_device(config: Config, sizes: dict[str, int]) -> float:
    """Tokens of one micro-batch on one device; of a pipeline, on one of the devices of a stage."""
    rows = config.train.global_batch_size / config.execution.gradient_accumulation_steps
    splits = math.prod(sizes.get(a, 1) for a in ACTIVATION_RULES["rows"] if a != STAGE)
    return rows * config.model.context_length / splits


def _counts_first(config: Config) -> bool:
    """Whether there is one more forward pass, to count what the router chooses in all micro-batches."""
    kind = config.model.feed_forward
    return kind.has_experts and bool(kind.balance_weight) and config.execution.gradient_accumulation_steps > 1


def _compute_bytes(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def _parameter(add: Any, name: str, spec: ParamSpec, config: Config, mesh: Any, sizes: dict[str, int]) -> None:
    entries = [e if isinstance(e, tuple) else (e,) for e in partition(spec.shape, spec.axes, mesh, name)]
    used = {a for entry in entries for a in entry if a}
    gathered = next((e for axis, e in zip(spec.axes, entries, strict=False) if axis == "embed" and e != (None,)), ())
    numbers = math.prod(spec.shape) / math.prod(sizes[a] for a in used if a not in gathered)
    parts, micro = math.prod(sizes[a] for a in gathered), config.execution.gradient_accumulation_steps
    tokens = tokens_per_device(config, sizes)
    if STAGE in sizes and not spec.num_stacked:  # outside the stages, which share out all rows at once
        micro, tokens = 1, tokens * micro / sizes[STAGE]
    share = (parts - 1) / parts
    whole, again = share * numbers * _compute_bytes(config), float(_counts_first(config))
    if "experts" in spec.axes:
        again *= 1 - 1 / spec.shape[0]  # not those of the last layer
    summed = int(spec.trained) * share * numbers * GRADIENT_BYTES
    if spec.num_stacked:
        add(gathered, micro * ((2 + again) * whole + summed))
    elif spec.role == "input" and not ("vocab" in spec.axes and config.model.tie_embeddings):
        rows = share * tokens * config.model.width * _compute_bytes(config)
        add(gathered, micro * ((1 + again) * min(whole, rows) + min(summed, rows)))
    else:
        add(gathered, micro * (whole + summed))
    rest = tuple(a for a in sizes if a in ACTIVATION_RULES["rows"] and a not in used)
    others = math.prod(sizes[a] for a in rest)
    add(rest, int(spec.trained) * 2 * (others - 1) / others * numbers / parts * GRADIENT_BYTES)


def _tensor(config: Config, sizes: dict[str, int]) -> float:
    model = config.model
    share = (sizes["tensor"] - 1) / sizes["tensor"]
    tokens = tokens_per_device(config, sizes)
    sums = 0.0
    for stack, each, costs in stack_costs(model, model.context_length, config.execution):
        sublayers = 1 if model.block.startswith("parallel") else len(costs)
        recomputed = (sublayers - 1) * int(config.execution.remat in ("attention", "full"))
        counted = (stack.depth * sublayers - 1) * int(_counts_first(config))
        sums += each * (stack.depth * (2 * sublayers + recomputed) + counted + 2)
    activations = sums * tokens * model.width * _compute_bytes(config)
    micro_batches = config.execution.gradient_accumulation_steps / sizes.get(STAGE, 1)  # through all layers
    return micro_batches * 2 * share * (activations + 3 * tokens * 4)


def _experts(config: Config, devices: int) -> float:
    """Bytes for each token of a device: to its experts and back, twice, and to them once more where that is not kept;
    or all tokens to all devices, where that is less."""
    model, kind, execution = config.model, config.model.feed_forward, config.execution
    ways = 4 + int(execution.remat in ("attention", "full"))
    layers = sum(stack.depth * share for stack, share, _ in stack_costs(model, model.context_length, execution))
    rounds = ways * layers + 2 * max(layers - 1, 0) * int(_counts_first(config))
    slots = kind.slots(model.context_length)
    chosen = math.inf if slots is None else slots / model.context_length
    times = min((chosen if kind.expert_choice else min(kind.top_k, chosen)) * (devices - 1) / devices, devices - 1)
    return execution.gradient_accumulation_steps * rounds * times * model.width * _compute_bytes(config)


def _context(config: Config, sizes: dict[str, int]) -> float:
    model, tensor = config.model, sizes.get("tensor", 1)
    numbers = 0.0  # once around
    for stack, share, costs in stack_costs(model, model.context_length, config.execution):
        rings = [cost.ring for cost in costs.values()]
        each = sum(parts * each / (tensor if parts % tensor == 0 else 1) for parts, each in rings)
        numbers += stack.depth * share * each
    rounds = 1 + int(config.execution.remat == "full") + 2 + int(_counts_first(config))
    tokens = rounds * (sizes["context"] - 1) * tokens_per_device(config, sizes)
    return config.execution.gradient_accumulation_steps * tokens * numbers * _compute_bytes(config)

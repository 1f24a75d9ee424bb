"""The device mesh, and the shardings of parameters and batches that follow from it and the rule tables.

>>> mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
>>> dict(mesh.shape)
{'data': 1, 'fsdp': 1, 'context': 1, 'tensor': 1}
>>> from jaxformer.specs import zeros
>>> param_shardings({"w": ParamSpec((4, 8), ("embed", "mlp"), zeros, "hidden")}, mesh)["w"].spec == P()
True
"""

import difflib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.config import Config, MeshConfig, ModelConfig, period_of
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError
from jaxformer.parallel.constraints import ACTIVATION_RULES, RULES, entries
from jaxformer.parallel.pipeline import STAGE
from jaxformer.specs import ParamSpec, is_spec

# Slowest links first: neighbours along the last axis are neighbours in the machine.
AXES = ("data", "fsdp", "context", "tensor")
ORDER = (STAGE, "data", "fsdp", "context", "expert", "tensor")  # those not in AXES only where they have several devices

# Arrays of up to this many numbers stay whole if a dimension does not divide; for larger ones that is an error.
LARGE = 2**20
# Fewer key/value heads than devices are usual (multi-query); then every device keeps all of them, whatever their size.
MAY_REPLICATE = frozenset({"kv_heads"})


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh with the axes of `AXES`, and those of `ORDER` that have several devices, over `devices` (None: all).

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    names = tuple(name for name in ORDER if name in AXES or getattr(mesh, name) != 1)
    sizes = [getattr(mesh, name) for name in names]
    known = math.prod(n for n in sizes if n is not None)
    shape = tuple(len(devices) // known if n is None else n for n in sizes)
    if math.prod(shape) != len(devices):
        wanted = " x ".join(f"{name} {'none' if n is None else n}" for name, n in zip(names, sizes, strict=True))
        accepted = f"a divisor of {len(devices)}" if None in sizes else f"a product of {len(devices)}"
        raise ConfigError(
            f"config.mesh: {wanted} makes {known}, but the number of devices is {len(devices)}; accepted: {accepted}"
        )
    there = [(name, size) for name, size in zip(names, shape, strict=True) if name in AXES or size > 1]
    names, shape = tuple(name for name, _ in there), tuple(size for _, size in there)
    kinds = (AxisType.Auto,) * len(names)  # the default, Explicit, raises on an einsum over a split dimension
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        between = across_slices(shape, slices, names)
        within = [size // outer for size, outer in zip(shape, between, strict=True)]
        return Mesh(mesh_utils.create_hybrid_device_mesh(within, between, devices), names, axis_types=kinds)
    try:
        # The shape goes by position because its keyword was renamed in jax 0.11.
        return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    except NotImplementedError:  # no axes of the torus multiply to an axis of the mesh: 8 of 4 x 4 x 4
        split = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(split, names, axis_types=kinds)


def across_slices(shape: Sequence[int], slices: int, names: Sequence[str] = AXES) -> tuple[int, ...]:
    """How many slices (joined by slow links) lie along each axis of a mesh: the first axes take as many as they can.

    Raises:
      ConfigError: the slow links would lie inside a context or tensor axis, which communicate in every layer.

    >>> across_slices((4, 8, 1, 2), 8)
    (4, 2, 1, 1)
    """
    out: list[int] = []
    left = slices
    for size in shape:
        out.append(math.gcd(size, left) if len(out) < names.index("context") else 1)
        left //= out[-1]
    if left > 1:
        outer = " x ".join(f"{name} {size}" for name, size in zip(names[: names.index("context")], shape, strict=False))
        raise ConfigError(
            f"config.mesh: {outer} cannot be laid over {slices} slices; accepted: a product that {slices} divides"
        )
    return tuple(out)


def partition(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh, name: str = "array") -> P:
    """The PartitionSpec of one array by the rule table, see `constraints.entries`; mesh axes of size 1 are left out.

    Raises:
      ConfigError: the table lacks a name in `axes`, or the array is large and would stay whole along a mesh axis.
    """
    wanted = [_rule(axis, name) for axis in axes]
    found = entries(shape, axes, RULES, {axis: size for axis, size in mesh.shape.items() if size > 1})
    used = {mesh_axis for entry in found for mesh_axis in entry or ()}
    for size, axis, rule in zip(shape, axes, wanted, strict=True):
        for mesh_axis in rule:
            whole = mesh.shape.get(mesh_axis, 1) > 1 and mesh_axis not in used and axis not in MAY_REPLICATE
            if whole and math.prod(shape) > LARGE:
                raise ConfigError(
                    f"config.mesh.{mesh_axis}: {mesh.shape[mesh_axis]} does not divide {axis} {size} of {name}, so all "
                    f"{math.prod(shape)} numbers of it would be on every device; accepted: a divisor of {size}"
                )
    while found and found[-1] is None:
        found.pop()
    return P(*(entry[0] if entry and len(entry) == 1 else entry for entry in found))


def param_shardings(specs: Any, mesh: Mesh) -> Any:
    """The tree of NamedSharding of the parameters. Errors as in `partition`."""

    def sharding(path, spec: ParamSpec) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return NamedSharding(mesh, partition(spec.shape, spec.axes, mesh, name))

    return jax.tree_util.tree_map_with_path(sharding, specs, is_leaf=is_spec)


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Rows over all data-parallel devices, after `leading` dimensions that are not sharded.

    Rows are whole on all devices of the `context` axis, because integers are small; the models shard them.
    """
    rows = tuple(axis for axis in ACTIVATION_RULES["batch_rows"] if axis in mesh.shape)
    return NamedSharding(mesh, P(*[None] * leading, rows))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())


def check_context(model: ModelConfig, mesh: Mesh) -> None:
    """Raises ConfigError: rows, or sources, do not divide into two pieces per device of the context axis, or the model
    needs whole rows."""
    parts, lengths = mesh.shape["context"], {"model.context_length": model.context_length}
    feed_forward = "dispatch" if model.feed_forward.has_experts else "kind"
    if model.encoder is not None:
        lengths["model.encoder.source_length"] = model.encoder.source_length
    for what, part in (
        (f"model.attention.kind={model.attention.kind}", model.attention),
        (f"model.positions.kind={model.positions.kind}", model.positions),
        (f"model.feed_forward.{feed_forward}={getattr(model.feed_forward, feed_forward)}", model.feed_forward),
        (f"model.family={model.family}", FAMILIES[model.family]),
    ):
        if parts > 1 and part.whole_rows:
            raise ConfigError(f"config.mesh.context: {parts}; {what} needs whole rows; accepted: 1")
    for name, length in lengths.items():
        if parts > 1 and length % (2 * parts):
            raise ConfigError(
                f"config.mesh.context: {parts} cuts rows of {name} {length} into {2 * parts} unequal pieces; "
                f"accepted: half of a divisor of {length}"
            )


def check_stages(config: Config, mesh: Mesh) -> None:
    """Raises ConfigError: layers or micro-batches do not divide over the stages, or the model cannot be split."""
    repeats = config.execution.pipeline_repeats
    if STAGE not in mesh.shape and repeats > 1:
        raise ConfigError(
            f"config.execution.pipeline_repeats: {repeats}; mesh.stage is 1, so there are no stages to go round; "
            "accepted: 1, or mesh.stage of 2 or more"
        )
    why = cannot_split(config, mesh.shape[STAGE], mesh.shape["context"]) if STAGE in mesh.shape else None
    if why is not None:
        raise ConfigError(why)


def cannot_split(config: Config, stages: int, context: int = 1) -> str | None:
    """Why a run cannot have `stages` stages, 2 or more, beside a context axis of `context` devices; None: it can."""
    model, where = config.model, f"config.mesh.stage: {stages}"
    able = [name for name, traits in FAMILIES.items() if traits is not None and traits.stages]
    cannot = {
        f"model.family={model.family} is not one stack of layers over its tokens (those are {', '.join(able)})": (
            model.family not in able
        ),
        "model.block=reversible computes its backward pass itself, from the last layer to the first": (
            model.block == "reversible"
        ),
        "model.bert.mask_decoder=enhanced runs its last layer twice, outside the stages": model.enhanced_mask_decoder,
        "a head for a task draws its dropout over the whole batch": model.head is not None,
        f"tune.lora_rank={config.tune.lora_rank} adapts the weights of layers, which is untried in stages": (
            config.tune.lora_rank > 0
        ),
        f"tune.trained_layers={config.tune.trained_layers} leaves stages in which nothing is learned": (
            config.tune.trained_layers is not None
        ),
        "train.noise_scale=True measures between micro-batches, which stages share": config.train.noise_scale,
        "distill.teacher has layers of its own": config.distill.teacher is not None,
        f"mesh.context={context} sends keys and values round in every layer, which stages cannot": context > 1,
    }
    for why, holds in cannot.items():
        if holds:
            return f"{where}; {why}; accepted: 1"
    period = model.num_layers // model.num_blocks * len(period_of(model))
    micro = config.execution.gradient_accumulation_steps
    if model.num_layers % (stages * period):
        alike = "" if period == 1 else f" in groups of {period} that are alike"
        divisors = f"a divisor of {model.num_layers // period}"
        return f"{where} does not divide model.num_layers {model.num_layers}{alike}; accepted: {divisors}"
    repeats, each = config.execution.pipeline_repeats, model.num_layers // (stages * period)
    if each % repeats:
        share = f"{each}" if period == 1 else f"{each} groups of {period}"
        return (
            f"config.execution.pipeline_repeats: {repeats} does not divide a stage's share of model.num_layers "
            f"{model.num_layers}, which is {share}; accepted: a divisor of {each}"
        )
    if repeats > 1 and config.execution.remat == "none":
        return (
            f"config.execution.remat: none would keep the weights of a stage's part once for every tick; accepted with "
            f"execution.pipeline_repeats={repeats}: dots, attention or full"
        )
    if micro % stages:
        return (
            f"config.execution.gradient_accumulation_steps: {micro}; each of mesh.stage {stages} stages keeps as many "
            f"micro-batches as the others; accepted: multiples of {stages}"
        )
    return None


def check_without_stages(mesh: Mesh, what: str) -> None:
    """Raises ConfigError: the mesh has stages, which `what` cannot use."""
    if STAGE in mesh.shape:
        raise ConfigError(f"config.mesh.stage: {mesh.shape[STAGE]}; {what} has no micro-batches for them; accepted: 1")


def check_experts(model: ModelConfig, mesh: Mesh) -> None:
    """Raises ConfigError: the experts do not divide over the expert axis, or there are none."""
    parts, kind = mesh.shape.get("expert", 1), model.feed_forward
    count = kind.count if kind.has_experts else 1
    if count % parts:
        why = f"does not divide model.feed_forward.count {count}" if kind.has_experts else "has no experts to split"
        accepted = f"a divisor of {count}" if kind.has_experts else "1, or model.feed_forward.kind=experts"
        raise ConfigError(f"config.mesh.expert: {parts} {why}; accepted: {accepted}")


def check_batch(rows: int, micro_batches: int, mesh: Mesh) -> None:
    """Raises ConfigError if the rows of a micro-batch do not divide over the data-parallel devices."""
    axes = [axis for axis in ACTIVATION_RULES["batch_rows"] if axis in mesh.shape]
    if STAGE in axes and micro_batches % mesh.shape[STAGE] == 0:  # then a micro-batch is on one stage
        axes.remove(STAGE)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if rows % (micro_batches * devices):
        raise ConfigError(
            f"config.train.global_batch_size: {rows} in micro-batches of {rows / micro_batches:g} rows does not divide "
            f"over {devices} devices ({' x '.join(f'mesh.{a} {mesh.shape[a]}' for a in axes)}); "
            f"accepted: multiples of {micro_batches * devices}"
        )


def batch_shards(mesh: Mesh) -> int:
    """The number of shards of the rows of a batch."""
    return math.prod(mesh.shape.get(a, 1) for a in ACTIVATION_RULES["batch_rows"])


def host_rows(rows: int, mesh: Mesh) -> np.ndarray:
    """Which of the `rows` global rows of a batch this process has to provide, ascending; on one host, all of them."""
    local = batch_sharding(mesh).addressable_devices_indices_map((rows,))
    return np.unique(np.concatenate([np.arange(rows)[index] for index in local.values() if index is not None]))


def _rule(axis: str | None, name: str) -> tuple[str, ...]:
    if axis is None:
        return ()
    if axis not in RULES:
        near = difflib.get_close_matches(axis, RULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(RULES)}"
        raise ConfigError(f"{name}: logical axis {axis!r} has no rule in constraints.RULES; {hint}")
    return RULES[axis] or ()

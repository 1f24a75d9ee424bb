"""Tries the sensible meshes and remat policies for a config on a topology, and ranks them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import jax

from jaxformer.config import Config
from jaxformer.errors import ConfigError
from jaxformer.functional.block import block_specs
from jaxformer.parallel.constraints import ACTIVATION_RULES, RULES
from jaxformer.parallel.mesh import cannot_split
from jaxformer.parallel.pipeline import STAGE
from jaxformer.plan.measures import Plan, make_plan
from jaxformer.plan.summary import milliseconds, size, verdict
from jaxformer.plan.topology import Topology
from jaxformer.specs import is_spec

REMAT: tuple[Literal["none", "dots", "attention", "full"], ...] = ("none", "dots", "attention", "full")


@dataclass(frozen=True)
class Trial:
    """One candidate and its plan."""

    name: str
    plan: Plan


def candidates(config: Config, topology: Topology) -> list[Config]:
    """The config with meshes of stage x data x fsdp x expert x tensor, most promising first; the remat policy is chosen
    later.

    tensor: up to a node's devices (16 on a TPU), and dividing the heads; fsdp: all other devices, those of one node, or
    1; data: the rest; stage: none, 2, 4 and 8 in turn, where they divide layers and micro-batches; expert, where there
    are experts: the most devices of a node that divide them (of all nodes, where an all-to-all can be sent), half as
    many, and so on, in turn. The context axis keeps its size (1 if the config gives it the rest).

    >>> from jaxformer.config import from_mapping
    >>> from jaxformer.plan.topology import parse
    >>> chip, shape = parse("h100:2x8")
    >>> config = from_mapping({"train": {"global_batch_size": 16}})
    >>> found = candidates(config, Topology("h100:2x8", chip, shape, (0,) * 16))
    >>> [(c.mesh.data, c.mesh.fsdp, c.mesh.tensor) for c in found][:3]
    [(1, 16, 1), (2, 8, 1), (16, 1, 1)]
    """
    pairs = itertools.product(enumerate((1, 2, 4, 8)), enumerate(_experts(config, topology)))
    turns = sorted((i + j, i, stages, experts) for (i, stages), (j, experts) in pairs)
    tried = [_in_stages(config, topology, stages, experts) for *_, stages, experts in turns]
    return [each for row in itertools.zip_longest(*tried) for each in row if each is not None]


def _experts(config: Config, topology: Topology) -> list[int]:
    """Sizes of the expert axis, largest first; [1] without experts."""
    kind = config.model.feed_forward
    if not kind.has_experts:
        return [1]
    exchange, slots = config.execution.expert_exchange, kind.slots(config.model.context_length)
    gathers = exchange == "gather" or (slots is None and topology.chip.platform == "cpu")
    near = topology.per_node if gathers else len(topology.devices)
    return [2**i for i in reversed(range(near.bit_length())) if kind.count % 2**i == 0 and 2**i <= near]


def _in_stages(config: Config, topology: Topology, stages: int, experts: int) -> list[Config]:
    """Those with this number of stages, and of parts of the experts."""
    context = config.mesh.context or 1
    if len(topology.devices) % (context * stages * experts):
        return []
    devices = len(topology.devices) // (context * stages * experts)
    most = min(topology.per_node, 16)
    leaves = jax.tree.leaves(block_specs(config.model), is_leaf=is_spec)
    over = {axis for axis, rule in RULES.items() if "tensor" in (rule or ())}
    split = {size for spec in leaves for size, axis in zip(spec.shape, spec.axes, strict=True) if axis in over}
    steps = config.execution.gradient_accumulation_steps
    repeats = config.execution.pipeline_repeats if stages > 1 else 1
    execution = replace(config.execution, pipeline_repeats=repeats)
    found = []
    for tensor in (1, 2, 4, 8, 16):
        if tensor > most or devices % tensor or any(size % tensor for size in split):
            continue
        rest = devices // tensor
        inside = max(1, topology.per_node // tensor) if topology.chip.platform == "cuda" else max(1, int(rest**0.5))
        for fsdp in dict.fromkeys((rest, inside, 1)):
            if rest % fsdp == 0 and config.train.global_batch_size % (rest * experts * steps) == 0:
                mesh = replace(config.mesh, data=rest // fsdp, fsdp=fsdp, tensor=tensor, context=context)
                mesh = replace(mesh, stage=stages, expert=experts)
                found.append(replace(config, mesh=mesh, execution=execution))
    return found if not found or stages == 1 or cannot_split(config, stages, context) is None else []


def search(
    config: Config, topology: Topology, *, tries: int = 12, log: Callable[[str], None] = lambda line: None
) -> list[Trial]:
    """Plans of at most `tries` candidates, best first: those that fit by time of an update without overlap, then the
    others by memory. If a mesh does not fit with remat "full", other policies are not tried on it.

    Raises:
      ConfigError: no mesh divides the batch.
    """
    meshes = candidates(config, topology)
    if not meshes:
        raise ConfigError(
            f"config.train.global_batch_size: {config.train.global_batch_size} rows divide over no mesh of "
            f"{topology.name} ({' and '.join(a for a in ACTIVATION_RULES['batch_rows'] if a != STAGE)} split them); "
            f"accepted: multiples of {len(topology.devices)}"
        )
    trials: list[Trial] = []
    for mesh in meshes:
        for remat in reversed(REMAT):
            if len(trials) >= tries:
                break
            one = replace(mesh, execution=replace(mesh.execution, remat=remat))
            sizes = {name: getattr(mesh.mesh, name) for name in ("stage", "data", "fsdp", "expert", "tensor")}
            shown = [f"{name} {n}" for name, n in sizes.items() if n > 1 or name not in ("stage", "expert")]
            name = f"{' '.join(shown)} remat {remat}"
            try:
                plan = make_plan(one, topology)
            except ConfigError as error:
                log(f"{name}: {error}")
                break
            trials.append(Trial(name, plan))
            log(_line(trials[-1]))
            if plan["memory"]["fits"] is False:
                break
    return sorted(trials, key=_rank)


def _rank(trial: Trial) -> tuple[bool, float]:
    plan = trial.plan
    fits = plan["memory"]["fits"] is not False
    times = plan.get("roofline")
    return not fits, times["no_overlap"] if fits and times else plan["memory"]["total"]


def _line(trial: Trial) -> str:
    plan, times = trial.plan, trial.plan.get("roofline")
    speed = "" if not times else (
        f"{milliseconds(times['no_overlap']):>12}  {times['utilisation_no_overlap']:6.1%} to "
        f"{times['utilisation']:6.1%}  {times['bound']}"
    )  # fmt: skip
    return f"{trial.name:54} {size(plan['memory']['total']):>10}  fits: {verdict(plan):8}{speed}"


def lines(trials: list[Trial]) -> list[str]:
    """The ranking as a table."""
    head = f"{'best first':54} {'memory':>10}  {'':14}{'an update':>12}  MFU, without and with overlap; bound by"
    return [head, *map(_line, trials)]

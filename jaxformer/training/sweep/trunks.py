"""Groups the members of a sweep: those that share a trunk, and those that share a compiled program.

>>> from jaxformer.config import from_mapping
>>> def member(steps, rate):
...     config = from_mapping({"train": {"steps": steps}, "optimizer": {"schedule": "wsd", "learning_rate": rate}})
...     return Member(f"{rate:g}, {steps}", config, {"flops": 1e9 * steps})
>>> [group] = shapes([member(400, 1e-3), member(200, 1e-3), member(200, 2e-3)])
>>> [([m.name for m in trunk.members], trunk.branches, trunk.steps) for trunk in group]
[(['0.001, 200', '0.001, 400'], (160, 320), 440), (['0.002, 200'], (160,), 200)]
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from jaxformer.config import Config, OptimizerConfig, to_dict
from jaxformer.training.optim import TracedHyperparameters

T = TypeVar("T")


class Member(NamedTuple):
    """One run of a sweep.

    Attributes:
      name: unique; names its file.
      config: complete, as for the run alone; workdir and mesh are not read.
      fields: added to its final record; "flops" (of the whole run), "params" and "params_non_embedding" are required.
    """

    name: str
    config: Config
    fields: Mapping[str, Any]


class Trunk(NamedTuple):
    """Members that share everything except their decay, shortest first.

    Attributes:
      name: a hash of the config they share.
      members: at least one.
      branches: update at which each leaves the trunk.
    """

    name: str
    members: tuple[Member, ...]
    branches: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Updates of the trunk and all decays."""
        return self.branches[-1] + sum(
            m.config.train.steps - b for m, b in zip(self.members, self.branches, strict=True)
        )


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """key(item) -> the items that have it, both in their order."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def branches(member: Member) -> bool:
    """True if a member can branch off a trunk."""
    return member.config.optimizer.schedule == "wsd"


def trunks(members: Iterable[Member]) -> list[Trunk]:
    """Members grouped into trunks, in the order of their first members."""
    out = []
    for name, mine in grouped(members, _trunk_name).items():
        mine.sort(key=lambda m: m.config.train.steps)
        out.append(Trunk(name, tuple(mine), tuple(map(_branch_step, mine))))
    return out


def _branch_step(member: Member) -> int:
    """The update at which a member's decay begins."""
    steps, optimizer = member.config.train.steps, member.config.optimizer
    return steps - (TracedHyperparameters.of(optimizer, steps).decay_steps if branches(member) else 0)


def shapes(members: Iterable[Member]) -> list[list[Trunk]]:
    """Trunks grouped by shape, one compiled program each."""
    found = grouped(trunks(members), lambda t: json.dumps(to_dict(shape_of(t.members[0].config)), sort_keys=True))
    return list(found.values())


def shape_of(config: Config) -> Config:
    """`config` without what may differ in one compiled program: members with equal shapes share a program."""
    usual = OptimizerConfig()
    names = ("learning_rate", "final_fraction", "weight_decay", "warmup_steps", "decay_steps")
    optimizer = replace(config.optimizer, **{name: getattr(usual, name) for name in names})
    train = replace(config.train, steps=usual.warmup_steps)
    return replace(config, workdir="none", seed=0, optimizer=optimizer, train=train)


def gflop_per_step(member: Member) -> float:
    """GFLOP of one update."""
    return member.fields["flops"] / member.config.train.steps / 1e9


def _trunk_name(member: Member) -> str:
    """A hash, equal for members that differ only in their decay."""
    config = replace(member.config, compilation_cache=True)
    if branches(member):
        optimizer = replace(config.optimizer, decay_steps=None)
        config = replace(config, optimizer=optimizer, train=replace(config.train, steps=optimizer.warmup_steps + 1))
    fields = to_dict(config)
    del fields["tracking"], fields["train"]["profile_steps"]
    # `tensorboard` was a field; without it, studies that were begun with it would train their trunks again.
    text = json.dumps({**fields, "workdir": "", "execution": None, "tensorboard": False}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

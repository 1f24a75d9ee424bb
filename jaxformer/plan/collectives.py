"""The collectives of a compiled program: each one's mesh axes and the bytes a device sends for it.

Bytes are what one device sends in one update with a ring algorithm, which is optimal if all links are equal: for an
array of N bytes in total over n devices, (n - 1) / n N for all-gather, reduce-scatter and all-to-all, twice that for
all-reduce, N for a permutation. (Patarasu and Yuan 2009.)
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxformer.plan.hlo import Computation, Instruction, Program

# mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'b'}
_NAMED = re.compile(
    r"^mesh\[(?P<axes>[^\]]*)\](?:, *device_ids=\(\[(?P<sizes>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))?"
    r" *\{(?P<along>[^}]*)\}"
)
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of KINDS.
      axes: names of the mesh axes it spans, joined by "+"; "?" if its groups could not be read.
      group: devices per group.
      bytes: sent by one device each time.
      times: how often in one update.
      shape: of a device's operand, "bf16[4,128]".
      source: its place in the traced program.
    """

    kind: str
    axes: str
    group: int
    bytes: float
    times: float
    shape: str
    source: str

    @property
    def total(self) -> float:
        """Bytes one device sends in one update."""
        return self.bytes * self.times


def find(program: Program, mesh: dict[str, int]) -> list[Collective]:
    """All collectives of a program whose partitions are numbered along `mesh` (axis -> size), most bytes first.

    A pair of start and done counts once. So does a gather that the TPU compiler splits to overlap it with other work,
    which is printed once per piece with the same channel number.
    """
    found, seen = [], set()
    for computation, instruction, times, _ in program.runs():
        kind = instruction.opcode.removesuffix("-start").removeprefix("ragged-")
        if kind not in KINDS:
            continue
        channel = instruction.attribute("channel_id")
        if "chain_id=" in instruction.text and channel is not None:
            if channel in seen:
                continue
            seen.add(channel)
        # TPUs print a reduce-scatter as a computation in which a slice of an all-reduce is taken.
        if kind == "all-reduce" and "all-reduce-scatter" in computation.name:
            kind = "reduce-scatter"
        axes, group = span(instruction, mesh)
        ragged = instruction.opcode.startswith("ragged")
        each = ragged_bytes(computation, instruction) if ragged else computation.sizes(instruction)
        share = (group - 1) / group if group else 1.0
        sent = {
            "all-gather": each * (group - 1),
            "all-reduce": 2 * share * each,
            "reduce-scatter": share * each,
            "all-to-all": share * each,
            "collective-permute": each,
        }[kind]
        if group > 1 and sent and times:
            found.append(
                Collective(kind, axes, group, sent, times, _shape(computation, instruction), _source(instruction))
            )
    return sorted(found, key=lambda c: -c.total)


def ragged_bytes(computation: Computation, instruction: Instruction) -> float:
    """Bytes that a device sends in a ragged all-to-all, to itself too, if all experts are equally busy: the smaller of
    the array that it sends from and the one that others send to has as many rows as a device's tokens have choices."""
    return min(computation.instructions[name].bytes for name in instruction.operands[:2])


def span(instruction: Instruction, mesh: dict[str, int]) -> tuple[str, int]:
    """The mesh axes a collective spans, and the devices in one of its groups.

    >>> from jaxformer.plan.hlo import read
    >>> text = "ENTRY %m (p: f32[4]) -> f32[4] {\\n  %a = f32[4] all-reduce(%p), replica_groups=[2,4]<=[4,2]T(1,0)\\n}"
    >>> span(read(text).computations["m"].instructions["a"], {"data": 4, "tensor": 2})
    ('data', 4)
    """
    sizes = {name: size for name, size in mesh.items() if size > 1}
    if instruction.opcode.startswith("collective-permute"):
        pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attribute("source_target_pairs") or "")
        moved = [(int(a), int(b)) for a, b in pairs if a != b]
        return _axes(moved, sizes), 2 if moved else 1
    text = instruction.text.partition("replica_groups=")[2]
    if not text.startswith("mesh"):
        text = instruction.attribute("replica_groups") or ""
    groups = replica_groups(text, int(np.prod([1, *sizes.values()])))
    if groups is None:
        return "?", 2
    return _axes(groups, sizes), len(groups[0])


def _axes(groups: Iterable[Iterable[int]], sizes: dict[str, int]) -> str:
    """Names of the axes along which members of a group differ."""
    if not sizes:
        return "?"
    shape = tuple(sizes.values())
    differing = np.zeros(len(shape), bool)
    for group in groups:
        members = np.asarray(list(group))
        if members.max(initial=0) >= np.prod(shape):
            return "?"
        coordinates = np.stack(np.unravel_index(members, shape))
        differing |= (coordinates != coordinates[:, :1]).any(axis=1)
    return "+".join(name for name, differs in zip(sizes, differing, strict=True) if differs) or "?"


def replica_groups(text: str, devices: int) -> list[list[int]] | None:
    """The groups of a `replica_groups=` in any of the three formats XLA prints; None for an unknown format.

    >>> replica_groups("{{0,2},{1,3}}", 4), replica_groups("[2,2]<=[2,2]T(1,0)", 4)
    ([[0, 2], [1, 3]], [[0, 2], [1, 3]])
    >>> replica_groups("mesh['a'=2,'b'=2] {'a'}", 4), replica_groups("{}", 2)
    ([[0, 2], [1, 3]], [[0, 1]])
    >>> replica_groups("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a'}", 6)
    [[0, 1], [2, 3], [4, 5]]
    """
    listed = re.findall(r"\{([\d,]+)\}", text)
    if listed and "mesh" not in text:
        return [[int(n) for n in group.split(",")] for group in listed]
    iota = re.search(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return _iota(*iota.groups()).tolist()
    named = _NAMED.search(text)
    if named:
        axes = re.findall(r"'([^']+)'=(\d+)", named["axes"])
        shape = [int(size) for _, size in axes]
        count = str(math.prod(shape))
        ids = _iota(count, named["sizes"] or count, named["order"])
        wanted = re.findall(r"'([^']+)'", named["along"])
        if ":" in named["along"] or any(w not in dict(axes) for w in wanted):
            return None
        along = [i for i, (name, _) in enumerate(axes) if name in wanted]
        rest = [i for i in range(len(axes)) if i not in along]
        size = int(np.prod([shape[i] for i in along]))
        return ids.reshape(shape).transpose(rest + along).reshape(-1, size).tolist()
    return [list(range(devices))] if text in ("", "{}") else None


def _iota(shape: str, sizes: str, order: str | None) -> np.ndarray:
    to, from_ = ([int(n) for n in text.split(",")] for text in (shape, sizes))
    numbers = np.arange(np.prod(from_)).reshape(from_)
    return (numbers.transpose([int(n) for n in order.split(",")]) if order else numbers).reshape(to)


def _shape(computation: Computation, instruction: Instruction) -> str:
    names = [computation.instructions[o] for o in instruction.operands if o in computation.instructions]
    shown = [f"{s.dtype}[{','.join(map(str, s.sizes))}]" for i in names for s in i.shapes]
    return shown[0] + (f" and {len(shown) - 1} more" if len(shown) > 1 else "") if shown else "?"


def _source(instruction: Instruction) -> str:
    """The path in the traced program, without the prefix that all paths share."""
    found = re.search(r'op_name="([^"]*)"', instruction.text)
    return found[1].removeprefix("jit(train_steps)/while/body/").removeprefix("closed_call/") if found else ""

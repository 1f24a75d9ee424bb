"""What a compiled program computes and what it reads and writes, for one device and one update.

Counted in the optimised program, a loop's body as often as it runs, so what is computed twice (rematerialised, or on
every device alike) counts twice. `cost_analysis()` would count the body of a loop over layers once.
"""

import math
import re
from collections.abc import Mapping

from jaxformer.plan.collectives import ragged_bytes
from jaxformer.plan.grouped_costs import grouped_flops, grouped_kernel, grouped_traffic
from jaxformer.plan.hlo import Computation, Instruction, Program, Shape
from jaxformer.plan.kernel_costs import kernel_flops, kernel_of

# Produce no traffic of their own: names for what is there, control flow, and the second halves of pairs.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "iota", "opt-barrier", "domain", "async-start", "async-done", "async-update",
}  # fmt: skip
NAMES_OPERANDS = {"slice-start", "dynamic-slice-start", "collective-permute-start", "all-gather-start"}
SLICES = {"dynamic-slice", "slice", "gather"}
THROUGH = {"bitcast", "reshape", "transpose", "copy", "convert"}


def flops(program: Program, shares: Mapping[str, float] | None = None) -> float:
    """Operations of all matrix products, a multiply-add being two.

    shares: of the scores that each attention kernel visits (`kernel_costs.visited_shares`), and of the rows that belong
    to an expert (`grouped_costs.grouped_shares`); None: all.
    """
    total = 0.0
    for computation, instruction, times, _ in program.runs():
        library = instruction.opcode == "custom-call" and ("gemm" in instruction.text or "matmul" in instruction.text)
        kernel, grouped = kernel_of(instruction), grouped_kernel(instruction)
        if kernel is not None:
            total += times * kernel_flops(computation, instruction, kernel, shares or {})
        elif grouped is not None:
            total += times * grouped_flops(computation, instruction, grouped, shares or {})
        elif instruction.opcode == "dot" or library:
            total += times * _product(computation, instruction)
        elif instruction.opcode == "convolution":
            total += times * _convolution(computation, instruction)
    return total


def traffic(program: Program, shares: Mapping[str, float] | None = None) -> float:
    """Bytes that instructions read from and write to the device's main memory; a fusion reads each operand once, and of
    one that it only slices just the slice. `shares`: as of `flops`."""
    total = 0.0
    for computation, instruction, times, fused in program.runs():
        if fused or instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")) or not times:
            continue
        if grouped_kernel(instruction) is not None:
            total += times * grouped_traffic(computation, instruction, shares or {})
        else:
            total += times * _moved(program, computation, instruction)
    return total


def _moved(program: Program, computation: Computation, instruction: Instruction) -> float:
    operands = [computation.instructions.get(o) for o in instruction.operands]
    results = _results(instruction)
    written = _main(results)
    if instruction.opcode == "fusion" and program.called(instruction):
        inner = program.computations[program.called(instruction)[0]]
        reads, updated = _fusion(inner)
        read = sum(min(_main(o.shapes), reads.get(i, math.inf)) if o else 0.0 for i, o in enumerate(operands))
        return read + (min(written, updated) if updated is not None else written)
    if instruction.opcode.removesuffix("-start") in SLICES:
        elsewhere = operands and operands[0] and not any(s.main_memory for s in operands[0].shapes)
        return written + (0.0 if elsewhere else sum(s.bytes for s in results))
    if instruction.opcode.startswith("ragged-all-to-all"):  # into the array of its second operand, in place
        return 2 * ragged_bytes(computation, instruction)
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1 and operands[1]:
        return 2 * _main(operands[1].shapes)
    return written + sum(_main(o.shapes) for o in operands if o)


def _results(instruction: Instruction) -> tuple[Shape, ...]:
    """The arrays that it writes; an asynchronous start lists those that it reads too."""
    if instruction.opcode == "copy-start":
        return instruction.shapes[:1]
    if instruction.opcode in NAMES_OPERANDS:
        number = len(instruction.operands)
        return instruction.shapes[number : 2 * number]
    return instruction.shapes


def _fusion(inner: Computation) -> tuple[dict[int, float], float | None]:
    """Bytes read of those parameters that are only sliced or updated in place; bytes written where the result is an
    update in place."""
    users: dict[str, list[Instruction]] = {}
    for instruction in inner.instructions.values():
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)

    def ends(name: str) -> list[tuple[Instruction, str]]:
        found = []
        for user in users.get(name, []):
            found += ends(user.name) if user.opcode in THROUGH and user.name != inner.root else [(user, name)]
        return found

    reads: dict[int, float] = {}
    for instruction in inner.instructions.values():
        if instruction.opcode != "parameter":
            continue
        uses = ends(instruction.name)
        amount = 0.0
        for user, name in uses:
            if user.opcode in SLICES and user.operands[0] == name:
                amount += user.bytes
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                break
        else:
            if uses:
                reads[int(instruction.literal or 0)] = amount
    root = inner.instructions.get(inner.root)
    while root is not None and root.opcode in THROUGH and root.operands:
        root = inner.instructions.get(root.operands[0])
    if root is not None and root.opcode == "dynamic-update-slice":
        update = inner.instructions.get(root.operands[1])
        return reads, update.bytes if update else None
    return reads, None


def _main(shapes: tuple[Shape, ...]) -> float:
    return sum(s.bytes for s in shapes if s.main_memory)


def _product(computation: Computation, instruction: Instruction) -> float:
    """A product of two arrays. Which dimensions are contracted says an attribute or, where a GPU's library computes it,
    the backend's configuration."""
    found = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)', instruction.text)
    left = computation.instructions.get(instruction.operands[0]) if instruction.operands else None
    if found is None or left is None:
        return 0.0
    contracted = [int(n) for n in re.findall(r"\d+", found[1])]
    return 2.0 * math.prod(instruction.shapes[0].sizes) * math.prod(left.shapes[0].sizes[i] for i in contracted)


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """A TPU's compiler turns products into convolutions, whose windows may reach into padding: only pairs of a real
    input and a weight count."""
    left, right = (computation.instructions.get(o) for o in instruction.operands[:2])
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if left is None or right is None or labels is None:
        return 0.0
    window = instruction.attribute("window") or ""

    def option(name: str, default: int, spatial: int) -> list[int]:
        found = re.search(rf"\b{name}=([\dx]+)", window)
        return [int(n) for n in found[1].split("x")] if found else [default] * spatial

    lhs, rhs, out = labels.groups()
    spatial = sum(c.isdigit() for c in out)
    size, stride = option("size", 1, spatial), option("stride", 1, spatial)
    base, dilate = option("lhs_dilate", 1, spatial), option("rhs_dilate", 1, spatial)
    pads = re.search(r"\bpad=([\d_\-x]+)", window)
    low = [int(p.split("_")[0]) for p in pads[1].split("x")] if pads else [0] * spatial
    pairs = 1.0
    for i in range(spatial):
        inputs = left.shapes[0].sizes[lhs.index(str(i))]
        outputs = instruction.shapes[0].sizes[out.index(str(i))]
        pairs *= sum(
            1
            for o in range(outputs)
            for w in range(size[i])
            if 0 <= (at := o * stride[i] - low[i] + w * dilate[i]) <= (inputs - 1) * base[i] and at % base[i] == 0
        )
    sizes = instruction.shapes[0].sizes
    groups = int(instruction.attribute("batch_group_count") or 1)
    return 2.0 * sizes[out.index("b")] * sizes[out.index("f")] * right.shapes[0].sizes[rhs.index("i")] * pairs / groups

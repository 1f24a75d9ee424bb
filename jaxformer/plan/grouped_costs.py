"""What the kernels for products of groups of rows compute (`kernels.grouped`), of which XLA knows nothing.

`megablox` multiplies the tiles of rows that any group has rows in, once for each of those groups. With `blocks_gpu`
every group begins a new block, so that its rows are those of all blocks that any group has. How many rows have a
group, a plan does not know: it takes every expert to be as busy as the others, so that of the rows of all devices of
the `expert` axis each device's experts have an equal share, and a ragged exchange needs one round.
"""

import math
import re
from collections.abc import Mapping

from jaxformer.functional.experts import ROOM
from jaxformer.kernels.grouped.megablox import TILE
from jaxformer.plan.hlo import Computation, Instruction, Shape

SHARE = "rows of experts"  # its name among the shares that a plan tells `costs.flops`
_CALLED = re.compile(r"jit\((t?gmm)\)+/pallas_call|(grouped_gpu_product|grouped_gpu_weights)")
_OF_WEIGHTS = ("tgmm", "grouped_gpu_weights")  # those that make a gradient of weights


def grouped_kernel(instruction: Instruction) -> str | None:
    """The kernel that an instruction calls: gmm or grouped_gpu_product ([M, K] and [E, K, N], or [E, N, K], to [M, N]),
    tgmm or grouped_gpu_weights ([M, K] and [M, N] to [E, K, N]), or None."""
    text = f"{instruction.name} {instruction.text}"
    found = _CALLED.search(text) if instruction.opcode == "custom-call" else None
    return None if found is None else found[1] or found[2]


def grouped_flops(computation: Computation, instruction: Instruction, name: str, shares: Mapping[str, float]) -> float:
    """Operations of a call, a multiply-add being two.

    Args:
      computation, instruction: the call.
      name: of the kernel.
      shares: under `SHARE`, of the rows those that have a group.
    """
    operands = [computation.instructions.get(o) for o in instruction.operands]
    rows, other = [o.shapes[0] for o in operands if o is not None and re.match(r"b?f\d", o.shapes[0].dtype)][:2]
    weights: Shape = instruction.shapes[0] if name in _OF_WEIGHTS else other
    groups, *matrix = weights.sizes
    # Megablox computes a tile in which one group ends and the next begins for both.
    twice = 0 if "gpu" in name else TILE * (groups - 1)
    return 2.0 * math.prod(matrix) * (rows.sizes[0] * shares.get(SHARE, 1.0) + twice)


def grouped_traffic(computation: Computation, instruction: Instruction, shares: Mapping[str, float]) -> float:
    """Bytes that a call reads and writes, each array once; of the rows those that have a group. `shares`: as of
    `grouped_flops`."""
    operands = [computation.instructions[o].shapes[0] for o in instruction.operands if o in computation.instructions]
    arrays = [shape for shape in operands + list(instruction.shapes) if shape.main_memory]
    share = shares.get(SHARE, 1.0)
    return sum(shape.bytes * (share if len(shape.sizes) == 2 else 1.0) for shape in arrays)


def grouped_shares(sizes: Mapping[str, int], exchange: str) -> dict[str, float]:
    """What the others ask for, on a mesh with axes of these sizes and with such an `execution.expert_exchange`.

    >>> grouped_shares({"expert": 8}, "gather"), grouped_shares({"expert": 8}, "ragged_all_to_all")
    ({'rows of experts': 0.125}, {'rows of experts': 0.5})
    """
    rounds = sizes.get("expert", 1)  # times its own share of the rows is what a device has room for
    return {SHARE: 1 / (min(rounds, ROOM) if exchange == "ragged_all_to_all" else rounds)}

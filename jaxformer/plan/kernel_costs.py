"""What attention kernels compute, which a program calls by name and XLA knows nothing of.

A kernel multiplies tiles: THE table says how many products of [t, K] and [K, s] it makes of each pair of a block of
queries and a block of keys, and the plan, which share of the pairs it visits. What it reads and writes in main memory
are its operands and results, each once: keys that several programs read come from the cache.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxformer.config import Config, ModelConfig, layers_of, stacks_of
from jaxformer.kernels.attention import flash_gpu_blocks, flash_gpu_patterns, flash_gpu_visits, splash
from jaxformer.kernels.attention.flash_gpu_blocks import padded_width
from jaxformer.masks import Mask
from jaxformer.models.attention_support import mask_of
from jaxformer.plan.hlo import Computation, Instruction
from jaxformer.plan.topology import Topology


class AttentionKernel(NamedTuple):
    """A kernel.

    Attributes:
      products: of tiles, for each pair of blocks.
      keys: the axis of the keys' tokens in its second floating-point operand.
      width: the width that it computes for heads of a width.
    """

    products: int
    keys: int
    width: Callable[[int], int] = lambda width: width


# Text that names a kernel in its instruction -> the kernel. Forward: scores, and their product with the values.
# Backward: scores again, the weights' gradient, and a product for each gradient. `cudnn`'s names are XLA's.
ATTENTION_KERNELS = {
    "splash_mha_fwd": AttentionKernel(2, -2),
    "splash_mha_dq": AttentionKernel(3, -2),
    "splash_mha_dkv": AttentionKernel(4, -2),
    "flash_gpu_forward": AttentionKernel(2, -3, padded_width),
    "flash_gpu_queries": AttentionKernel(3, -3, padded_width),
    "flash_gpu_keys": AttentionKernel(4, -3, padded_width),
    "__cudnn$fmhaSoftmaxBackward": AttentionKernel(5, -3),
    "__cudnn$fmhaSoftmax": AttentionKernel(2, -3),
}
CUDNN_BLOCK = 128


def kernel_of(instruction: Instruction) -> str | None:
    """The name of the attention kernel that an instruction calls; None: it calls none."""
    if instruction.opcode != "custom-call":
        return None
    where = f"{instruction.name} {instruction.text}"
    return next((name for name in ATTENTION_KERNELS if name in where), None)


def kernel_flops(computation: Computation, instruction: Instruction, name: str, shares: Mapping[str, float]) -> float:
    """Operations of a call of a kernel, a multiply-add being two.

    Args:
      computation, instruction: the call. The first of its floating-point operands are query [B, T, H, K] and key
        [B, S, G, K], or, with heads first, [B, H, T, K] and [B, G, S, K]; dimensions that are 1 may be missing.
      name: of the kernel.
      shares: of the pairs of blocks that each kernel visits; of others all.
    """
    kernel = ATTENTION_KERNELS[name]
    operands = [computation.instructions.get(o) for o in instruction.operands]
    query, key = [o.shapes[0] for o in operands if o is not None and re.match(r"b?f\d", o.shapes[0].dtype)][:2]
    *rest, width = query.sizes
    return (
        kernel.products * 2.0 * math.prod(rest) * kernel.width(width) * key.sizes[kernel.keys] * shares.get(name, 1.0)
    )


def visited_shares(config: Config, topology: Topology) -> dict[str, float]:
    """For each kernel the share of all pairs that it computes in one of the config's rows, by causality and window; the
    documents in a row, which no plan knows, can only make it less."""
    chip, model = topology.devices[0].device_kind, config.model
    found = [(number, _shares_of(one, chip)) for stack in stacks_of(model) for one, number in layers_of(stack)]
    if "cross" in model.layer:  # which visits all of the source
        found.append((model.num_layers, {}))
    layers = sum(number for number, _ in found)
    names = dict.fromkeys(name for _, shares in found for name in shares)
    return {name: sum(number * shares.get(name, 1.0) for number, shares in found) / layers for name in names}


def _shares_of(stack: ModelConfig, chip: str) -> dict[str, float]:
    if not stack.attention.has_implementations:
        return {}
    length = stack.context_length
    mask = mask_of(stack, Mask(window=stack.attention.window), length, stack.causal)
    shares = {}
    for kernel in flash_gpu_blocks.KERNELS:
        block = flash_gpu_blocks.block_of(kernel, chip, padded_width(stack.head_size), stack.dtype, length)
        shares[f"flash_gpu_{kernel}"] = (
            flash_gpu_patterns.visited_share(mask, length, block)
            if mask.patterns else visited_share(mask, length, block.queries, block.keys)
        )  # fmt: skip
    causal = visited_share(Mask(causal=stack.causal), length, CUDNN_BLOCK, CUDNN_BLOCK)  # windows it is told as pairs
    shares |= {name: causal for name in ATTENTION_KERNELS if "cudnn" in name}
    if length % splash.LANES == 0:
        on_tpus = splash.visited(length, stack.causal, mask.window, mask.patterns)
        shares |= {name: on_tpus for name in ATTENTION_KERNELS if "splash" in name}
    return shares


def visited_share(mask: Mask, length: int, query_block: int, key_block: int) -> float:
    """Share of the pairs of a row with itself that lie in tiles which a mask does not rule out.

    >>> visited_share(Mask(causal=True), 256, 64, 64)
    0.625
    """
    found = flash_gpu_visits.visits(mask, length, length, query_block, key_block, by_key=False)[0]
    return float((found[:, 1] - found[:, 0]).sum()) * query_block * key_block / length**2

"""`execution`: how a run computes, not what. It may change between two starts of one run.

Nothing here changes the model or the batches. Another remat policy, attention implementation or number of micro-batches
sums in another order, so results then agree to rounding and not bit for bit; `layers` and `steps_per_dispatch` too.
Except with dropout: dropout then drops other elements under another number of micro-batches, and dropout of attention
weights under another attention implementation, so results agree only as those of two seeds do.
"""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config.checks import at_least
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class Execution(
    Section,
    name="execution",
    accepts=dict.fromkeys(
        ("steps_per_dispatch", "gradient_accumulation_steps", "feed_forward_chunks", "pipeline_repeats"), at_least(1)
    ),
    most={"gradient_accumulation_steps": 2**24, "pipeline_repeats": 2**20},
):
    """How a run computes.

    Attributes:
      remat: what the backward pass computes again: none, all but the products with weights (dots), all but softmax
        attention (attention), or all (full). On CPU, XLA undoes it where layers are unrolled. Reversible blocks compute
        all again whatever stands here.
      layers: scan: one compiled body; unroll: faster, slower to compile.
      attention: the implementation; splash needs TPUs, cudnn and flash_gpu an NVIDIA GPU.
      steps_per_dispatch: updates inside one compiled call.
      gradient_accumulation_steps: micro-batches of one update.
      pipeline_repeats: parts of the layers that each stage of mesh.stage has; every micro-batch goes through the stages
        so many times, which leaves them idle so many times less (the circular, or interleaved, schedule).
      feed_forward_chunks: parts of a row that feed-forward layers are computed in, one after the other, in the
        backward pass too: less memory, a little slower. Layers of experts are computed whole.
      experts: how the products of experts are computed with dispatch=dropless, and in decoding; the others have one
        batched product. megablox needs TPUs, blocks_gpu an NVIDIA GPU.
      expert_exchange: how the devices of mesh.expert exchange tokens. gather: all get all; all_to_all: each gets
        those of its experts, which needs a dispatch that says how many those are; ragged_all_to_all: the same for any
        number of them, where tokens choose (CPUs gather in its place); auto: what sends least.
    """

    remat: Literal["none", "dots", "attention", "full"] = "none"
    layers: Literal["scan", "unroll"] = "unroll"
    attention: Literal["auto", "xla", "chunked", "splash", "cudnn", "flash_gpu"] = "auto"
    steps_per_dispatch: int = 10
    gradient_accumulation_steps: int = 1
    pipeline_repeats: int = 1
    feed_forward_chunks: int = 1
    experts: Literal["auto", "blocks", "ragged", "blocks_gpu", "megablox"] = "auto"
    expert_exchange: Literal["auto", "gather", "all_to_all", "ragged_all_to_all"] = "auto"

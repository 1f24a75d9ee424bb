"""Operations of a model's layers for each token of a row, from each sublayer's `cost`."""

from typing import NamedTuple

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.layer import Cost
from jaxformer.functional.sublayers import StackCosts, stack_costs


class LayerFlops(NamedTuple):
    """Operations of all layers per token of a row; see `flops.Flops`.

    Attributes:
      projections: products with weights in the layers that mix tokens, forward.
      attention: products of activations there, forward.
      mlp: feed-forward layers, forward.
      remat: what the backward pass recomputes.
      frozen: whatever no gradient goes through, forward; not among the others.
    """

    projections: float
    attention: float
    mlp: float
    remat: float
    frozen: float = 0.0


def layer_flops(cfg: ModelConfig, length: int, share: float, remat_policy: str) -> LayerFlops:
    """Of a model whose stacks are each applied once.

    Args:
      cfg: the model.
      length: tokens of a row.
      share: of the positions, those that are predicted.
      remat_policy: as in `execution.remat`.
    """
    stacks = [of_stack(each, remat_policy) for each in stack_costs(cfg, length, Execution())]
    return LayerFlops(*map(sum, zip(*stacks, strict=True)))


def of_stack(of: StackCosts, remat_policy: str) -> LayerFlops:
    """Of one stack."""
    costs, layers = of.costs, of.stack.depth * of.share
    mixers = [cost for name, cost in costs.items() if not name.startswith("mlp")]
    per_token, feed_forward = [cost for name, cost in costs.items() if name.startswith("mlp")], costs.get("mlp", Cost())
    scores = sum(cost.scores for cost in costs.values())
    # "dots" keeps every product with weights and recomputes the others, those of attention. "full" recomputes the block
    # without the products that are only added to the residual stream, which no gradient needs but a norm after the sum;
    # "attention" does not compute softmax attention again.
    # Reversible blocks are recomputed whole, because what was added is subtracted again.
    last = {
        "post_norm": 0, "pre_norm": feed_forward.last, "parallel": sum(cost.last for cost in costs.values()),
        "plain": 0, "sandwich": 0, "reversible": 0, "parallel_norms": sum(cost.last for cost in costs.values()),
    }[of.stack.block]  # fmt: skip
    kept_scores = sum(cost.kept_scores for cost in costs.values())
    whole = scores + sum(cost.products for cost in costs.values()) - last
    policy = "full" if of.stack.block == "reversible" else remat_policy
    return LayerFlops(
        layers * sum(cost.products for cost in mixers),
        layers * sum(cost.scores for cost in mixers),
        layers * sum(cost.products + cost.scores for cost in per_token),
        layers * {"none": 0.0, "dots": scores, "attention": whole - kept_scores, "full": whole}[policy],
    )


def key_products(cfg: ModelConfig) -> float:
    """Operations that make a token's keys and values in one layer."""
    return 2 * cfg.width * 2 * cfg.attention.kv_heads * cfg.head_size

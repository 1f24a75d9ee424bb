"""THE tables of sublayers: which kinds there are of those that mix tokens, and of those that take each by itself.

A config file adds a kind of its own with two lines, a class of the config and an entry here:

    class GatedConv(AttentionConfig, kind="gated_conv"): ...
    MIXERS["gated_conv"] = Sublayer(specs, apply, cost, init_cache)
"""

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import attention_layer, feed_forward
from jaxformer.functional.layer import Cost, Sublayer

MIXERS: dict[str, Sublayer] = {"softmax": attention_layer.SOFTMAX}  # by model.attention.kind
FEED_FORWARDS: dict[str, Sublayer] = {"dense": feed_forward.DENSE}  # by model.feed_forward.kind


def sublayers_of(cfg: ModelConfig) -> dict[str, Sublayer]:
    """The sublayers of each layer of a model, in order, by the name of their parameters.

    Raises:
      KeyError: a kind of the config has no entry in the tables.
    """
    return {"attention": MIXERS[cfg.attention.kind], "mlp": FEED_FORWARDS[cfg.feed_forward.kind]}


def costs_of(cfg: ModelConfig, length: int, execution: Execution) -> dict[str, Cost]:
    """What each sublayer of a layer costs, by the same names, for one token of rows of `length`."""
    return {name: sublayer.cost(cfg, length, execution) for name, sublayer in sublayers_of(cfg).items()}

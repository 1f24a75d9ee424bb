"""THE tables of sublayers: the kinds that mix tokens, and the kinds that treat each token alone.

A config file adds a kind of its own with two lines, a config class and an entry here:

    class GatedConv(AttentionConfig, kind="gated_conv"): ...
    MIXERS["gated_conv"] = Sublayer(specs, apply, cost, init_cache)
"""

from jaxformer.config import Execution, ModelConfig
from jaxformer.config.registry import Registry
from jaxformer.functional import attention_layer, feed_forward
from jaxformer.functional.checked import checked
from jaxformer.functional.layer import Cost, Sublayer

MIXERS: Registry[Sublayer] = Registry("model.attention.kind", {}, {"softmax": attention_layer.SOFTMAX})
FEED_FORWARDS: Registry[Sublayer] = Registry("model.feed_forward.kind", {}, {"dense": feed_forward.DENSE})


def sublayers_of(cfg: ModelConfig) -> dict[str, Sublayer]:
    """The sublayers of each layer of a model, in order, by the name of their parameters.

    Raises:
      ConfigError: a kind of the config has no entry in the tables.
    """
    mixer, feed_forward = MIXERS[cfg.attention.kind], FEED_FORWARDS[cfg.feed_forward.kind]
    if not type(cfg.attention).__module__.startswith("jaxformer."):
        mixer = checked(f"config.model.attention.kind: {cfg.attention.kind}", mixer)
    if not type(cfg.feed_forward).__module__.startswith("jaxformer."):
        feed_forward = checked(f"config.model.feed_forward.kind: {cfg.feed_forward.kind}", feed_forward)
    return {"attention": mixer, "mlp": feed_forward._replace(init_cache=feed_forward.init_cache or nothing_kept)}


def nothing_kept(cfg: ModelConfig, rows: int, length: int, dtype: str) -> None:
    """The cache of a feed-forward layer that treats each token alone."""


def costs_of(cfg: ModelConfig, length: int, execution: Execution) -> dict[str, Cost]:
    """What each sublayer of a layer costs, by the same names, per token in rows of `length` tokens."""
    return {name: sublayer.cost(cfg, length, execution) for name, sublayer in sublayers_of(cfg).items()}

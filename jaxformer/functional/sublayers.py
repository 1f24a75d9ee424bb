"""THE tables of sublayers: the kinds that mix tokens, the kinds that treat each token alone, and what attends to a
source.

A config file adds a kind of its own with two lines, a config class and an entry here:

    class GatedConv(AttentionConfig, kind="gated_conv"): ...
    MIXERS["gated_conv"] = Sublayer(specs, apply, cost, init_cache)
"""

import functools
from dataclasses import replace
from typing import NamedTuple

from jaxformer.config import Execution, ModelConfig, layers_of, stacks_of
from jaxformer.config.registry import Registry
from jaxformer.functional import (
    aligned_recurrent,
    attention_layer,
    cross_attention,
    experts_layer,
    feed_forward,
    funnel_layer,
    linear_layer,
    linformer_layer,
    longformer,
    lsh_layer,
    recurrent_layer,
    sparse_layer,
)
from jaxformer.functional.checked import checked
from jaxformer.functional.chunked_feed_forward import in_chunks
from jaxformer.functional.layer import Cost, Sublayer

MIXERS: Registry[Sublayer] = Registry("model.attention.kind", {}, {
    "softmax": attention_layer.SOFTMAX, "lstm": recurrent_layer.LSTM, "gru": recurrent_layer.GRU,
    "alignment": aligned_recurrent.ALIGNMENT, "lsh": lsh_layer.LSH, "funnel": funnel_layer.FUNNEL,
    "longformer": longformer.LONGFORMER,
    **dict.fromkeys(("bigbird", "strided", "fixed", "dilated"), sparse_layer.SPARSE),
    "linear": linear_layer.LINEAR, "performer": linear_layer.PERFORMER, "linformer": linformer_layer.LINFORMER,
})  # fmt: skip
FEED_FORWARDS: Registry[Sublayer] = Registry("model.feed_forward.kind", {}, {
    "dense": feed_forward.DENSE, "experts": experts_layer.EXPERTS,
})  # fmt: skip


def sublayers_of(cfg: ModelConfig) -> dict[str, Sublayer]:
    """The sublayers of each block of a model, in order, by the name of their parameters.

    A block is a layer. Where only every n-th layer has experts it is n layers; the parameters of the first n - 1 have
    the number of the layer in their names: attention_1, mlp_1, attention, mlp.

    Raises:
      ConfigError: a kind of the config has no entry in the tables.
    """
    if cfg.feed_forward.every == 1:
        return _layer_of(cfg)
    plain = _with_others(cfg)
    found = {
        f"{name}_{number}": _as_in(plain, sublayer)
        for number in range(1, cfg.feed_forward.every)
        for name, sublayer in _layer_of(plain).items()
    }
    return found | _layer_of(cfg)


@functools.cache
def _with_others(cfg: ModelConfig) -> ModelConfig:
    """A model all of whose layers are as those without experts."""
    return replace(cfg, feed_forward=cfg.feed_forward.others())


def _as_in(plain: ModelConfig, sublayer: Sublayer) -> Sublayer:
    """A sublayer of another model in this one."""
    empty = sublayer.init_cache
    return sublayer._replace(
        specs=lambda cfg: sublayer.specs(plain),
        apply=lambda params, x, cfg, context: sublayer.apply(params, x, plain, context),
        cost=lambda cfg, length, execution: sublayer.cost(plain, length, execution),
        init_cache=None if empty is None else lambda cfg, rows, length, dtype: empty(plain, rows, length, dtype),
        model_specs=None,
    )


def _layer_of(cfg: ModelConfig) -> dict[str, Sublayer]:
    """The sublayers of one layer."""
    mixer, per_token = MIXERS[cfg.attention.kind], FEED_FORWARDS[cfg.feed_forward.kind]
    if not type(cfg.attention).__module__.startswith("jaxformer."):
        mixer = checked(f"config.model.attention.kind: {cfg.attention.kind}", mixer)
    if not type(cfg.feed_forward).__module__.startswith("jaxformer."):
        per_token = checked(f"config.model.feed_forward.kind: {cfg.feed_forward.kind}", per_token)
    per_token = in_chunks(per_token._replace(init_cache=per_token.init_cache or nothing_kept))
    kinds = {"attention": mixer, "cross": cross_attention.CROSS, "mlp": per_token}
    return {name: kinds[name] for name in cfg.layer}


def nothing_kept(cfg: ModelConfig, rows: int, length: int, dtype: str) -> None:
    """The cache of a feed-forward layer that treats each token alone."""


def costs_of(cfg: ModelConfig, length: int, execution: Execution) -> dict[str, Cost]:
    """What each sublayer of a layer costs, by the same names, per token in rows of `length` tokens."""
    return {name: sublayer.cost(cfg, length, execution) for name, sublayer in sublayers_of(cfg).items()}


class StackCosts(NamedTuple):
    """What one stack of layers costs.

    Attributes:
      stack: the stack as a model of its own.
      share: its tokens for each token of a row: of an encoder, source tokens for each of the target.
      costs: of each sublayer of a layer, by name, per token of the stack.
    """

    stack: ModelConfig
    share: float
    costs: dict[str, Cost]


def stack_costs(cfg: ModelConfig, length: int, execution: Execution) -> list[StackCosts]:
    """Those of each stack of a model whose rows have `length` tokens; sources have `model.encoder.source_length`."""
    sizes = [(stack, length if stack is cfg else stack.context_length) for stack in stacks_of(cfg, length)]
    return [StackCosts(stack, size / length, _mean_costs(stack, size, execution)) for stack, size in sizes]


def _mean_costs(stack: ModelConfig, length: int, execution: Execution) -> dict[str, Cost]:
    """Those of a layer; the mean where layers differ."""
    layers = [(costs_of(one, length, execution), number) for one, number in layers_of(stack)]
    if len(layers) == 1:
        return layers[0][0]

    def mean(name: str, field: str) -> float:
        return sum(number * getattr(costs[name], field) for costs, number in layers) / stack.num_layers

    fields = [field for field in Cost._fields if field != "ring"]
    return {
        name: cost._replace(**{field: mean(name, field) for field in fields}) for name, cost in layers[0][0].items()
    }

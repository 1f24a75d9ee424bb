"""The Funnel-Transformer: its attention as a kind of `model.attention`, and `model.funnel`, its blocks."""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxformer.config.attention import AttentionConfigWithHeads
from jaxformer.config.checks import at_least, between
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError

BLOCKS = 3  # where the config names none


@dataclass(frozen=True)
class FunnelAttention(
    AttentionConfigWithHeads,
    kind="funnel",
    accepts={**dict.fromkeys(("num_heads", "head_width"), at_least(1)), "dropout": between(0.0, 0.999)},
    most={"head_width": 2**24},
):
    """Relative attention with a term of the segment, see `functional.funnel_layer`.

    Attributes:
      num_heads: heads.
      head_width: None: model.width / num_heads.
      dropout: of the attention weights.
    """

    num_heads: int = 4
    head_width: int | None = None
    dropout: float = 0.0
    num_kv_heads = soft_cap = None
    has_heads: ClassVar[bool] = False  # other positions than its own do not enter
    has_bias: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: another family, or heads that do not divide the model's width."""
        if model.family != "funnel":
            raise ConfigError(
                f"config.model.attention.kind: funnel; accepted with model.family=funnel, not {model.family}"
            )
        super().check_model(model)


@dataclass(frozen=True)
class Funnel(Section, name="model.funnel", accepts={"decoder_layers": at_least(1)}, most={"decoder_layers": 10_000}):
    """The blocks of a Funnel-Transformer; each but the first begins with half as many tokens.

    Attributes:
      blocks: layers of each block; none given: model.num_layers but those of the decoder, in three blocks.
      decoder_layers: over all tokens again, at the end.
      separate_cls: the first token of a row is never pooled with others; needs rows that begin with one, data.pairs.
    """

    blocks: tuple[int, ...] = ()
    decoder_layers: int = 2
    separate_cls: bool = True

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each block, in a model of `num_layers`."""
        if self.blocks:
            return self.blocks
        left = num_layers - self.decoder_layers
        return tuple(left // BLOCKS + (number < left % BLOCKS) for number in range(BLOCKS))

    def sized(self) -> "Funnel":
        """These blocks on a ladder of sizes: three, of as many layers as there are."""
        return replace(self, blocks=())

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: these blocks do not make up the `ModelConfig` around them."""
        blocks, layers = self.layers(model.num_layers), model.num_layers
        if not self.blocks and min(blocks) < 1:
            raise ConfigError(
                f"config.model.num_layers: {layers}; {BLOCKS} blocks and model.funnel.decoder_layers "
                f"{self.decoder_layers} need more; accepted: at least {BLOCKS + self.decoder_layers}, or other "
                "model.funnel.blocks"
            )
        if min(blocks) < 1 or sum(blocks) + self.decoder_layers != layers:
            raise ConfigError(
                f"config.model.funnel.blocks: {blocks} and model.funnel.decoder_layers {self.decoder_layers} do not "
                f"make up model.num_layers {layers}; accepted: at least 1 layer each, in all as many"
            )
        if model.context_length % 2 ** (len(blocks) - 1):
            raise ConfigError(
                f"config.model.context_length: {model.context_length}; model.funnel.blocks {blocks} need rows "
                f"divisible by {2 ** (len(blocks) - 1)}"
            )
        for name, value, accepted in (
            ("attention.kind", model.attention.kind, "funnel"),
            ("positions.kind", model.positions.kind, "none"),
            ("block", model.block, "post_norm"),
        ):
            if value != accepted:
                raise ConfigError(f"config.model.{name}: {value}; accepted with model.family=funnel: {accepted}")


class FunnelPart:
    """What tells some layers of a Funnel-Transformer from all of it: nothing is to be checked again."""

    def _check(self) -> None:
        pass


@functools.lru_cache
def _part_class(cls: Any, pools: bool) -> Any:
    return type(f"{cls.__name__}Part", (FunnelPart, cls), {"pools": pools})


def funnel_parts(model: Any, length: int) -> tuple[Any, ...]:
    """A Funnel-Transformer with rows of `length` tokens as stacks of layers, each a model of its own, in order: for
    each block but the first the layer that pools, and the others; at last the decoder's."""
    out = []
    for number, layers in enumerate(model.funnel.layers(model.num_layers)):
        tokens = length // 2**number
        out += [(1, tokens, True), (layers - 1, tokens, False)] if number else [(layers, tokens, False)]
    out.append((model.funnel.decoder_layers, length, False))
    return tuple(
        _part_class(type(model), pools)(  # type: ignore[arg-type]
            **{**vars(model), "num_layers": layers, "context_length": tokens}
        )
        for layers, tokens, pools in out
        if layers
    )

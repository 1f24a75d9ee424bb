"""`model.attention`: how tokens exchange information. Its `kind` chooses the mixer of every layer."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from jaxformer.config.checks import above, at_least, between
from jaxformer.config.choice import Choice
from jaxformer.config.execution import Execution
from jaxformer.config.fields import field_types
from jaxformer.errors import ConfigError

# model.attention was the implementation, which is now execution.attention.
IMPLEMENTATIONS = get_args(field_types(Execution)["attention"])


@dataclass(frozen=True)
class AttentionConfig(Choice, group="model.attention", default="softmax", reserved=IMPLEMENTATIONS):
    """Base of the kinds of attention. A kind of your own is a frozen dataclass that derives from this one; what it
    computes stands in `functional.sublayers.MIXERS` under its name."""

    # A kind overrides these. `window`, the number of keys that each query sees (None: all), has no annotation, which
    # would make it the first field of every kind.
    window = None
    # True if there are queries, keys and scores for each of num_heads heads, as rotary, ALiBi and T5 positions need.
    has_heads: ClassVar[bool] = False
    has_implementations: ClassVar[bool] = False  # True if execution.attention chooses how it is computed
    has_bias: ClassVar[bool] = False  # True if it adds a bias of its own to scores, which not every implementation can

    def sized(self, width: int, head_width: int) -> "AttentionConfig":
        """This kind in a model of `width` on a ladder of sizes, with heads of `head_width` if it has any."""
        return self

    def summary(self) -> str:
        """The kind in two words, for the overview of a run."""
        return self.kind

    def check_model(self, model: Any) -> None:
        """Raises ConfigError if this kind does not fit the `ModelConfig` around it."""


@dataclass(frozen=True)
class Softmax(
    AttentionConfig,
    kind="softmax",
    accepts={
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_width", "window"), at_least(1)),
        "soft_cap": above(0),
        "dropout": between(0.0, 0.999),
    },
    most={"head_width": 2**24, "window": 2**30},
):
    """Scaled dot-product attention with multi-head, grouped-query or multi-query heads.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      window: keys each query sees, itself included; None: all.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
      dropout: of the attention weights.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    head_width: int | None = None
    window: int | None = None  # type: ignore[assignment]
    soft_cap: float | None = None
    qk_norm: bool = False
    dropout: float = 0.0

    has_heads: ClassVar[bool] = True
    has_implementations: ClassVar[bool] = True

    def sized(self, width: int, head_width: int) -> "Softmax":
        """As many heads of `head_width` as fill `width`."""
        return replace(self, num_heads=width // head_width, head_width=None)

    def summary(self) -> str:
        """How many heads."""
        return f"{self.num_heads} heads"

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def head_size(self, width: int) -> int:
        """Width of one head in a model of `width`."""
        return width // self.num_heads if self.head_width is None else self.head_width

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: the heads do not divide the model's width."""
        if self.head_width is None and model.width % self.num_heads:
            raise ConfigError(
                f"config.model.attention.num_heads: {self.num_heads} does not divide model.width {model.width}"
            )

    def _check(self):
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"config.model.attention.num_kv_heads: {self.num_kv_heads} does not divide "
                f"model.attention.num_heads {self.num_heads}"
            )

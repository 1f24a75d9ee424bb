"""`model.attention`: how tokens exchange information. Its `kind` chooses the mixer of every layer."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from jaxformer.config.checks import above, at_least, between
from jaxformer.config.choice import Choice
from jaxformer.config.execution import Execution
from jaxformer.config.fields import field_types
from jaxformer.errors import ConfigError
from jaxformer.patterns import MaskPattern

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
    has_scores: ClassVar[bool] = True  # False if there are heads, but no scores that ALiBi or T5 could be added to
    reads_in_order: ClassVar[bool] = False  # True if a state takes tokens in their order: positions add nothing
    has_implementations: ClassVar[bool] = False  # True if execution.attention chooses how it is computed
    reads_source: ClassVar[bool] = False  # True if it reads the source, in families without a layer for that
    whole_rows: ClassVar[bool] = False  # True if rows cannot be sharded over the mesh's context axis
    any_width: ClassVar[bool] = False  # True if roles and shapes of its parameters say all that muP has to know
    has_bias: ClassVar[bool] = False  # True if it adds a bias of its own to scores, which not every implementation can

    @property
    def cannot_decode(self) -> str | None:
        """The field and value with which models of this kind cannot generate text, and why; None: nothing hinders."""
        return None

    def sized(self, width: int, head_width: int) -> "AttentionConfig":
        """This kind in a model of `width` on a ladder of sizes, with heads of `head_width` if it has any."""
        return self

    def fitted(self, length: int) -> "AttentionConfig":
        """With the sizes that follow from the `length` of a model's rows, where they are not given. `patterns` and
        `global_ends` are asked of what this returns."""
        return self

    def period(self) -> tuple["AttentionConfig", ...]:
        """The attention of each layer up to where it repeats; mostly all layers have the same."""
        return (self,)

    def summary(self) -> str:
        """The kind in two words, for the overview of a run."""
        return self.kind

    def patterns(self, length: int, causal: bool) -> tuple[MaskPattern, ...]:
        """The patterns of sparse attention in rows of at most `length` tokens; none: every token may be seen."""
        return ()

    def global_ends(self, causal: bool) -> tuple[int, int]:
        """How many of the first and of the last tokens of each document see all of it and are seen by all of it."""
        return 0, 0

    def check_model(self, model: Any) -> None:
        """Raises ConfigError if this kind does not fit the `ModelConfig` around it."""

    def check_data(self, data: Any) -> None:
        """Raises ConfigError if this kind cannot be trained on the rows of a `DataConfig`."""


@dataclass(frozen=True)
class AttentionConfigWithHeads(
    AttentionConfig,
    accepts={
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_width"), at_least(1)),
        **dict.fromkeys(("soft_cap", "scale"), above(0)),
        "dropout": between(0.0, 0.999),
    },
    most={"head_width": 2**24},
):
    """Base of the kinds with the heads of scaled dot-product attention: num_heads, num_kv_heads, head_width, soft_cap,
    qk_norm, dropout and scale are fields of each, as `Softmax` describes them."""

    has_heads: ClassVar[bool] = True
    has_implementations: ClassVar[bool] = True
    qkv_bias = joint_qk_norm = False  # fields of `Softmax`

    def sized(self, width: int, head_width: int) -> "AttentionConfigWithHeads":
        """As many heads of `head_width` as fill `width`."""
        sizes: dict[str, Any] = {"num_heads": width // head_width, "head_width": None}
        return replace(self, **sizes)

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
                f"config.model.attention.num_heads: {self.num_heads} does not divide model.width {model.width}; "
                "accepted: a divisor of it, or a model.attention.head_width"
            )

    def _check(self):
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"config.model.attention.num_kv_heads: {self.num_kv_heads} does not divide "
                f"model.attention.num_heads {self.num_heads}; accepted: a divisor of it"
            )


@dataclass(frozen=True)
class Softmax(
    AttentionConfigWithHeads,
    kind="softmax",
    accepts={"window": at_least(1), "global_every": at_least(2)},
    most={"window": 2**30},
):
    """Scaled dot-product attention with multi-head, grouped-query or multi-query heads.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      window: keys each query sees, itself included; None: all.
      global_every: every so many layers one sees all keys, and the others those in the window (Gemma 2: 2, Gemma 3: 6);
        None: all layers are alike.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
      joint_qk_norm: that norm is of all heads together, as in OLMoE.
      qkv_bias: queries, keys and values have biases even if model.use_bias is false, as in Qwen 2.
      dropout: of the attention weights.
      scale: of the scores, as 1 in T5; None: head_width ** -0.5.
    """

    any_width: ClassVar[bool] = True
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_width: int | None = None
    window: int | None = None  # type: ignore[assignment]
    global_every: int | None = None
    soft_cap: float | None = None
    qk_norm: bool = False
    joint_qk_norm: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def period(self) -> tuple["Softmax", ...]:
        """Layers with the window, and one without."""
        if self.global_every is None:
            return (self,)
        local = replace(self, global_every=None)
        return (*(local,) * (self.global_every - 1), replace(local, window=None))

    def _check(self):
        if self.global_every is not None and self.window is None:
            raise ConfigError(
                f"config.model.attention.global_every: {self.global_every}; without model.attention.window all layers "
                "see all keys; accepted: none"
            )
        if self.joint_qk_norm and not self.qk_norm:
            raise ConfigError("config.model.attention.joint_qk_norm: True; accepted with qk_norm=true")
        super()._check()

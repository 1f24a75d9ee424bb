"""`model.feed_forward`: what each token goes through by itself."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxformer.config.checks import at_least
from jaxformer.config.choice import Choice
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class FeedForwardConfig(Choice, group="model.feed_forward", default="dense"):
    """Base of the kinds of feed-forward layers. What a kind computes stands in `functional.sublayers.FEED_FORWARDS`."""

    any_width: ClassVar[bool] = False  # True if roles and shapes of its parameters say all that muP has to know
    whole_rows: ClassVar[Any] = False  # True of a kind that cannot have rows cut over devices
    has_experts: ClassVar[bool] = False  # True of a kind with `count` layers beside each other
    # Of so many layers one, the last, has this kind; the others are as `others` says. A field of a kind that may have
    # other layers, at that field's own place: hence without a type here.
    every = 1

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: a model of these settings cannot have this kind."""

    def check_execution(self, execution: Any) -> None:
        """Raises ConfigError: this kind cannot be computed as a section `Execution` says."""
        for name in () if self.has_experts else ("experts", "expert_exchange"):
            if getattr(execution, name) != "auto":
                raise ConfigError(
                    f"config.execution.{name}: {getattr(execution, name)}; model.feed_forward.kind={self.kind} has no "
                    "experts; accepted: auto"
                )

    def summary(self) -> str:
        """What an overview says of it beside the model's width; mostly nothing."""
        return ""

    def others(self) -> "FeedForwardConfig":
        """Of the layers that have another kind than this."""
        return self

    def sized(self) -> "FeedForwardConfig":
        """This kind on a ladder of sizes, its width left to follow the model's."""
        return self


@dataclass(frozen=True)
class Dense(FeedForwardConfig, kind="dense", accepts={"width": at_least(1)}, most={"width": 2**26}):
    """Two matrices with an activation between them, or three where a gate multiplies it.

    Attributes:
      width: None: 4 * model.width, or 8/3 * model.width rounded up to 64 where it is gated.
      activation: swiglu, geglu and geglu_tanh have a gate matrix beside the up projection.
    """

    any_width: ClassVar[bool] = True

    width: int | None = None
    activation: Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"] = "gelu"

    @property
    def gated(self) -> bool:
        """True if there is a gate matrix beside the up projection."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    def sized(self) -> "Dense":
        """The default width for each size."""
        return replace(self, width=None)

    def hidden_width(self, width: int) -> int:
        """Hidden width in a model of `width`."""
        if self.width is not None:
            return self.width
        return -(-8 * width // (3 * 64)) * 64 if self.gated else 4 * width

"""`model.positions`: how a model knows where a token stands."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxformer.config.checks import above, at_least
from jaxformer.config.choice import Choice
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class PositionsConfig(Choice, group="model.positions", default="learned"):
    """Base of the kinds of positions."""

    needs_heads: ClassVar[bool] = False  # works on queries, keys or scores of heads

    def check_model(self, model: Any) -> None:
        """Raises ConfigError if this kind does not fit the `ModelConfig` around it."""
        if self.needs_heads and not model.attention.has_heads:
            accepted = [name for name, kind in PositionsConfig.registered.items() if not kind.needs_heads]
            raise ConfigError(
                f"config.model.positions.kind: {self.kind} needs attention heads, which "
                f"model.attention.kind={model.attention.kind} has not; accepted there: {', '.join(accepted)}"
            )


@dataclass(frozen=True)
class Learned(PositionsConfig, kind="learned"):
    """A learned embedding for each of model.context_length positions."""


@dataclass(frozen=True)
class Sinusoidal(PositionsConfig, kind="sinusoidal"):
    """The fixed sines and cosines of Vaswani et al. 2017, section 3.5."""

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: the model's width is odd."""
        if model.width % 2:
            raise ConfigError(f"config.model.width: {model.width} is odd; sinusoidal positions need an even width")


@dataclass(frozen=True)
class Rotary(
    PositionsConfig,
    kind="rotary",
    accepts={"base": above(1), "factor": above(0), "original_length": at_least(1)},
):
    """Queries and keys turned by angles that grow with the position (Su et al. 2021).

    Attributes:
      base: the longest wave has about 2 pi times this many tokens.
      scaling: how a context longer than the original is reached.
      factor: how many times longer than original_length the context is.
      original_length: None: model.context_length / factor.
    """

    base: float = 10_000.0
    scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    factor: float = 1.0
    original_length: int | None = None
    needs_heads: ClassVar[bool] = True

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: no heads or an odd width of them, or a context shorter than the factor."""
        super().check_model(model)
        if model.head_size % 2:
            raise ConfigError(
                f"config.model.attention.head_width: {model.head_size} is odd; rotary positions need an even width"
            )
        if self.original_length is None and model.context_length < self.factor:
            raise ConfigError(
                f"config.model.positions.factor: {self.factor} is more than model.context_length "
                f"{model.context_length}; set model.positions.original_length"
            )

    def _check(self):
        if self.scaling == "none" and self.factor != 1:
            raise ConfigError(
                f"config.model.positions.factor: {self.factor} needs model.positions.scaling=linear, ntk or yarn"
            )


@dataclass(frozen=True)
class Alibi(PositionsConfig, kind="alibi"):
    """A penalty on scores that grows with the distance, by a fixed slope for each head (Press et al. 2022)."""

    needs_heads: ClassVar[bool] = True


@dataclass(frozen=True)
class T5(PositionsConfig, kind="t5"):
    """A learned bias of scores for each head and bucket of distances (Raffel et al. 2020, section 2.1)."""

    needs_heads: ClassVar[bool] = True


@dataclass(frozen=True)
class NoPositions(PositionsConfig, kind="none"):
    """None: a causal model can tell positions from what it sees (Kazemnejad et al. 2023)."""

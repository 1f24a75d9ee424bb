"""`model.parametrization`: how initial values, learning rates and activations change with a model's width and depth."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxformer.config.checks import at_least, between
from jaxformer.config.choice import Choice
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Parametrization(Choice, group="model.parametrization", default="standard"):
    """Base of the kinds. What they multiply stands in `functional.multipliers`, by these numbers."""

    # Without annotations, which would make them fields of every kind.
    alpha = 1.0
    embedding_rate_exponent = 0.0
    decay_exponent = 1.0

    shrinks_residual: ClassVar[bool] = True  # initial values that write into the residual stream / sqrt(2 layers)

    def width_ratio(self, model: Any) -> float:
        """m, how many times wider than its base a `ModelConfig` is."""
        return 1.0

    def depth_ratio(self, model: Any) -> float:
        """l, how many times more layers than its base it has."""
        return 1.0

    def head_ratio(self, model: Any) -> float:
        """How many times wider than those of its base its heads are."""
        return 1.0

    def check_model(self, model: Any) -> None:
        """Raises ConfigError if this kind does not fit the `ModelConfig` around it."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ConfigError if this kind says nothing of the update rule of an `OptimizerConfig`."""


@dataclass(frozen=True)
class Standard(Parametrization, kind="standard"):
    """As model.initializer says, with one learning rate for all parameters."""


@dataclass(frozen=True)
class MuP(
    Parametrization,
    kind="mup",
    accepts={
        **dict.fromkeys(("base_width", "base_layers", "base_head_width"), at_least(1)),
        "alpha": between(0.5, 1.0),
        "embedding_rate_exponent": between(-1.0, 1.0),
        "decay_exponent": between(0.0, 1.0),
    },
    most={"base_width": 2**24, "base_layers": 10_000, "base_head_width": 2**24},
):
    """Maximal update parametrisation: what is tuned at a small width and depth stays right at larger ones.

    Sources: Yang et al. 2022, table 8; Dey et al. 2025, table 1 (CompleteP). The multipliers stand in
    `functional.multipliers.multipliers`. A base has the same proportions: the number of heads or their width, and
    the width of feed-forward layers, grow with the model's.

    Attributes:
      base_width: where nothing is multiplied, the width that was tuned.
      base_layers: likewise its layers; None: those of the model, so that depth changes nothing.
      base_head_width: width of its heads, where heads are wider in wider models; None: there are more of them instead.
      alpha: residual branches are multiplied by (layers / base_layers) ** -alpha; 1 is CompleteP.
      embedding_rate_exponent: the learning rate of tables is multiplied by (width / base_width) ** this.
      decay_exponent: the weight decay of hidden matrices by (width / base_width) ** this; at 1 the product with the
        learning rate does not depend on the width.
    """

    base_width: int = 64
    base_layers: int | None = None
    base_head_width: int | None = None
    alpha: float = 1.0
    embedding_rate_exponent: float = 0.0
    decay_exponent: float = 1.0

    shrinks_residual: ClassVar[bool] = False

    def width_ratio(self, model: Any) -> float:
        """model.width / base_width."""
        return model.width / self.base_width

    def depth_ratio(self, model: Any) -> float:
        """model.num_layers / base_layers, or 1."""
        return 1.0 if self.base_layers is None else model.num_layers / self.base_layers

    def head_ratio(self, model: Any) -> float:
        """Width of the model's heads / base_head_width, or 1."""
        return 1.0 if self.base_head_width is None else model.head_size / self.base_head_width

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: a base that is larger than the model, or a part of the model without rules."""
        for name, (value, fits, accepted) in _parts(model).items():
            if not fits:
                raise ConfigError(
                    f"config.model.{name}: {value}; model.parametrization.kind=mup has no rule for it; accepted there: "
                    f"{accepted}"
                )
        larger = {
            "base_width": (self.base_width, "model.width", model.width),
            "base_layers": (self.base_layers or 0, "model.num_layers", model.num_layers),
            "base_head_width": (self.base_head_width or 0, "the width of a head,", model.head_size),
        }
        for name, (base, what, most) in larger.items():
            if base > most:
                raise ConfigError(f"config.model.parametrization.{name}: {base}; accepted: at most {what} {most}")

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises ConfigError: Adafactor, whose update is relative to what it has seen of the parameter's gradients."""
        if optimizer.name not in RULES:
            raise ConfigError(
                f"config.optimizer.name: {optimizer.name}; accepted with model.parametrization.kind=mup: "
                f"{', '.join(RULES)}"
            )


RULES = ("adamw", "lion", "muon")
BLOCKS = ("pre_norm", "parallel", "parallel_norms", "sandwich")


def _parts(model: Any) -> dict[str, tuple[Any, bool, str]]:
    """Fields of a model: the value, whether its size is known at any width, and what is accepted."""
    groups = {name: getattr(model, name) for name in ("attention", "positions", "feed_forward")}
    kinds = {
        f"{name}.kind": (
            section.kind,
            section.any_width,
            ", ".join(each for each, kind in section.registered.items() if kind.any_width),
        )
        for name, section in groups.items()
    }
    families = ", ".join(name for name, traits in FAMILIES.items() if traits.any_width)
    return kinds | {
        "family": (model.family, FAMILIES[model.family].any_width, families),
        "block": (model.block, model.block in BLOCKS, ", ".join(BLOCKS)),
        "head": ("a task's head", model.head is None, "none"),
        "scale_embeddings": (model.scale_embeddings, not model.scale_embeddings, "false"),
        "scale_output": (model.scale_output, not model.scale_output, "false"),
    }

"""Recurrent layers as kinds of `model.attention`: a state goes through the row from token to token."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxformer.config.attention import AttentionConfig
from jaxformer.config.checks import at_least
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class RecurrentMixer(AttentionConfig):
    """Base of the recurrent kinds.

    Attributes:
      units: of the hidden state; None: model.width.
    """

    units: int | None = None
    gates: ClassVar[int]
    reads_in_order: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True

    def hidden_units(self, width: int) -> int:
        """Units of the hidden state in a model of `width`."""
        return width if self.units is None else self.units

    def summary(self) -> str:
        """The kind and its units, if they are not the model's width."""
        return self.kind if self.units is None else f"{self.kind} of {self.units} units"

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: the model reads both ways, a recurrent layer one."""
        if not model.causal or model.encoder is not None:
            raise ConfigError(
                f"config.model.attention.kind: {self.kind} reads a row from left to right; accepted with "
                f"model.family=gpt or recurrent, not {model.family}"
            )


@dataclass(frozen=True)
class Lstm(RecurrentMixer, kind="lstm", accepts={"units": at_least(1)}, most={"units": 2**24}):
    """A long short-term memory layer, see `functional.recurrent.lstm`.

    Attributes:
      units: of the hidden state; None: model.width.
    """

    gates: ClassVar[int] = 4


@dataclass(frozen=True)
class Gru(RecurrentMixer, kind="gru", accepts={"units": at_least(1)}, most={"units": 2**24}):
    """A layer of gated recurrent units, see `functional.recurrent.gru`.

    Attributes:
      units: of the hidden state; None: model.width.
      reset_after: the reset gate acts after the product with the hidden state's weights, as in cuDNN and torch; before
        it, as published, training is several times slower.
    """

    reset_after: bool = True
    gates: ClassVar[int] = 3

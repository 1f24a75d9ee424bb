"""Mixtures of experts as a kind of `model.feed_forward`."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from jaxformer.config.checks import at_least, between
from jaxformer.config.feed_forward import Dense
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Experts(
    Dense,
    kind="experts",
    accepts={
        **dict.fromkeys(("width", "top_k", "every"), at_least(1)),
        "count": at_least(2),
        "shared": at_least(0),
        "capacity_factor": between(0.01, 1000.0),
        **dict.fromkeys(("balance", "z_loss"), between(0.0, 1000.0)),
        "bias_rate": between(0.0, 1.0),
    },
    most={"width": 2**26, "count": 2**16, "shared": 2**16},
):
    """Several feed-forward layers, of which a router chooses a few for each token; see `functional.experts`.

    Attributes:
      width: of one expert; None: that of a dense layer shared out among the experts that a token goes through.
      activation: as of a dense layer.
      count: experts.
      top_k: experts that a token goes through.
      shared: experts that every token goes through beside those.
      dispatch: dropless: a token goes to all of its experts; capacity: in each row an expert takes so many tokens at
        most, the earliest; expert_choice: each expert takes that many tokens of a row, whichever suit it best.
      capacity_factor: that number is capacity_factor * top_k * tokens of the row / count, rounded up; None: 1.25
        with capacity, 1 with expert_choice.
      renormalize: the gates of a token sum to 1; None: from two experts on.
      balance: multiplies the loss that keeps experts equally busy; None: 0.01, or 0 with expert_choice.
      z_loss: multiplies the mean of log(sum(exp(router logits)))**2.
      every: one layer of so many has experts, the last; the others have a dense layer, as wide as `width` says.
      dense_activation: that of those; None: the same.
      bias_rate: that of a bias for the choice of experts, which moves towards those that have too little to do; 0:
        there is no bias.
    """

    count: int = 8
    top_k: int = 2
    shared: int = 0
    dispatch: Literal["dropless", "capacity", "expert_choice"] = "dropless"
    capacity_factor: float | None = None
    renormalize: bool | None = None
    balance: float | None = None
    z_loss: float = 0.001
    bias_rate: float = 0.0
    every: int = 1
    dense_activation: Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"] | None = None

    has_experts: ClassVar[bool] = True
    any_width: ClassVar[bool] = False  # nothing says how the router's logits stay as they are in wider models

    @property
    def expert_choice(self) -> bool:
        """True if experts choose tokens."""
        return self.dispatch == "expert_choice"

    @property
    def whole_rows(self) -> bool:
        """True if rows may not be cut over devices: an expert counts or compares the tokens of a row."""
        return self.dispatch != "dropless"

    @property
    def normalized(self) -> bool:
        """True if the gates of a token sum to 1."""
        return self.top_k > 1 and not self.expert_choice if self.renormalize is None else self.renormalize

    @property
    def balance_weight(self) -> float:
        """What multiplies the balance loss."""
        return (0.0 if self.expert_choice else 0.01) if self.balance is None else self.balance

    def capacity(self, length: int) -> int:
        """Tokens that an expert takes of a row of `length`."""
        factor = (1.0 if self.expert_choice else 1.25) if self.capacity_factor is None else self.capacity_factor
        exact = Fraction(str(factor)) * self.top_k * length / self.count  # 1.1 * 2 * 100 / 4 is 55.000000000000007
        return min(length, math.ceil(exact))

    def slots(self, length: int) -> int | None:
        """Tokens that all experts together take of a row of `length`; None: any number."""
        return self.count * self.capacity(length) if self.whole_rows else None

    def hidden_width(self, width: int) -> int:
        """Hidden width of one expert in a model of `width`."""
        if self.width is not None:
            return self.width
        return -(-super().hidden_width(width) // (8 * (self.top_k + self.shared))) * 8

    def others(self) -> Dense:
        """The dense layers between those of experts."""
        return Dense(self.width, self.activation if self.dense_activation is None else self.dense_activation)

    def summary(self) -> str:
        """How many, and how many for a token."""
        shared = f" and {self.shared} shared" if self.shared else ""
        where = f" in every {self.every} layers" if self.every > 1 else ""
        return f"{self.count} experts, {self.top_k}{shared} for each token{where}"

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: experts would see later tokens, or the model has layers that they do not fit."""
        if self.expert_choice and model.causal:
            raise ConfigError(
                "config.model.feed_forward.dispatch: expert_choice compares a token with later ones; "
                f"model.family={model.family} is causal; accepted: dropless, capacity"
            )
        if model.block == "reversible":
            raise ConfigError(
                "config.model.block: reversible computes layers again from rounded activations, which may choose other "
                "experts; accepted with model.feed_forward.kind=experts: any other block"
            )
        if self.every > 1:
            self._check_layers(model)
        if model.family in ("xlnet", "transformer_xl", "funnel"):
            raise ConfigError(
                f"config.model.feed_forward.kind: experts; model.family={model.family} has more than one stream of "
                "tokens; accepted: dense"
            )

    def check_execution(self, execution: Any) -> None:
        """Raises ConfigError: an all-to-all would send any number of tokens, or there is nothing to
        compute in parts."""
        chunks = execution.feed_forward_chunks
        if chunks > 1 and self.every == 1:
            raise ConfigError(
                f"config.execution.feed_forward_chunks: {chunks}; layers of experts are computed whole, because their "
                "losses are of all tokens at once; accepted: 1"
            )
        exchange = execution.expert_exchange
        if exchange == "all_to_all" and not self.whole_rows:
            raise ConfigError(
                "config.execution.expert_exchange: all_to_all; with dispatch=dropless experts have no slots; accepted: "
                "auto, gather, ragged_all_to_all"
            )
        if exchange == "ragged_all_to_all" and self.expert_choice:
            raise ConfigError(
                "config.execution.expert_exchange: ragged_all_to_all; with dispatch=expert_choice experts fill all "
                "their slots; accepted: auto, gather, all_to_all"
            )

    def _check_layers(self, model: Any) -> None:
        where = f"config.model.feed_forward.every: {self.every}"
        if model.num_layers % self.every:
            raise ConfigError(
                f"{where} does not divide model.num_layers {model.num_layers}; accepted: a divisor of "
                f"{model.num_layers}"
            )
        alone = {
            f"model.block={model.block}": model.block in ("parallel", "parallel_norms"),
            f"model.attention.global_every={len(model.attention.period())}": len(model.attention.period()) > 1,
            f"model.family={model.family}": model.family not in ("gpt", "bert"),
            "model.bert.mask_decoder=enhanced": model.enhanced_mask_decoder,
        }
        for what, holds in alone.items():
            if holds:
                raise ConfigError(f"{where}; {what} has one kind of feed-forward layer; accepted: 1")

    def _check(self):
        if self.dense_activation is not None and self.every == 1:
            raise ConfigError(
                f"config.model.feed_forward.dense_activation: {self.dense_activation}; with every=1 no layer is dense; "
                "accepted: none"
            )
        if self.top_k > self.count:
            raise ConfigError(f"config.model.feed_forward.top_k: {self.top_k}; accepted: at most count {self.count}")
        if self.renormalize and (self.top_k == 1 or self.expert_choice):
            why = "with expert_choice a token has any number of gates" if self.expert_choice else (
                "with top_k=1 the gate would always be 1, and the router would not learn"
            )  # fmt: skip
            raise ConfigError(f"config.model.feed_forward.renormalize: True; {why}; accepted: none or false")
        if self.dispatch == "dropless" and self.capacity_factor is not None:
            raise ConfigError(
                f"config.model.feed_forward.capacity_factor: {self.capacity_factor}; accepted with dispatch=capacity "
                "or expert_choice: a number; with dropless: none"
            )
        for name in ("balance", "bias_rate"):
            if self.expert_choice and getattr(self, name):
                raise ConfigError(
                    f"config.model.feed_forward.{name}: {getattr(self, name)}; with expert_choice all experts are "
                    "equally busy; accepted: 0"
                )

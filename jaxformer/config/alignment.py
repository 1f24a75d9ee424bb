"""`model.attention.kind=alignment`: recurrent encoders and decoders, and how the decoder attends to the source."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxformer.config.attention import AttentionConfig
from jaxformer.config.checks import at_least
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Alignment(AttentionConfig, kind="alignment", accepts={"local_width": at_least(1)}, most={"local_width": 2**30}):
    """Layers of model.family=recurrent_seq2seq: bidirectional in the encoder, and in the decoder a cell that aligns its
    state with the source, see `functional.aligned_recurrent`.

    Attributes:
      cell: of both; the encoder's have half of model.width in each direction, the decoder's all of it.
      decoder: bahdanau: the state before a token chooses what to read, and what was read goes into the cell; luong: the
        state after it chooses, and what was read goes into the output.
      score: how a state of the decoder is compared with those of the source; none: the source is its last states alone.
      local: which source tokens are looked at: none: all; monotonic: those around the target's own place (local-m);
        predicted: those around a place that is predicted (local-p).
      local_width: D of the windows, which reach from D before their centre to D after it.
      input_feeding: luong: what came out at a token goes into the cell at the next.
    """

    cell: Literal["gru", "lstm"] = "gru"
    decoder: Literal["bahdanau", "luong"] = "bahdanau"
    score: Literal["none", "additive", "dot", "general", "concat"] = "additive"
    local: Literal["none", "monotonic", "predicted"] = "none"
    local_width: int = 10
    input_feeding: bool = False
    reads_source: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True

    @property
    def gates(self) -> int:
        """Gates of a cell."""
        return {"gru": 3, "lstm": 4}[self.cell]

    def summary(self) -> str:
        """The cell, the decoder and its score."""
        return f"{self.cell}, {self.decoder}'s decoder, {self.score} score"

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: a model without a source, or of an odd width."""
        if not FAMILIES[model.family].reads_source or "cross" in model.layer:
            raise ConfigError(
                "config.model.attention.kind: alignment; accepted with model.family=recurrent_seq2seq, not "
                f"{model.family}"
            )
        if model.width % 2:
            raise ConfigError(f"config.model.width: {model.width} is odd; the encoder has half of it in each direction")

    def _check(self):
        if self.input_feeding and self.decoder != "luong":
            raise ConfigError(
                f"config.model.attention.input_feeding: True; accepted with decoder=luong, not {self.decoder}"
            )
        if self.local != "none" and self.score == "none":
            raise ConfigError(f"config.model.attention.local: {self.local}; accepted with score=none: none")

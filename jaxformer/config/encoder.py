"""`model.encoder`: the stack that reads the source of a model which turns one sequence into another."""

from dataclasses import dataclass, replace

from jaxformer.config.checks import at_least
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class EncoderConfig(
    Section,
    name="model.encoder",
    accepts=dict.fromkeys(("num_layers", "source_length"), at_least(1)),
    most={"num_layers": 10_000, "source_length": 2**26},
):
    """The encoder of an encoder-decoder. Its layers are as the decoder's, bidirectional and without cross attention.

    Attributes:
      num_layers: None: as many as the decoder, model.num_layers.
      source_length: source tokens a row holds; model.context_length are those of the target.
    """

    num_layers: int | None = None
    source_length: int = 256

    def sized(self) -> "EncoderConfig":
        """This encoder on a ladder of sizes, as deep as the decoder."""
        return replace(self, num_layers=None)

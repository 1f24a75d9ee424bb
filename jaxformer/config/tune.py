"""`tune`: which layers of a model that was trained before learn, and how fast."""

from dataclasses import dataclass

from jaxformer.config.checks import at_least, between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class TuneConfig(
    Section, name="tune", accepts={"trained_layers": at_least(0), "layer_decay": between(0.01, 1.0)},
):  # fmt: skip
    """How a model is tuned that `init_from` names.

    Attributes:
      trained_layers: blocks from the top that learn, with what stands above them; the others and the embeddings stay,
        and no gradient of theirs is computed. None: all.
      layer_decay: multiplies the learning rate once for each block that stands above a parameter (Clark et al. 2020,
        appendix B).
      metric: early stopping looks at this field of an evaluation, more being better; None: at the loss.
    """

    trained_layers: int | None = None
    layer_decay: float = 1.0
    metric: str | None = None

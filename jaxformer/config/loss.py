"""`loss`: what is minimised on top of the last hidden states."""

from dataclasses import dataclass

from jaxformer.config.checks import at_least, between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class LossConfig(
    Section,
    name="loss",
    accepts={"label_smoothing": between(0.0, 0.999), "z_loss": at_least(0.0), "chunk_tokens": at_least(1)},
):
    """The loss on top of the model's last hidden states.

    Attributes:
      label_smoothing: share of the target spread over the whole vocabulary (Szegedy et al. 2016, section 7).
      z_loss: weight of log(Z)^2, which keeps logits near 0 (Chowdhery et al. 2022, section 5).
      chunk_tokens: tokens whose float32 logits exist at once; None: chosen from the vocabulary.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None

"""`model.head`: what stands on the backbone of a model that is tuned for a task, in place of its family's own head."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxformer.config.checks import at_least, between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class HeadConfig(
    Section,
    name="model.head",
    accepts={"outputs": at_least(1), "dropout": between(0.0, 0.999)},
    most={"outputs": 2**20},
):
    """The head of a task; filled in by data.objective.

    Attributes:
      task: the objective that the head is for, its name in `models.families.HEADS`; None: data.objective.
      outputs: numbers that it gives for a token; None: as many as the training examples have labels.
      dropout: rate, on what it reads.
      activation: of the pooler, the dense layer before the projection that heads of a text's label have in
        bidirectional models: tanh in BERT, gelu in DeBERTa, relu in DistilBERT.
      use_bias: of the projection; the library transformers has none in causal models.
    """

    POOLED: ClassVar[tuple[str, ...]] = ("sequence_classification", "regression")  # tasks with a pooler, if not causal
    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("tanh", "gelu", "relu")

    task: str | None = None
    outputs: int | None = None
    dropout: float = 0.1
    activation: Literal["tanh", "gelu", "relu"] = "tanh"
    use_bias: bool = True

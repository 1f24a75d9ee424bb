"""`data.labelled`: how examples with labels are read, and how they lie in rows."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config.checks import at_least
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Labelled(
    Section, name="data.labelled", accepts=dict.fromkeys(("stride", "max_answer", "max_examples"), at_least(1))
):
    """Examples with labels; data.text_field names their text.

    Attributes:
      label_field: of a line or an example, its label.
      second_field: its second text, as the other sentence of a pair, or a question about a context; None: it has none.
      labels: names of the labels, in order; None: those of the training examples, sorted.
      opening: the token that an example begins with: separator, as documents do; cls, and then [SEP] ends each of its
        texts; None: cls for a bert with sentence types, else separator.
      long: an example of more tokens than a row is cut at its end, or refused. Token classification and extractive_qa
        read it in several windows instead.
      stride: tokens by which the windows of a context overlap in extractive_qa; None: a quarter of a row.
      max_answer: tokens of an answer in extractive_qa, at most.
      null_threshold: there is no answer in extractive_qa if that scores so much higher than the best one; None: there
        always is one.
      template: how instructions write a message, with {role} and {content}; the loss is on what the assistant says, and
        on what follows it in the template.
      max_examples: use only so many training examples, spread over all of them; None: all.
    """

    label_field: str = "label"
    second_field: str | None = None
    labels: tuple[str, ...] | None = None
    opening: Literal["separator", "cls"] | None = None
    long: Literal["cut", "stop"] = "cut"
    stride: int | None = None
    max_answer: int = 30
    null_threshold: float | None = None
    template: str = "<{role}>{content}"
    max_examples: int | None = None

    def _check(self):
        if self.template.count("{content}") != 1:
            raise ConfigError(
                f"config.data.labelled.template: {self.template!r}; accepted: a text with one {{content}}"
            )
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise ConfigError(f"config.data.labelled.labels: {self.labels}; accepted: at least two, each once")

"""`data.permutation`: settings of the objective of that name."""

from dataclasses import dataclass

from jaxformer.config.checks import between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class Permutation(Section, name="data.permutation", accepts={"predict": between(1, 10_000)}):
    """Every token is predicted from those before it in an order that is drawn for its row.

    Attributes:
      predict: one in so many tokens is predicted, the last ones of the order; the others are context.
    """

    predict: int = 6

    def number(self, length: int) -> int:
        """Tokens that are predicted in a row of `length`; at least one."""
        return max(1, length // self.predict)

"""`data.mixture`: sources of text by name, each with a weight."""

from dataclasses import dataclass

from jaxformer.config.checks import above
from jaxformer.config.named import Named
from jaxformer.config.registry import SOURCES
from jaxformer.config.text import SELECTS, TextConfig
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class MixtureSource(TextConfig, name="data", accepts={"weight": above(0.0)}):
    """One source of a mixture.

    Attributes:
      weight: its share of the rows is this over the sum of all weights.
    """

    weight: float = 1.0

    def _default_source(self) -> str:
        known = [name for name in SOURCES if name != "mixture"]
        *fields, last = [name for name in SELECTS if name != "mixture"]
        raise ConfigError(
            f"config.data.source: None; accepted: one of {', '.join(known)}; {', '.join(fields)} and {last} imply it"
        )

    def _check(self):
        super()._check()
        if self.source == "mixture":
            raise ConfigError("config.data.source: 'mixture'; a mixture holds no mixture; accepted: any other source")


class Mixture(Named, name="data.mixture", of=MixtureSource):
    """Several sources of text, by name."""

    def shares(self) -> dict[str, float]:
        """Name -> share of the rows; they add up to 1."""
        weights = {name: entry.weight for name, entry in self.by_name().items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

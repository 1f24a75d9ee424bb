"""`data.span_corruption`, `data.denoising`, `data.ul2`, `data.prefix_lm`: what objectives that hide text hide of it."""

import math
from dataclasses import dataclass

from jaxformer.config.checks import at_least, between, strictly_between
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError

MOST_SENTINELS = 10_000
# Names of special tokens, each with the names that it has in other projects.
SpecialTokens = tuple[tuple[str, ...], ...]
MODES: SpecialTokens = (("[R]", "[NLU]"), ("[S]", "[S2S]"), ("[X]", "[NLG]"))  # those of UL2's own vocabulary follow


def sentinel_tokens(count: int) -> SpecialTokens:
    """The tokens that stand for hidden spans, in T5's names.

    >>> sentinel_tokens(2)
    (('<extra_id_0>',), ('<extra_id_1>',))
    """
    return tuple((f"<extra_id_{number}>",) for number in range(count))


@dataclass(frozen=True)
class SpanCorruption(
    Section,
    name="data.span_corruption",
    accepts={
        "noise_rate": strictly_between(0.0, 1.0), "mean_span": at_least(1.0), "sentinels": between(1, MOST_SENTINELS),
    },
):  # fmt: skip
    """T5's objective: hidden spans are to be restored from the rest.

    Attributes:
      noise_rate: share of the tokens that are hidden.
      mean_span: tokens of a hidden span, on average.
      sentinels: tokens that may stand for a hidden span; as many as a row may have spans, or more.
      roll: a text may begin with a hidden span and end with a visible one; otherwise it is always the other way round.
    """

    noise_rate: float = 0.15
    mean_span: float = 3.0
    sentinels: int = 100
    roll: bool = False


@dataclass(frozen=True)
class Denoising(
    Section,
    name="data.denoising",
    accepts={
        **dict.fromkeys(("infilling_rate", "mask_rate", "deletion_rate", "rotation_rate"), between(0.0, 1.0)),
        "mean_span": at_least(1.0),
    },
):
    """BART's objective: the whole text is to be restored from a noisy one. Noises are applied in this order.

    Attributes:
      permute_sentences: shuffle the sentences.
      rotation_rate: share of the texts that begin at a random token, what stood before it at the end.
      infilling_rate: share of the tokens that are hidden in spans, each replaced by one [MASK].
      mean_span: tokens of a span, on average, by a Poisson law: one of none inserts a [MASK].
      mask_rate: share of the tokens that are replaced by [MASK], one by one.
      deletion_rate: share of the tokens that are left out.
    """

    permute_sentences: bool = True
    rotation_rate: float = 0.0
    infilling_rate: float = 0.3
    mean_span: float = 3.0
    mask_rate: float = 0.0
    deletion_rate: float = 0.0

    def _check(self):
        rates = self.rotation_rate, self.infilling_rate, self.mask_rate, self.deletion_rate
        if not (self.permute_sentences or any(rates)):
            raise ConfigError(
                "config.data.denoising: no noise at all; accepted: permute_sentences, or a rate above 0 of rotation, "
                "infilling, mask or deletion"
            )


@dataclass(frozen=True)
class Ul2(
    Section,
    name="data.ul2",
    accepts={
        **dict.fromkeys(("regular", "sequential", "extreme"), at_least(0.0)), "sentinels": between(1, MOST_SENTINELS),
    },
):  # fmt: skip
    """UL2's mixture of denoisers; each row is of one of them, drawn by these weights.

    Attributes:
      regular: weight of R: 15 % of the tokens, in spans of 3 or of 8 on average.
      sequential: weight of S: the last quarter of each text.
      extreme: weight of X: half of the tokens in spans of 3, 8 or 64, or 15 % in spans of 64.
      modes: the source begins with a token that says which of the three it is.
      sentinels: tokens that may stand for a hidden span.
    """

    regular: float = 2.0
    sequential: float = 1.0
    extreme: float = 4.0
    modes: bool = True
    sentinels: int = 100

    def _check(self):
        if not self.regular + self.sequential + self.extreme > 0:
            raise ConfigError("config.data.ul2: regular, sequential and extreme are 0; accepted: one of them above 0")

    def tokens(self) -> SpecialTokens:
        """The special tokens that it needs."""
        return sentinel_tokens(self.sentinels) + (MODES if self.modes else ())

    def denoisers(self) -> list[tuple[float, int, float, float]]:
        """(share of the rows, mode, rate of hidden tokens, mean span) of each denoiser in use; mode: 0 R, 1 S, 2 X.

        >>> Ul2(extreme=0.0, sequential=0.0).denoisers()
        [(0.5, 0, 0.15, 3.0), (0.5, 0, 0.15, 8.0)]
        """
        kinds = (
            (self.regular, ((0.15, 3.0), (0.15, 8.0))),
            (self.sequential, ((0.25, math.inf),)),  # one span, which ends the text
            (self.extreme, ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))),
        )
        total = sum(weight for weight, _ in kinds)
        return [
            (weight / total / len(noises), mode, *noise)
            for mode, (weight, noises) in enumerate(kinds)
            for noise in noises
            if weight
        ]


@dataclass(frozen=True)
class PrefixLM(Section, name="data.prefix_lm", accepts=dict.fromkeys(("least", "most"), between(0.0, 1.0))):
    """A decoder-only model sees the beginning of each text from both sides, and predicts the rest.

    Attributes:
      least: the smallest share of a text that is its prefix.
      most: the largest; all between them are equally likely.
    """

    least: float = 0.0
    most: float = 1.0

    def _check(self):
        if self.least > self.most:
            raise ConfigError(
                f"config.data.prefix_lm.least: {self.least} is more than data.prefix_lm.most {self.most}; accepted: at "
                f"most {self.most}"
            )


# Section of `data` -> the objectives that read it.
READ_BY_OBJECTIVE = {
    "span_corruption": ("span_corruption",), "denoising": ("denoising",), "ul2": ("mixture",),
    "prefix_lm": ("prefix_lm",), "permutation": ("permutation",),
}  # fmt: skip

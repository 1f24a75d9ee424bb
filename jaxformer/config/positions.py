"""`model.positions`: how a model knows where a token stands."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxformer.config.attention import AttentionConfig
from jaxformer.config.checks import above, at_least, between
from jaxformer.config.choice import OR, Choice
from jaxformer.config.fields import field_types
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class PositionsConfig(Choice, group="model.positions", default="learned"):
    """Base of the kinds of positions."""

    needs_heads: ClassVar[bool] = False  # works on queries, keys or scores of heads
    whole_rows: ClassVar[bool] = False  # True if rows cannot be sharded over the mesh's context axis
    needs_scores: ClassVar[bool] = False  # adds to the scores
    any_width: ClassVar[bool] = False  # True if roles and shapes of its parameters say all that muP has to know
    needs_softmax: ClassVar[bool] = False  # adds what depends on a layer's queries and keys, which only softmax gives

    @classmethod
    def suits(cls, attention: type[AttentionConfig]) -> bool:
        """True if layers with this kind of attention can have these positions, and need them."""
        if attention.reads_in_order:
            return cls is NoPositions
        lacks = (cls.needs_heads and not attention.has_heads) or (cls.needs_scores and not attention.has_scores)
        return not lacks and (not cls.needs_softmax or attention.kind == "softmax")

    def of_layer(self, attention: Any) -> "PositionsConfig":
        """The positions of the layers with this attention, where layers differ."""
        return self

    def check_model(self, model: Any) -> None:
        """Raises ConfigError if this kind does not fit the `ModelConfig` around it."""
        if self.needs_heads and not model.attention.has_heads:
            accepted = [name for name, kind in PositionsConfig.registered.items() if not kind.needs_heads]
            raise ConfigError(
                f"config.model.positions.kind: {self.kind} needs queries and keys of heads, which "
                f"model.attention.kind={model.attention.kind} does not give; accepted there: {', '.join(accepted)}"
            )
        if self.needs_scores and not model.attention.has_scores:
            accepted = [name for name, kind in PositionsConfig.registered.items() if not kind.needs_scores]
            raise ConfigError(
                f"config.model.positions.kind: {self.kind} adds to scores, which "
                f"model.attention.kind={model.attention.kind} has not; accepted there: {', '.join(accepted)}"
            )


@dataclass(frozen=True)
class Learned(PositionsConfig, kind="learned", accepts={"offset": at_least(0)}, most={"offset": 2**20}):
    """A learned embedding for each of model.context_length positions.

    Attributes:
      offset: rows of the table before the one of the first position; RoBERTa and BART have 2, which nothing reads.
    """

    any_width: ClassVar[bool] = True
    offset: int = 0


@dataclass(frozen=True)
class Sinusoidal(PositionsConfig, kind="sinusoidal"):
    """The fixed sines and cosines of Vaswani et al. 2017, section 3.5."""

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: the model's width is odd."""
        if model.width % 2:
            raise ConfigError(f"config.model.width: {model.width} is odd; sinusoidal positions need an even width")


@dataclass(frozen=True)
class Rotary(
    PositionsConfig,
    kind="rotary",
    accepts={
        **dict.fromkeys(("base", "local_base"), above(1)), "factor": above(0), "original_length": at_least(1),
        "fraction": between(0.001, 1.0),
    },
):  # fmt: skip
    """Queries and keys turned by angles that grow with the position (Su et al. 2021).

    Attributes:
      base: the longest wave has about 2 pi times this many tokens.
      scaling: how a context longer than the original is reached.
      factor: how many times longer than original_length the context is.
      original_length: None: model.context_length / factor.
      fraction: share of each head's entries that are turned, the first ones; Pythia: 0.25.
      local_base: base in the layers that have a window, without scaling, if model.attention.global_every makes layers
        differ, as in Gemma 3; None: the same.
    """

    any_width: ClassVar[bool] = True
    base: float = 10_000.0
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    factor: float = 1.0
    original_length: int | None = None
    fraction: float = 1.0
    local_base: float | None = None
    needs_heads: ClassVar[bool] = True

    def turned(self, head_width: int) -> int:
        """How many entries of a head are turned."""
        return head_width if self.fraction == 1 else int(head_width * self.fraction)

    def of_layer(self, attention: Any) -> "Rotary":
        """Those with the base of layers that have a window, or that of the others."""
        if self.local_base is None or attention.window is None:
            return replace(self, local_base=None)
        return Rotary(self.local_base, fraction=self.fraction)

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: no heads or an odd width of them, or a context shorter than the factor."""
        super().check_model(model)
        if model.head_size % 2:
            raise ConfigError(
                f"config.model.attention.head_width: {model.head_size} is odd; rotary positions need an even width"
            )
        if self.fraction < 1 and (self.turned(model.head_size) % 2 or not self.turned(model.head_size)):
            raise ConfigError(
                f"config.model.positions.fraction: {self.fraction} of heads of width {model.head_size} is "
                f"{self.turned(model.head_size)}; accepted: an even number of entries"
            )
        if self.local_base is not None and len(model.attention.period()) == 1 and model.attention.window is None:
            raise ConfigError(
                f"config.model.positions.local_base: {self.local_base}; no layer has a window; accepted with "
                "model.attention.window and global_every"
            )
        if self.original_length is None and model.context_length < self.factor:
            raise ConfigError(
                f"config.model.positions.factor: {self.factor} is more than model.context_length "
                f"{model.context_length}; set model.positions.original_length"
            )

    def _check(self):
        if self.scaling == "none" and self.factor != 1:
            raise ConfigError(
                f"config.model.positions.factor: {self.factor} needs model.positions.scaling=linear, ntk, yarn or "
                "llama3"
            )


@dataclass(frozen=True)
class Alibi(PositionsConfig, kind="alibi"):
    """A penalty on scores that grows with the distance, by a fixed slope for each head (Press et al. 2022)."""

    any_width: ClassVar[bool] = True
    needs_heads: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True


@dataclass(frozen=True)
class T5(PositionsConfig, kind="t5"):
    """A learned bias of scores for each head and bucket of distances (Raffel et al. 2020, section 2.1)."""

    any_width: ClassVar[bool] = True
    needs_heads: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True


@dataclass(frozen=True)
class Disentangled(
    PositionsConfig, kind="disentangled", accepts={"span": between(2, 2**20), "max_distance": at_least(2)}
):
    """Scores of content with content, content with distance and distance with content (He et al. 2021); the defaults
    are those of DeBERTa v3. v1: distance=clipped, span=512, shared_projections=false, norm=false.

    Attributes:
      terms: which of the two terms with distances there are.
      distance: of the tokens, as rows of the table: log: exact up to span / 2, then logarithmic up to max_distance;
        clipped: exact.
      span: half of the rows of the table.
      max_distance: from which on all share a row.
      shared_projections: the distances' queries and keys are made by the weights of the tokens' queries and keys;
        false: by their own, in every layer.
      norm: the table is normalised.
    """

    terms: Literal["both", "c2p", "p2c"] = "both"
    distance: Literal["log", "clipped"] = "log"
    span: int = 256
    max_distance: int = 512
    shared_projections: bool = True
    norm: bool = True
    needs_heads: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True
    needs_softmax: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True

    @property
    def num_terms(self) -> int:
        """Products that make up a score."""
        return 3 if self.terms == "both" else 2

    def _check(self):
        if self.distance == "log" and self.max_distance <= self.span // 2 + 1:
            raise ConfigError(
                f"config.model.positions.max_distance: {self.max_distance}; with distance=log, distances up to half of "
                f"model.positions.span {self.span} are exact; accepted: at least {self.span // 2 + 2}"
            )


@dataclass(frozen=True)
class Relative(PositionsConfig, kind="relative"):
    """Scores of queries with sines and cosines of the distance, through weights of every layer (Dai et al. 2019,
    section 3.3), as in Transformer-XL and XLNet."""

    needs_heads: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True
    needs_softmax: ClassVar[bool] = True
    whole_rows: ClassVar[bool] = True

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: no heads, or an odd width."""
        super().check_model(model)
        if model.width % 2:
            raise ConfigError(f"config.model.width: {model.width} is odd; relative positions need an even width")


@dataclass(frozen=True)
class NoPositions(PositionsConfig, kind="none"):
    """None: a causal model can tell positions from what it sees (Kazemnejad et al. 2023)."""

    any_width: ClassVar[bool] = True


def settle_positions(model: Any) -> None:
    """Of several kinds of positions, as in "rotary or sinusoidal or none", chooses the first that suits the model.

    Args:
      model: the section; changed in place, if it is one.

    Raises:
      ConfigError: none of them suits its attention and family; one is no kind; a field that none of them has; a value
        that one of them refuses.
    """
    fields = PositionsConfig.spread(model.get("positions")) if isinstance(model, dict) else {}
    text = fields.pop("kind", None)
    if not isinstance(text, str) or len(names := [each.strip() for each in text.split(OR)]) < 2:
        return
    kinds = [PositionsConfig.find(name) for name in names]
    for name in fields:
        if not any(name in field_types(kind) for kind in kinds):
            kinds[0].type_of(name, "config.model.positions")
    made = [kind.of_fields({name: fields[name] for name in fields if name in field_types(kind)}, "") for kind in kinds]
    attention = AttentionConfig.find(AttentionConfig.spread(model.get("attention"))["kind"])
    family = FAMILIES.get(model.get("family"))

    def suits(kind: Any) -> bool:
        return kind.suits(attention) and (family is None or not family.positions or kind.kind in family.positions)

    if (chosen := next((each for each in made if suits(each)), None)) is None:
        suitable = [name for name, kind in PositionsConfig.registered.items() if suits(kind)]
        raise ConfigError(
            f"config.model.positions.kind: {text}; none of them suits model.attention.kind={attention.kind}; "
            f"accepted: one or more of {', '.join(suitable)} among them"
        )
    model["positions"] = PositionsConfig.spread(chosen)

"""Attention in linear time as kinds of `model.attention`: by features, by random ones, by projections of the row."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

from jaxformer.config.attention import AttentionConfigWithHeads
from jaxformer.config.checks import at_least
from jaxformer.config.registry import OBJECTIVES
from jaxformer.errors import ConfigError

HEADS = dict.fromkeys(("num_heads", "num_kv_heads", "head_width"), at_least(1))
MOST = {"head_width": 2**24}
LACKS = {
    "dropout": "no weights of keys to drop; accepted: model.dropout",
    "soft_cap": "no scores to cap; accepted: qk_norm",
    "window": "no window; accepted with model.attention.kind=softmax",
}


@dataclass(frozen=True)
class LinearHeads(AttentionConfigWithHeads):
    """Base of the kinds that have heads, but no scores.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    head_width: int | None = None
    qk_norm: bool = False

    has_scores: ClassVar[bool] = False
    has_implementations: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = True

    @classmethod
    def refuse(cls, name: str, where: str, hint: str = "") -> NoReturn:
        """Raises ConfigError: this kind has no field `name`; says why, of what softmax attention has."""
        if name in LACKS:
            raise ConfigError(f"{where}.{name}: no such field; model.attention.kind={cls.kind} has {LACKS[name]}")
        super().refuse(name, where, hint)

    def summary(self) -> str:
        """The kind, and how many heads."""
        return f"{self.kind}, {self.num_heads} heads"


@dataclass(frozen=True)
class LinearAttention(LinearHeads, kind="linear", accepts=HEADS, most=MOST):
    """Weights are products of elu(q) + 1 and elu(k) + 1, see `functional.linear_attention.linear_attention`.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
    """


@dataclass(frozen=True)
class Performer(
    LinearHeads, kind="performer", accepts={**HEADS, "features": at_least(2)}, most={**MOST, "features": 2**20}
):
    """Softmax attention estimated by random features, see `functional.linear_attention.favor_attention`.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
      features: of a head; None: 4 * head width.
      feature_kind: positive: one for each direction; hyperbolic: two, of less variance.
      redraw: other directions at every update and in every layer; evaluation and decoding have those that come with the
        parameters. false: those always.
    """

    features: int | None = None
    feature_kind: Literal["positive", "hyperbolic"] = "positive"
    redraw: bool = True

    def num_features(self, width: int) -> int:
        """Features of a head in a model of `width`."""
        return 4 * self.head_size(width) if self.features is None else self.features

    def num_directions(self, width: int) -> int:
        """Random directions that they are made of."""
        return self.num_features(width) // (2 if self.feature_kind == "hyperbolic" else 1)

    def summary(self) -> str:
        """The kind, its heads and features."""
        return f"{super().summary()}, {self.features or '4 x head width'} {self.feature_kind} features"

    def _check(self):
        super()._check()
        if self.feature_kind == "hyperbolic" and self.features is not None and self.features % 2:
            raise ConfigError(
                f"config.model.attention.features: {self.features}; feature_kind=hyperbolic has two for each "
                "direction; accepted: even"
            )


@dataclass(frozen=True)
class Linformer(
    LinearHeads,
    kind="linformer",
    accepts={**HEADS, "projected_length": at_least(1)},
    most={**MOST, "projected_length": 2**26},
):
    """Softmax attention to mixtures of a row's keys and values, see `functional.linformer.linformer_attention`.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
      projected_length: mixtures, k in the paper.
      sharing: of the projections; none: every head has two, for keys and for values; headwise: a layer has two;
        key_value: a layer has one; layerwise: the model has one.
    """

    projected_length: int = 64
    sharing: Literal["none", "headwise", "key_value", "layerwise"] = "headwise"

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: a causal model, or one that reads a source."""
        super().check_model(model)
        if model.causal or model.encoder is not None:
            raise ConfigError(
                "config.model.attention.kind: linformer mixes a whole row, later tokens too; accepted with a "
                f"bidirectional family, as bert, not {model.family}"
            )

    def check_data(self, data: Any) -> None:
        """Raises ConfigError: rows are of several documents."""
        if not OBJECTIVES[data.objective].one_document(data):
            raise ConfigError(
                "config.model.attention.kind: linformer mixes a whole row; needs one document per row; accepted with "
                "data.pairs=true and model.bert.next_sentence=true"
            )

"""`model`: one Transformer. GPT-2, Llama and BERT are settings of this."""

from dataclasses import dataclass, field
from typing import Literal

from jaxformer.config.attention import AttentionConfig, Softmax
from jaxformer.config.checks import above, at_least, between, one_of
from jaxformer.config.feed_forward import Dense, FeedForwardConfig
from jaxformer.config.fields import Section
from jaxformer.config.positions import Learned, PositionsConfig
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Bert(Section, name="model.bert", accepts={"token_types": at_least(0)}, most={"token_types": 2**20}):
    """What a BERT may have beyond the masked-token head.

    Attributes:
      token_types: sentence types, whose embeddings are added; 0: none.
      next_sentence: pooler and next-sentence head; needs data.pairs.
    """

    token_types: int = 2
    next_sentence: bool = False

    def _check(self):
        if self.next_sentence and self.token_types < 2:
            raise ConfigError(
                f"config.model.bert.token_types: {self.token_types}; model.bert.next_sentence needs at least 2"
            )


@dataclass(frozen=True)
class ModelConfig(
    Section,
    name="model",
    accepts={
        "family": one_of(FAMILIES),
        **dict.fromkeys(("num_layers", "width", "context_length", "vocab_size"), at_least(1)),
        "norm_epsilon": above(0),
        "dropout": between(0.0, 0.999),
    },
    most={"num_layers": 10_000, "width": 2**24, "context_length": 2**26, "vocab_size": 2**30},
):
    """What a model computes. How it is computed is `Execution`.

    Attributes:
      family: gpt: causal, predicts the next token; bert: bidirectional, restores masked tokens; or your own.
      num_layers: blocks.
      width: of the residual stream.
      context_length: tokens a row holds.
      vocab_size: entries of the embedding table; None: what the tokenizer has, rounded up to a multiple of 64.
      attention: a kind and its fields, see `config.attention`.
      positions: a kind and its fields, see `config.positions`.
      feed_forward: a kind and its fields, see `config.feed_forward`.
      bert: what a BERT may have beside its masked-token head; None: nothing, or no BERT.
      block: where the norms stand, see `functional.block.block`.
      norm: of the residual stream.
      norm_epsilon: added to the variance.
      use_bias: biases in projections, feed-forward layers and layer norms.
      dropout: rate, on embeddings and on each residual branch.
      tie_embeddings: the output table is the embedding table.
      initializer: see `functional.layer.weight_init`.
      dtype: of what is computed; parameters are float32.
    """

    family: str = "gpt"
    num_layers: int = 4
    width: int = 128
    context_length: int = 256
    vocab_size: int | None = None
    attention: AttentionConfig = field(default_factory=Softmax)
    positions: PositionsConfig = field(default_factory=Learned)
    feed_forward: FeedForwardConfig = field(default_factory=Dense)
    bert: Bert | None = None
    block: Literal["pre_norm", "post_norm", "parallel"] = "pre_norm"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    initializer: Literal["gpt2", "glorot", "scaled"] = "gpt2"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def causal(self) -> bool:
        """True if a token sees only those before it."""
        return FAMILIES[self.family].causal

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.attention.head_size(self.width)

    @property
    def token_types(self) -> int:
        """Sentence types that are embedded; 0: none."""
        return 0 if self.bert is None else self.bert.token_types

    @property
    def next_sentence(self) -> bool:
        """True if there is a next-sentence head."""
        return self.bert is not None and self.bert.next_sentence

    def _check(self):
        self.attention.check_model(self)
        self.positions.check_model(self)
        if self.bert is not None and self.family != "bert":
            raise ConfigError(f"config.model.bert: {self.bert}; accepted with model.family=bert, not {self.family}")

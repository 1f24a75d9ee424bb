"""`model`: one Transformer. GPT-2, Llama, BERT, T5 and BART are settings of this."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxformer.config.attention import AttentionConfig, Softmax
from jaxformer.config.checks import above, at_least, between, one_of
from jaxformer.config.encoder import EncoderConfig
from jaxformer.config.feed_forward import Dense, FeedForwardConfig
from jaxformer.config.fields import Section
from jaxformer.config.funnel import Funnel, funnel_parts
from jaxformer.config.head import HeadConfig
from jaxformer.config.parametrization import Parametrization, Standard
from jaxformer.config.positions import Learned, PositionsConfig
from jaxformer.config.registry import FAMILIES
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Bert(Section, name="model.bert", accepts={"token_types": at_least(0)}, most={"token_types": 2**20}):
    """What a BERT may have beyond the masked-token head.

    Attributes:
      token_types: sentence types, whose embeddings are added; 0: none.
      next_sentence: pooler and next-sentence head; needs data.pairs.
      mask_decoder: what restores masked tokens: plain: the last layer; enhanced: the last layer twice, with absolute
        positions (He et al. 2021, section 3.2), which needs disentangled ones before.
    """

    token_types: int = 2
    next_sentence: bool = False
    mask_decoder: Literal["plain", "enhanced"] = "plain"

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
        **dict.fromkeys(("num_layers", "width", "context_length", "vocab_size", "memory"), at_least(1)),
        **dict.fromkeys(("norm_epsilon", "logit_soft_cap"), above(0)),
        "dropout": between(0.0, 0.999),
    },
    most={"num_layers": 10_000, "width": 2**24, "context_length": 2**26, "vocab_size": 2**30, "memory": 2**26},
):
    """What a model computes. How it is computed is `Execution`.

    Attributes:
      family: gpt: causal, predicts the next token; bert: bidirectional, restores masked tokens; xlnet: predicts tokens
        in random orders; transformer_xl: a gpt whose rows go on from a memory; encoder_decoder: reads a source and
        predicts the next token of a target; funnel: a bert whose later layers have fewer tokens; recurrent,
        recurrent_seq2seq: gpt and encoder_decoder of recurrent layers alone; or your own.
      num_layers: blocks; of the decoder, where there is an encoder.
      width: of the residual stream.
      context_length: tokens a row holds; of the target, where there is a source.
      vocab_size: entries of the embedding table; None: what the tokenizer has, rounded up to a multiple of 64.
      attention: a kind and its fields, see `config.attention`.
      positions: a kind and its fields, see `config.positions`; in a config, of several kinds, as "rotary or none", the
        first that suits the attention.
      feed_forward: a kind and its fields, see `config.feed_forward`.
      bert: what a BERT may have beside its masked-token head; None: nothing, or no BERT.
      encoder: what reads the source; None: there is no source.
      memory: tokens before a row whose states it sees, and through which no gradient goes; None: no memory.
      funnel: the blocks of a Funnel-Transformer; None: it is none.
      head: of a task, in place of the family's own; None: there is none. Filled in by data.objective.
      block: where the norms stand, see `functional.block.block`; reversible: before each sublayer; the backward
        pass computes activations again, see `functional.reversible`.
      norm: of the residual stream; rms_norm_plus_one multiplies by 1 + its parameter, as Gemma does.
      norm_epsilon: added to the variance.
      scale_embeddings: token embeddings are multiplied by width ** 0.5, as in Gemma.
      embedding_norm: a norm follows the summed embeddings, as in BART; a BERT has one in any case.
      use_bias: biases in projections, feed-forward layers and layer norms.
      dropout: rate, on embeddings and on each residual branch.
      tie_embeddings: the output table is the embedding table.
      scale_output: last hidden states are multiplied by width ** -0.5 before the output table, as in T5 v1.0.
      logit_soft_cap: logits become logit_soft_cap * tanh(logit / logit_soft_cap), as in Gemma 2; None: no cap.
      initializer: see `functional.layer.weight_init`.
      parametrization: a kind and its fields, see `config.parametrization`.
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
    encoder: EncoderConfig | None = None
    memory: int | None = None
    funnel: Funnel | None = None
    head: HeadConfig | None = None
    block: Literal["pre_norm", "post_norm", "parallel", "parallel_norms", "sandwich", "plain", "reversible"] = (
        "pre_norm"
    )
    norm: Literal["layer_norm", "rms_norm", "rms_norm_plus_one"] = "layer_norm"
    norm_epsilon: float = 1e-5
    scale_embeddings: bool = False
    embedding_norm: bool = False
    use_bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    scale_output: bool = False
    logit_soft_cap: float | None = None
    initializer: Literal["gpt2", "glorot", "scaled", "t5"] = "gpt2"
    parametrization: Parametrization = field(default_factory=Standard)
    dtype: Literal["float32", "bfloat16"] = "float32"

    pools = False  # True of a layer of a Funnel-Transformer whose queries are half as many as its keys

    @property
    def causal(self) -> bool:
        """True if a token sees only those before it."""
        return FAMILIES[self.family].causal

    @property
    def fitted_attention(self) -> AttentionConfig:
        """The attention with the sizes that follow from context_length."""
        return self.attention.fitted(self.context_length)

    @property
    def layer(self) -> tuple[str, ...]:
        """The sublayers of each layer, in order; see `functional.sublayers`."""
        return FAMILIES[self.family].layer

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

    @property
    def enhanced_mask_decoder(self) -> bool:
        """True if the last layer is applied twice, with absolute positions."""
        return self.bert is not None and self.bert.mask_decoder == "enhanced"

    @property
    def num_blocks(self) -> int:
        """Blocks of equal parameters: layers, or groups of them where only some have experts."""
        return self.num_layers // self.feed_forward.every

    @property
    def depth(self) -> int:
        """How many times one of the blocks is applied."""
        return self.num_blocks + self.enhanced_mask_decoder

    def _check(self):
        self.fitted_attention.check_model(self)
        self.positions.check_model(self)
        self.feed_forward.check_model(self)
        if self.positions.needs_softmax and self.attention.kind != "softmax":
            raise ConfigError(
                f"config.model.positions.kind: {self.positions.kind} is made of a layer's queries and keys; accepted "
                f"with model.attention.kind=softmax, not {self.attention.kind}"
            )
        if FAMILIES[self.family].positions or self.enhanced_mask_decoder:
            self._check_streams()
        kinds = FAMILIES[self.family].positions
        if kinds and self.positions.kind not in kinds:
            raise ConfigError(
                f"config.model.positions.kind: {self.positions.kind}; model.family={self.family} needs positions "
                f"beside the embeddings; accepted: {', '.join(kinds)}"
            )
        if self.family == "xlnet" and self.attention.window is not None:
            raise ConfigError(
                f"config.model.attention.window: {self.attention.window}; model.family=xlnet sees by the order, not by "
                "the distance; accepted: none"
            )
        keeps = [name for name, traits in FAMILIES.items() if traits.memory]
        if (self.memory is None) == (self.family in keeps):
            wanted = "a number of tokens" if self.family in keeps else f"none; a number with {' or '.join(keeps)}"
            raise ConfigError(f"config.model.memory: {self.memory}; accepted with model.family={self.family}: {wanted}")
        if self.bert is not None and self.family != "bert":
            raise ConfigError(f"config.model.bert: {self.bert}; accepted with model.family=bert, not {self.family}")
        if self.enhanced_mask_decoder and self.positions.kind != "disentangled":
            raise ConfigError(
                "config.model.bert.mask_decoder: enhanced adds absolute positions to those of distances; accepted with "
                f"model.positions.kind=disentangled, not {self.positions.kind}"
            )
        if self.scale_output and self.family == "bert":
            raise ConfigError(
                "config.model.scale_output: True; a bert has a transform and a norm before its output table; accepted: "
                "false"
            )
        if self.family == "funnel" and self.funnel is None:
            object.__setattr__(self, "funnel", Funnel())
        if self.funnel is not None:
            if self.family != "funnel":
                raise ConfigError(f"config.model.funnel: {self.funnel}; accepted with model.family=funnel")
            self.funnel.check_model(self)
        if self.logit_soft_cap is not None and self.family in ("bert", "funnel", "xlnet"):
            raise ConfigError(
                f"config.model.logit_soft_cap: {self.logit_soft_cap}; a {self.family}'s logits have no cap; accepted: "
                "none"
            )
        if self.scale_embeddings and self.positions.kind == "sinusoidal":
            raise ConfigError(
                "config.model.scale_embeddings: True; model.positions.kind=sinusoidal scales them in any case; "
                "accepted: false"
            )
        if self.block == "reversible" and len(self.attention.period()) > 1:
            raise ConfigError(
                f"config.model.attention.global_every: {len(self.attention.period())}; with model.block=reversible all "
                "layers are alike; accepted: none"
            )
        if "cross" in self.layer and not isinstance(self.attention, Softmax):
            raise ConfigError(
                f"config.model.attention.kind: {self.attention.kind} has no heads for the cross attention of "
                f"model.family={self.family}; accepted there: {Softmax.kind}"
            )
        if "mlp" not in self.layer and self.feed_forward != Dense():
            raise ConfigError(
                f"config.model.feed_forward: kind={self.feed_forward.kind}, width={self.feed_forward.width} and "
                f"activation={self.feed_forward.activation}; model.family={self.family} has no feed-forward layers; "
                "accepted: the defaults, kind=dense, width=none and activation=gelu"
            )
        reads = FAMILIES[self.family].reads_source
        if reads and "cross" not in FAMILIES[self.family].layer and not self.attention.reads_source:
            readers = [name for name, kind in AttentionConfig.registered.items() if kind.reads_source]
            raise ConfigError(
                f"config.model.attention.kind: {self.attention.kind}; model.family={self.family} needs one that reads "
                f"the source; accepted: {' or '.join(readers)}"
            )
        if self.encoder is not None and not reads:
            able = " or ".join(name for name, traits in FAMILIES.items() if traits.reads_source)
            raise ConfigError(
                f"config.model.encoder: {self.encoder}; accepted with model.family={able}, not {self.family}"
            )
        if self.encoder is None and reads:
            raise ConfigError(
                f"config.model.encoder: None; model.family={self.family} reads a source; accepted: a section, with "
                "source_length"
            )
        self.parametrization.check_model(self)

    def _check_streams(self):
        """Layers whose keys are of another stream than their queries are all alike, and softmax attention."""
        wrong = [
            (self.attention.kind != "softmax", f"attention.kind: {self.attention.kind}", "softmax"),
            (len(self.attention.period()) > 1, f"attention.global_every: {len(self.attention.period())}", "none"),
            (self.block == "reversible", "block: reversible", "another"),
        ]
        for _, what, accepted in (each for each in wrong if each[0]):
            raise ConfigError(
                f"config.model.{what}; model.family={self.family} has layers whose keys are of another stream; "
                f"accepted: {accepted}"
            )


class EncoderStack:
    """What tells an encoder from the model that it is part of: bidirectional layers, without cross attention."""

    @property
    def causal(self) -> bool:
        """False: a source token sees all of its source."""
        return False

    @property
    def layer(self) -> tuple[str, ...]:
        """Those of any layer but the one that attends to the source."""
        return tuple(name for name in super().layer if name != "cross")  # type: ignore[misc]


@functools.cache
def _encoder_class(cls: type[ModelConfig]) -> Any:
    return type(f"{cls.__name__}Encoder", (EncoderStack, cls), {})


def encoder_of(cfg: ModelConfig) -> ModelConfig:
    """The stack that reads the source of a model with an encoder, as a model of its own: bidirectional, with its own
    number of layers and length."""
    assert cfg.encoder is not None
    layers = cfg.num_layers if cfg.encoder.num_layers is None else cfg.encoder.num_layers
    own = {"num_layers": layers, "context_length": cfg.encoder.source_length, "scale_output": False}
    return _encoder_class(type(cfg))(  # type: ignore[arg-type]
        **{**vars(cfg), **own}
    )


@functools.cache
def period_of(cfg: ModelConfig) -> tuple[ModelConfig, ...]:
    """A stack as models whose layers are all alike, one for each layer up to where they repeat: layer i is as those of
    entry i mod n. Mostly that is the model itself alone."""
    kinds = cfg.attention.period()
    if len(kinds) == 1:
        return (cfg,)
    return tuple(replace(cfg, attention=each, positions=cfg.positions.of_layer(each)) for each in kinds)


def layers_of(cfg: ModelConfig) -> list[tuple[ModelConfig, int]]:
    """The entries of `period_of` with the number of layers of each."""
    period = period_of(cfg)
    return [(each, len(range(number, cfg.num_layers, len(period)))) for number, each in enumerate(period)]


def stacks_of(cfg: ModelConfig, length: int | None = None) -> tuple[ModelConfig, ...]:
    """The stacks of layers of a model whose rows have `length` tokens (None: model.context_length), each as a model of
    its own: its encoder, if it has one, and itself; or the parts of a Funnel-Transformer."""
    if cfg.funnel is not None:
        return funnel_parts(cfg, cfg.context_length if length is None else length)
    return (cfg,) if cfg.encoder is None else (encoder_of(cfg), cfg)

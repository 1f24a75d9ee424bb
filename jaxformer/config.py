"""The configuration: frozen, complete, typed. Converted once at the door from an ml_collections ConfigDict
(or any nested mapping), with every error in one line that names the field, the value and what is accepted.

Absent is ``None``; units are in the names; nothing downstream asks for a default.

>>> config = from_mapping({"model": {"num_layers": 2, "width": 64, "num_heads": 4}})
>>> config.model.num_layers, config.model.kv_heads, config.optimizer.name
(2, 4, 'adamw')
>>> from_mapping({"model": {"num_layer": 2}})
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.model.num_layer: no such field; did you mean num_layers?
"""

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxformer.errors import ConfigError
from jaxformer.fields import Section, convert, from_text, is_section, kinds, nearest, shown

__all__ = [
    "CheckpointConfig", "Config", "ConfigError", "DataConfig", "DistributedConfig", "LossConfig", "MeshConfig",
    "ModelConfig", "OptimizerConfig", "TrainConfig", "diff", "from_mapping", "plain", "to_dict",
]  # fmt: skip


# The largest that are accepted; what does not fit the memory of the machine is said before anything compiles.
SIZES = {
    "num_layers": 10_000, "width": 2**24, "head_width": 2**24, "mlp_width": 2**26, "context_length": 2**26,
    "window": 2**30, "vocab_size": 2**30,
}  # fmt: skip
MOST_UNROLLED = 512
# Fields that choose the source where nothing else does, and the sources that read a field, where not all do.
SELECTS = {"files": "files", "tfds_name": "tfds", "tfds_dir": "tfds"}
READ_BY = {
    "files": ("files",), "validation_files": ("files",), "separator": ("files",), "text_field": ("files", "tfds"),
    "tfds_name": ("tfds",), "tfds_dir": ("tfds",), "tfds_train_split": ("tfds",), "tfds_validation_split": ("tfds",),
    "language_order": ("markov",), "language_zipf": ("markov",), "language_depth": ("hierarchy",),
    "language_branching": ("hierarchy",), "language_synonyms": ("hierarchy",), "language_rule_zipf": ("hierarchy",),
    **dict.fromkeys(("language_symbols", "language_tokens", "language_seed"), ("markov", "hierarchy")),
}  # fmt: skip
PATHS = ("files", "validation_files", "tfds_dir", "tokenizer_file", "cache_dir")


@dataclass(frozen=True)
class ModelConfig(Section, name="model", most=SIZES):
    """One Transformer. GPT-2, Llama and BERT are settings of this."""

    family: Literal["gpt", "bert"] = "gpt"
    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: as many as num_heads; 1: multi-query
    head_width: int | None = None  # None: width / num_heads
    mlp_width: int | None = None  # None: 4 * width, or 8/3 * width rounded up to 64 for the gated activations
    context_length: int = 256  # tokens a row holds
    vocab_size: int | None = None  # None: what the tokenizer has, rounded up to a multiple of 64
    block: Literal["pre_norm", "post_norm", "parallel"] = "pre_norm"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_epsilon: float = 1e-5
    activation: Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu"
    use_bias: bool = True
    positions: Literal["learned", "sinusoidal", "rotary", "alibi", "t5", "none"] = "learned"
    rotary_base: float = 10_000.0
    rotary_scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    rotary_factor: float = 1.0  # how many times longer than rotary_original_length the context is
    rotary_original_length: int | None = None  # None: context_length / rotary_factor
    window: int | None = None  # keys each query sees, itself included; None: all
    qk_norm: bool = False  # RMS norm of each head's queries and keys, before the rotation
    attention_soft_cap: float | None = None  # c * tanh(score / c)
    attention: Literal["auto", "xla", "chunked", "splash", "cudnn"] = "auto"  # splash: TPUs; cudnn: NVIDIA GPUs
    dropout: float = 0.0  # on embeddings and on each residual branch
    attention_dropout: float = 0.0
    tie_embeddings: bool = True
    token_types: int = 0  # BERT's sentence types; 0: none
    next_sentence: bool = False  # BERT's pooler and next-sentence head
    initializer: Literal["gpt2", "glorot", "scaled"] = "gpt2"
    remat: Literal["none", "dots", "full"] = "none"  # unrolled, XLA's CPU backend undoes it
    layers: Literal["scan", "unroll"] = "unroll"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters are float32

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads if self.head_width is None else self.head_width

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate matrix beside the up projection."""
        return self.activation in ("swiglu", "geglu")

    @property
    def mlp_size(self) -> int:
        """Hidden width of the MLP."""
        if self.mlp_width is not None:
            return self.mlp_width
        return -(-8 * self.width // (3 * 64)) * 64 if self.gated else 4 * self.width

    @property
    def causal(self) -> bool:
        """True if a token sees only those before it."""
        return self.family == "gpt"

    def _check(self):
        for name in ("num_layers", "width", "num_heads", "context_length"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("num_kv_heads", "head_width", "mlp_width", "vocab_size", "window", "rotary_original_length"):
            if getattr(self, name) is not None:
                _at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("dropout", "attention_dropout"):
            _between(f"model.{name}", getattr(self, name), 0.0, 0.999)
        _at_least("model.token_types", self.token_types, 0)
        if self.layers == "unroll" and self.num_layers > MOST_UNROLLED:
            raise ConfigError(
                f"config.model.num_layers: {self.num_layers}; accepted with model.layers=unroll: at most "
                f"{MOST_UNROLLED}, which take minutes to compile; layers=scan compiles one"
            )
        if self.head_width is None and self.width % self.num_heads:
            raise ConfigError(f"config.model.num_heads: {self.num_heads} does not divide model.width {self.width}")
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"config.model.num_kv_heads: {self.num_kv_heads} does not divide model.num_heads {self.num_heads}"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(f"config.model.head_width: {self.head_size} is odd; rotary positions need an even width")
        if self.positions == "sinusoidal" and self.width % 2:
            raise ConfigError(f"config.model.width: {self.width} is odd; sinusoidal positions need an even width")
        _above("model.norm_epsilon", self.norm_epsilon, 0)
        _above("model.rotary_base", self.rotary_base, 1)
        _above("model.rotary_factor", self.rotary_factor, 0)
        if self.rotary_scaling != "none" and self.positions != "rotary":
            raise ConfigError(
                f"config.model.rotary_scaling: {self.rotary_scaling} needs model.positions=rotary, not {self.positions}"
            )
        if self.rotary_scaling == "none" and self.rotary_factor != 1:
            raise ConfigError(
                f"config.model.rotary_factor: {self.rotary_factor} needs model.rotary_scaling=linear, ntk or yarn"
            )
        if self.rotary_original_length is None and self.context_length < self.rotary_factor:
            raise ConfigError(
                f"config.model.rotary_factor: {self.rotary_factor} is more than "
                f"model.context_length {self.context_length}; set model.rotary_original_length"
            )
        if self.attention_soft_cap is not None:
            _above("model.attention_soft_cap", self.attention_soft_cap, 0)
        if self.family == "gpt" and self.token_types:
            raise ConfigError(f"config.model.token_types: {self.token_types} needs model.family=bert")
        if self.family == "gpt" and self.next_sentence:
            raise ConfigError("config.model.next_sentence: True needs model.family=bert")
        if self.next_sentence and self.token_types < 2:
            raise ConfigError(f"config.model.token_types: {self.token_types}; model.next_sentence needs at least 2")


@dataclass(frozen=True)
class LossConfig(Section, name="loss"):
    """The loss on top of the model's last hidden states."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None  # tokens whose float32 logits exist at once; None: chosen from the vocabulary

    def _check(self):
        _between("loss.label_smoothing", self.label_smoothing, 0.0, 0.999)
        _at_least("loss.z_loss", self.z_loss, 0.0)
        if self.chunk_tokens is not None:
            _at_least("loss.chunk_tokens", self.chunk_tokens, 1)


@dataclass(frozen=True)
class DataConfig(Section, name="data", most={"max_train_bytes": 2**62, "tokenizer_vocab": 2**22}, paths=PATHS):
    """Where text comes from, how it becomes tokens, and the objective."""

    # None: files or tfds where their fields are given, else stdlib; never None in an object.
    source: Literal["stdlib", "files", "tfds", "markov", "hierarchy"] | None = None
    files: tuple[str, ...] = ()  # globs of .txt .jsonl, plain or .gz .xz .zst
    validation_files: tuple[str, ...] = ()  # None given: the held-out part is cut off the end of `files`
    validation_fraction: float = 0.1  # of the documents (of the bytes when there is one document)
    separator: str | None = None  # text between documents in a .txt file; None: one file is one document
    text_field: str = "text"  # field of a .jsonl line or TFDS example
    on_error: Literal["stop", "skip"] = "stop"  # at a .jsonl line or TFDS example that is no text; skip: count it
    tfds_name: str | None = None
    tfds_dir: str | None = None
    tfds_train_split: str = "train"
    tfds_validation_split: str = "validation"
    language_symbols: int = 32  # of a generated language (markov, hierarchy); each is a token, `tokenizer` is not read
    language_order: int = 2  # markov: tokens that decide the chances of the next
    language_zipf: float = 1.0  # markov: frequencies fall as rank ** -this
    language_depth: int = 4  # hierarchy: levels of rules
    language_branching: int = 2  # hierarchy: symbols that one is replaced by; branching ** depth make a document
    language_synonyms: int = 4  # hierarchy: rules of a symbol
    language_rule_zipf: float = 0.0  # hierarchy: their chances fall as rank ** -this; 0.0: all alike
    language_tokens: int = 2_000_000  # to train on; validation_fraction of that many more are held out
    language_seed: int = 0  # of the language and its text
    tokenizer: Literal["bytes", "chars", "bpe"] = "bpe"
    tokenizer_vocab: int = 4096  # entries of the trained BPE, special tokens included
    tokenizer_file: str | None = None  # a tokenizer.json to use instead of training one
    cache_dir: str | None = None  # None: jaxformer under the user's cache folder
    max_train_bytes: int | None = None  # use only the first bytes of the training text
    objective: Literal["next_token", "masked"] = "next_token"
    mask_rate: float = 0.15  # tokens selected for prediction
    mask_token_rate: float = 0.8  # of those, replaced by [MASK]
    mask_random_rate: float = 0.1  # of those, replaced by a random token; the rest stay as they are
    whole_word: bool = False
    pairs: bool = False  # rows of two spans with BERT's next-sentence label

    def _check(self):
        self._settle_source()
        for name in ("mask_rate", "mask_token_rate", "mask_random_rate"):
            _between(f"data.{name}", getattr(self, name), 0.0, 1.0)
        if self.mask_token_rate + self.mask_random_rate > 1 + 1e-9:
            raise ConfigError(
                f"config.data.mask_random_rate: {self.mask_random_rate} and data.mask_token_rate "
                f"{self.mask_token_rate} add up to more than 1"
            )
        _between("data.validation_fraction", self.validation_fraction, 0.0, 0.9)
        if self.max_train_bytes is not None:
            _at_least("data.max_train_bytes", self.max_train_bytes, 1)
        if self.separator == "":
            raise ConfigError("config.data.separator: '' is empty; accepted: None, or the text between documents")
        if self.source == "files" and not self.files:
            raise ConfigError("config.data.files: () is empty; data.source=files needs at least one glob")
        if self.source == "tfds" and self.tfds_name is None and self.tfds_dir is None:
            raise ConfigError("config.data.tfds_name: None; data.source=tfds needs a name or data.tfds_dir")
        if self.source in ("markov", "hierarchy"):
            self._check_language()

    def _settle_source(self):
        given = {name: source for name, source in SELECTS.items() if getattr(self, name)}
        if self.source is None:
            if len(set(given.values())) > 1:
                raise ConfigError(
                    f"config.data.source: None, and {' and '.join(f'data.{name}' for name in given)} are given; "
                    f"accepted: {' or '.join(dict.fromkeys(given.values()))}"
                )
            object.__setattr__(self, "source", next(iter(given.values()), "stdlib"))
        elif self.source == "stdlib" and given:
            name = next(iter(given))
            raise ConfigError(_unread(name, getattr(self, name), self.source))

    def _check_language(self):
        symbols, order, branching = self.language_symbols, self.language_order, self.language_branching
        _between("data.language_symbols", symbols, 2, 20_000)
        _between("data.language_order", order, 1, 20)
        _between("data.language_depth", self.language_depth, 1, 16)
        _between("data.language_branching", branching, 2, 16)
        _between("data.language_tokens", self.language_tokens, 1, 10**8)
        _between("data.language_seed", self.language_seed, 0, 2**31 - 1)
        if self.source == "markov":
            _between("data.language_zipf", self.language_zipf, 0.0, 4.0)
            if symbols > 2048:  # a table of symbols ** (order + 1) numbers
                raise ConfigError(f"config.data.language_symbols: {symbols}; a Markov language accepts at most 2048")
            _up_to("data.language_order", order, 1, lambda n: symbols ** (n + 1) <= 2**22, symbols)
        else:
            _up_to("data.language_branching", branching, 2, lambda n: symbols**n <= 2**60, symbols)
            # More rules than right-hand sides would make strings ambiguous, and their entropy unknown.
            most = min(symbols ** (branching - 1), 2**22 // symbols)
            _between("data.language_synonyms", self.language_synonyms, 1, most)
            _between("data.language_rule_zipf", self.language_rule_zipf, 0.0, 4.0)
            if branching**self.language_depth > 2**16:
                raise ConfigError(
                    f"config.data.language_depth: {self.language_depth}; a document has {branching}**"
                    f"{self.language_depth} tokens; accepted: at most 65536"
                )
        if self.validation_fraction == 0:
            raise ConfigError("config.data.validation_fraction: 0.0; a generated language needs held-out text")
        for name, reason in (
            ("pairs", "has no sentences that follow each other"),
            ("whole_word", "has no words"),
            ("tokenizer_file", "has a tokenizer of its own"),
        ):
            if getattr(self, name):
                raise ConfigError(f"config.data.{name}: {getattr(self, name)}; data.source={self.source} {reason}")


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """The update rule and its schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "wsd"] = "cosine"
    warmup_steps: int = 100
    decay_steps: int | None = None  # length of wsd's final decay; None: a fifth of the steps
    final_fraction: float = 0.1  # of learning_rate, where the decay ends
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # matrices only
    clip_norm: float | None = 1.0  # global gradient norm; None: no clipping
    ema_decay: float | None = None  # exponential moving average of the weights, used for evaluation; None: none

    def _check(self):
        _above("optimizer.learning_rate", self.learning_rate, 0)
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        if self.decay_steps is not None:
            _at_least("optimizer.decay_steps", self.decay_steps, 1)
        for name in ("beta1", "beta2"):
            _between(f"optimizer.{name}", getattr(self, name), 0.0, 0.999999)
        _between("optimizer.final_fraction", self.final_fraction, 0.0, 1.0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        _above("optimizer.epsilon", self.epsilon, 0)
        if self.clip_norm is not None:
            _above("optimizer.clip_norm", self.clip_norm, 0)
        if self.ema_decay is not None:
            _between("optimizer.ema_decay", self.ema_decay, 0.0, 0.999999)


@dataclass(frozen=True)
class MeshConfig(Section, name="mesh", most=dict.fromkeys(("data", "fsdp", "tensor", "context"), 2**20)):
    """How many devices along each axis; None fills with what is left (one axis at most)."""

    data: int | None = None
    fsdp: int | None = 1
    tensor: int | None = 1
    context: int | None = 1  # parts of each row
    shard_norms: bool = False  # split what lies between the layers over the tensor axis, by tokens

    def _check(self):
        axes = ("data", "fsdp", "tensor", "context")
        for name in axes:
            if getattr(self, name) is not None:
                _at_least(f"mesh.{name}", getattr(self, name), 1)
        if [getattr(self, name) for name in axes].count(None) > 1:
            raise ConfigError(f"config.mesh: at most one of {', '.join(axes)} may be None (fill)")


@dataclass(frozen=True)
class DistributedConfig(Section, name="distributed"):
    """How the processes of one run find each other, and how long they wait for one another.

    The three fields of the coordinator are for machines whose environment says nothing; they are given together.
    """

    mode: Literal["auto", "off", "on"] = "auto"  # on: being alone is an error; off: alone, whatever the environment
    coordinator_address: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None  # 0 to num_processes - 1
    start_timeout_seconds: int = 300  # until all processes have come
    heartbeat_timeout_seconds: int = 60  # a process that is dead or frozen ends the others after this
    stall_timeout_seconds: int = 1800  # a process that alone or with others gets nowhere ends itself after this

    def _check(self):
        given = {name: getattr(self, name) for name in ("coordinator_address", "num_processes", "process_id")}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            names = [name for name in given if name not in missing]
            raise ConfigError(f"config.distributed.{missing[0]}: None; {' and '.join(names)} cannot do without it")
        if self.mode == "off" and not missing:
            raise ConfigError("config.distributed.mode: off; a coordinator_address is given; accepted: auto or on")
        if self.coordinator_address is not None:
            host, colon, port = self.coordinator_address.rpartition(":")
            if not (host and colon and port.isdigit()):
                raise ConfigError(
                    f"config.distributed.coordinator_address: {self.coordinator_address!r}; accepted: host:port"
                )
        if self.num_processes is not None:
            _at_least("distributed.num_processes", self.num_processes, 1)
            _between("distributed.process_id", self.process_id or 0, 0, self.num_processes - 1)
        for name in ("start_timeout_seconds", "heartbeat_timeout_seconds", "stall_timeout_seconds"):
            _at_least(f"distributed.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class TrainConfig(Section, name="train", most={"batch_rows": 2**24}):
    """The loop: how long, how often, when to stop."""

    steps: int = 1000
    batch_rows: int = 16  # rows of context_length tokens in one update, all hosts and micro-batches together
    micro_batches: int = 1  # gradient accumulation
    steps_per_dispatch: int = 10  # updates inside one compiled call
    log_every_steps: int = 10
    eval_every_steps: int = 500
    eval_rows: int | None = None  # held-out rows in each evaluation on the way; None: all, as at the end
    max_bad_steps: int = 20  # in a row, not finite: skipped each, then the run stops
    early_stop_evals: int | None = None  # stop after so many evaluations without a better loss; None: never

    def _check(self):
        for name in (
            "steps", "batch_rows", "micro_batches", "steps_per_dispatch", "log_every_steps", "eval_every_steps",
            "max_bad_steps",
        ):  # fmt: skip
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("eval_rows", "early_stop_evals"):
            if getattr(self, name) is not None:
                _at_least(f"train.{name}", getattr(self, name), 1)
        if self.batch_rows % self.micro_batches:
            raise ConfigError(
                f"config.train.micro_batches: {self.micro_batches} does not divide train.batch_rows {self.batch_rows}"
            )


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """What is saved, and when."""

    save_every_steps: int | None = None  # None: only by the clock, and at the end
    save_every_minutes: float | None = 5.0  # None: only by steps, and at the end
    keep: int = 2  # newest checkpoints kept
    keep_every_steps: int | None = None  # multiples of this are kept for good; None: none

    def _check(self):
        for name in ("save_every_steps", "keep", "keep_every_steps"):
            if getattr(self, name) is not None:
                _at_least(f"checkpoint.{name}", getattr(self, name), 1)
        if self.save_every_minutes is not None:
            _above("checkpoint.save_every_minutes", self.save_every_minutes, 0)


@dataclass(frozen=True)
class Config(Section, name="", most={"seed": math.inf}, paths=("workdir",)):
    """Everything a run is made of. Its JSON form is written into the run's manifest."""

    workdir: str = "runs/default"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tensorboard: bool = False  # needs the `tensorboard` extra
    compilation_cache: bool = True  # keep compiled programs on disk between runs

    def _check(self):
        wanted = {"gpt": "next_token", "bert": "masked"}[self.model.family]
        if self.data.objective != wanted:
            raise ConfigError(
                f"config.data.objective: {self.data.objective}; model.family={self.model.family} needs {wanted}"
            )
        if self.model.next_sentence != self.data.pairs:
            raise ConfigError(
                f"config.data.pairs: {self.data.pairs}; model.next_sentence is {self.model.next_sentence}, "
                "and the two must agree"
            )
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"config.seed: {shown(self.seed)}; accepted: 0 to 2147483647")
        if self.optimizer.warmup_steps > self.train.steps:
            raise ConfigError(
                f"config.optimizer.warmup_steps: {self.optimizer.warmup_steps} is more than "
                f"train.steps {self.train.steps}; accepted: at most "
                f"{self.train.steps}"
            )


C = typing.TypeVar("C", bound=Config)


def _at_least(name: str, value: float, low: float) -> None:
    if not low <= value < float("inf"):
        finite = "a finite number, " if isinstance(low, float) else ""
        raise ConfigError(f"config.{name}: {value}; accepted: {finite}at least {low}")


def _above(name: str, value: float, low: float) -> None:
    if not low < value < float("inf"):
        raise ConfigError(f"config.{name}: {value}; accepted: a finite number above {low}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"config.{name}: {value}; accepted: {low} to {high}")


def _up_to(name: str, value: int, low: int, fits: Callable[[int], bool], symbols: int) -> None:
    if not fits(value):
        most = max(n for n in range(low, value) if fits(n))
        raise ConfigError(f"config.{name}: {value}; accepted with {symbols} symbols: {low} to {most}")


def from_mapping(
    mapping: Mapping[str, Any],
    overrides: Mapping[str, str] | None = None,
    cls: type[C] = Config,  # type: ignore[assignment]
) -> C:
    """The typed Config of a nested mapping or ml_collections ConfigDict.

    Args:
      mapping: nested, sections inside; fields that are not given take the defaults of the dataclasses.
      overrides: dotted field -> text as typed on a command line ("model.num_layers": "6"). Texts are read by the
        field's type: "none" is None where the field may be absent, tuples are separated by commas.
      cls: Config, or a dataclass that adds sections to it.

    Raises:
      ConfigError: an unknown field (names the nearest), a wrong type, a value out of range, an impossible combination.
    """
    tree = plain(mapping)
    for dotted, text in (overrides or {}).items():
        _place(tree, dotted, text, cls)
    given = [dotted.removeprefix("data.") for dotted in overrides or () if dotted.startswith("data.")]
    if given and isinstance(tree.get("data"), dict):
        _settle_source(tree["data"], given)
    return _build(cls, tree, "config")


def _settle_source(data: dict[str, Any], given: list[str]) -> None:
    """Makes the source what the command line says, which wins over the config file.

    Args:
      data: the section; changed in place.
      given: fields of it that the command line sets, all of which `data` holds.

    Raises:
      ConfigError: the command line sets a field that the source does not read.
    """
    wanted = {SELECTS[name] for name in given if name in SELECTS and data[name]}
    if "source" in given:
        wanted = {data["source"]} & {"stdlib"}
    elif wanted:
        data["source"] = None
    for name, source in SELECTS.items():  # what the config file chose by
        if wanted and source not in wanted and name not in given:
            data.pop(name, None)
    convert(data.get("source"), kinds(DataConfig)["source"], "config.data.source")
    chosen = {data["source"]} if data.get("source") else {kind for name, kind in SELECTS.items() if data.get(name)}
    if len(chosen) > 1:
        return  # refused by the section itself
    source = next(iter(chosen), "stdlib")
    for each in dataclasses.fields(DataConfig):
        if each.name in given and source not in READ_BY.get(each.name, (source,)) and data[each.name] != each.default:
            raise ConfigError(_unread(each.name, data[each.name], source))


def _unread(name: str, value: Any, source: str) -> str:
    accepted = " or ".join(f"data.source={kind}" for kind in READ_BY[name])
    return f"config.data.{name}: {shown(value)}; data.source={source} does not read it; accepted with {accepted}"


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dict of plain JSON values (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def diff(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines "field: old -> new" for every leaf in which two nested dicts differ, sorted by field."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, Mapping | None) and isinstance(b, Mapping | None) and a != b:
            lines += diff(a or {}, b or {}, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: {a!r} -> {b!r}")
    return lines


def plain(mapping: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """A nested mapping, or ConfigDict, as dicts.

    Raises:
      ConfigError: it is nested deeper than any config, as one that holds itself is.
    """
    if depth > 8:
        raise ConfigError("config: its sections are nested more than 8 deep; does one hold itself?")
    return {str(k): plain(v, depth + 1) if hasattr(v, "items") else v for k, v in mapping.items()}


def _place(tree: dict[str, Any], dotted: str, text: str, cls: Any) -> None:
    """Puts one override into the nested dict, read by the type its field has."""
    *sections, name = dotted.split(".")
    where = "config"
    for section in sections:
        cls = kinds(cls).get(section) or _unknown(cls, section, where)
        where += f".{section}"
        if not is_section(cls):
            raise ConfigError(f"{where}: is a value, not a section; there is nothing inside it to set")
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{where}: {tree!r} is not a section of fields")
    kind = kinds(cls).get(name) or _unknown(cls, name, where)
    if is_section(kind):
        inside = ", ".join(kinds(kind))
        raise ConfigError(f"{where}.{name}: is a section; set one of {inside} inside it")
    tree[name] = from_text(text, kind, f"{where}.{name}")


def _build(cls: Any, tree: Mapping[str, Any], where: str) -> Any:
    values = {}
    for name, value in tree.items():
        if name not in kinds(cls):
            _unknown(cls, name, where)
        kind = kinds(cls)[name]
        if is_section(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}.{name}: {value!r} is not a section of fields")
            values[name] = _build(kind, value, f"{where}.{name}")
        else:
            values[name] = convert(value, kind, f"{where}.{name}")
    return cls(**values)


def _unknown(cls: Any, name: str, where: str) -> typing.NoReturn:
    known = list(kinds(cls))
    near = nearest(name, known)
    if where == "config" and not near:  # a field without its section
        near = next(
            (f"{each}.{name}" for each, kind in kinds(cls).items() if is_section(kind) and name in kinds(kind)), ""
        )
    hint = f"did you mean {near}?" if near else f"accepted: {', '.join(known)}"
    raise ConfigError(f"{where}.{name}: no such field; {hint}")

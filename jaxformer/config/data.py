"""`data`: where text comes from, how it becomes tokens, and what is to be predicted."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config.checks import at_least, between, one_of
from jaxformer.config.fields import Section, shown
from jaxformer.config.registry import OBJECTIVES, SOURCES
from jaxformer.errors import ConfigError

# Field -> the source that it selects if data.source is None.
SELECTS = {"files": "files", "tfds_name": "tfds", "tfds_dir": "tfds"}
# Field -> the only sources that read it.
READ_BY = {
    "files": ("files",), "validation_files": ("files",), "separator": ("files",), "text_field": ("files", "tfds"),
    "tfds_name": ("tfds",), "tfds_dir": ("tfds",), "tfds_train_split": ("tfds",), "tfds_validation_split": ("tfds",),
    "language_order": ("markov",), "language_zipf": ("markov",), "language_depth": ("hierarchy",),
    "language_branching": ("hierarchy",), "language_synonyms": ("hierarchy",), "language_rule_zipf": ("hierarchy",),
    **dict.fromkeys(("language_symbols", "language_tokens", "language_seed"), ("markov", "hierarchy")),
}  # fmt: skip
PATHS = ("files", "validation_files", "tfds_dir", "tokenizer_file", "cache_dir")


@dataclass(frozen=True)
class DataConfig(
    Section,
    name="data",
    accepts={
        "source": one_of(SOURCES),
        "validation_fraction": between(0.0, 0.9),
        "language_symbols": between(2, 20_000),
        "language_order": between(1, 20),
        "language_zipf": between(0.0, 4.0),
        "language_depth": between(1, 16),
        "language_branching": between(2, 16),
        "language_rule_zipf": between(0.0, 4.0),
        "language_tokens": between(1, 10**8),
        "language_seed": between(0, 2**31 - 1),
        "max_train_bytes": at_least(1),
        "objective": one_of(OBJECTIVES),
        **dict.fromkeys(("mask_rate", "mask_token_rate", "mask_random_rate"), between(0.0, 1.0)),
    },
    most={"max_train_bytes": 2**62, "tokenizer_vocab": 2**22},
    paths=PATHS,
):
    """Where text comes from, how it becomes tokens, and the objective.

    Attributes:
      source: stdlib, files, tfds, or a generated language; None: files or tfds where their fields are given, else
        stdlib (Python's own source text); filled in when the config is made. A config file can bring its own.
      files: globs of .txt .jsonl, plain or .gz .xz .zst.
      validation_files: globs of held-out text; none given: the held-out part is cut off the end of `files`.
      validation_fraction: share that is held out, of the documents (of the bytes when there is one document).
      separator: text between documents in a .txt file; None: one file is one document.
      text_field: name of the text in a .jsonl line or TFDS example.
      on_error: what to do at a .jsonl line or TFDS example that is no text; skip: count it.
      tfds_name: "name", "name/config", either with ":1.0.0"; None: the dataset in tfds_dir.
      tfds_dir: folder of all datasets, or of the one where tfds_name is None; None: where TFDS keeps them.
      tfds_train_split: of the dataset, in the syntax of TFDS: "train[:90%]".
      tfds_validation_split: the held-out split, in the syntax of TFDS.
      language_symbols: of a generated language (markov, hierarchy); each is a token, `tokenizer` is not read.
      language_order: markov: tokens that decide the chances of the next.
      language_zipf: markov: frequencies fall as rank ** -this.
      language_depth: hierarchy: levels of rules.
      language_branching: hierarchy: symbols that one is replaced by; branching ** depth make a document.
      language_synonyms: hierarchy: rules of a symbol.
      language_rule_zipf: hierarchy: their chances fall as rank ** -this; 0.0: all alike.
      language_tokens: training tokens; validation_fraction times as many again are held out.
      language_seed: of the language and its text.
      tokenizer: bytes: 256 tokens; chars: the characters of the training text; bpe: byte-level pairs, trained on it.
      tokenizer_vocab: entries of the trained BPE, special tokens included.
      tokenizer_file: a tokenizer.json to use instead of training one.
      cache_dir: where tokenised text is kept; None: jaxformer under the user's cache folder.
      max_train_bytes: use only the first bytes of the training text.
      objective: what is predicted: next_token by a gpt, masked by a bert; or your own.
      mask_rate: tokens selected for prediction.
      mask_token_rate: of those, replaced by [MASK].
      mask_random_rate: of those, replaced by a random token; the rest stay as they are.
      whole_word: select whole words for prediction, not single tokens.
      pairs: rows of two spans with BERT's next-sentence label.
    """

    source: str | None = None
    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: float = 0.1
    separator: str | None = None
    text_field: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    tfds_name: str | None = None
    tfds_dir: str | None = None
    tfds_train_split: str = "train"
    tfds_validation_split: str = "validation"
    language_symbols: int = 32
    language_order: int = 2
    language_zipf: float = 1.0
    language_depth: int = 4
    language_branching: int = 2
    language_synonyms: int = 4
    language_rule_zipf: float = 0.0
    language_tokens: int = 2_000_000
    language_seed: int = 0
    tokenizer: Literal["bytes", "chars", "bpe"] = "bpe"
    tokenizer_vocab: int = 4096
    tokenizer_file: str | None = None
    cache_dir: str | None = None
    max_train_bytes: int | None = None
    objective: str = "next_token"
    mask_rate: float = 0.15
    mask_token_rate: float = 0.8
    mask_random_rate: float = 0.1
    whole_word: bool = False
    pairs: bool = False

    def _check(self):
        self._settle_source()
        if self.mask_token_rate + self.mask_random_rate > 1 + 1e-9:
            raise ConfigError(
                f"config.data.mask_random_rate: {self.mask_random_rate} and data.mask_token_rate "
                f"{self.mask_token_rate} add up to more than 1"
            )
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
        if self.source == "markov":
            if symbols > 2048:  # a table of symbols ** (order + 1) numbers
                raise ConfigError(f"config.data.language_symbols: {symbols}; a Markov language accepts at most 2048")
            _up_to("language_order", order, 1, lambda n: symbols ** (n + 1) <= 2**22, symbols)
        else:
            _up_to("language_branching", branching, 2, lambda n: symbols**n <= 2**60, symbols)
            # More rules than right-hand sides would make strings ambiguous, and their entropy unknown.
            most = min(symbols ** (branching - 1), 2**22 // symbols)
            between(1, most)("config.data.language_synonyms", self.language_synonyms)
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


def settle_source(data: dict[str, Any], given: list[str]) -> None:
    """Lets the command line choose the source, even if the config file chose another.

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
    chosen = {kind for name, kind in SELECTS.items() if data.get(name)} or {"stdlib"}
    source, *others = chosen if data.get("source") is None else [data["source"]]
    if others or source not in list(SOURCES):
        return  # refused by the section itself
    for each in dataclasses.fields(DataConfig):
        if each.name in given and source not in READ_BY.get(each.name, (source,)) and data[each.name] != each.default:
            raise ConfigError(_unread(each.name, data[each.name], source))


def _up_to(name: str, value: int, low: int, fits: Callable[[int], bool], symbols: int) -> None:
    """Raises ConfigError, with the largest value that fits, unless `fits(value)`."""
    if not fits(value):
        most = max(n for n in range(low, value) if fits(n))
        raise ConfigError(f"config.data.{name}: {value}; accepted with {symbols} symbols: {low} to {most}")


def _unread(name: str, value: Any, source: str) -> str:
    accepted = " or ".join(f"data.source={kind}" for kind in READ_BY[name])
    return f"config.data.{name}: {shown(value)}; data.source={source} does not read it; accepted with {accepted}"

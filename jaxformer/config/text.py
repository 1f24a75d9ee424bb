"""The fields of `data`, and of each source of a mixture, that say where text comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config.checks import at_least, between, one_of
from jaxformer.config.fields import Section, shown
from jaxformer.config.registry import SOURCES
from jaxformer.errors import ConfigError

LANGUAGES = ("markov", "hierarchy", "transduction")
# Field -> the source that it selects if data.source is None.
SELECTS = {"files": "files", "tokens": "tokens", "tfds_name": "tfds", "tfds_dir": "tfds", "hf_dir": "huggingface",
           "mixture": "mixture"}  # fmt: skip
# Field -> the only sources that read it.
READ_BY = {
    "mixture": ("mixture",), "files": ("files",), "validation_files": ("files",), "separator": ("files",),
    **dict.fromkeys(("text_field", "source_field", "target_field"), ("files", "tfds", "huggingface")),
    "tfds_name": ("tfds",), "tfds_dir": ("tfds",), "tfds_train_split": ("tfds",), "tfds_validation_split": ("tfds",),
    "tokens": ("tokens",), "validation_tokens": ("tokens",),
    **dict.fromkeys(("hf_dir", "hf_train_split", "hf_validation_split"), ("huggingface",)),
    "language_order": ("markov",), "language_zipf": ("markov",), "language_depth": ("hierarchy",),
    "language_branching": ("hierarchy",),
    **dict.fromkeys(("language_synonyms", "language_rule_zipf"), ("hierarchy", "transduction")),
    **dict.fromkeys(("language_task", "language_shortest", "language_longest", "language_block"), ("transduction",)),
    **dict.fromkeys(("language_symbols", "language_tokens", "language_seed"), LANGUAGES),
}  # fmt: skip
PATHS = ("files", "validation_files", "tokens", "validation_tokens", "hf_dir", "tfds_dir")


@dataclass(frozen=True)
class TextConfig(
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
        **dict.fromkeys(("language_shortest", "language_longest", "language_block"), between(1, 2**16)),
        "language_tokens": between(1, 10**8),
        "language_seed": between(0, 2**31 - 1),
        "max_train_bytes": at_least(1),
    },
    most={"max_train_bytes": 2**62},
    paths=PATHS,
    addresses=PATHS[:-1],  # TFDS opens its files itself
):
    """Where text comes from.

    Attributes:
      source: stdlib, files, tokens, tfds, huggingface, mixture, or a generated language; None: the one whose fields are
        given, else stdlib (Python's own source text); filled in when the config is made. A config file can bring one.
      files: globs of .txt .jsonl .tsv, plain or .gz .xz .zst, and of .parquet .arrow .feather.
      validation_files: globs of held-out text; none given: the held-out part is cut off the end of `files`.
      validation_fraction: share that is held out, of the documents (of the bytes when there is one document).
      separator: text between documents in a .txt file; None: one file is one document.
      text_field: name of the text in a .jsonl line or TFDS example, and of the column in a table.
      source_field: as text_field, of the source of a pair, also inside another field, as translation.de; None: "source"
        where data.objective=pairs.
      target_field: of its target; None: "target" where data.objective=pairs.
      on_error: what to do at a line, row or example that is no text; skip: count it.
      tokens: the folder that `jaxformer tokenize` wrote; or globs or a folder of Megatron's or nanoGPT's .bin files.
      validation_tokens: globs of held-out .bin files; none given: those named val, else the end of `tokens`.
      tfds_name: "name", "name/config", either with ":1.0.0"; None: the dataset in tfds_dir.
      tfds_dir: folder of all datasets, or of the one where tfds_name is None; None: where TFDS keeps them.
      tfds_train_split: of the dataset, in the syntax of TFDS: "train[:90%]".
      tfds_validation_split: the held-out split, in the syntax of TFDS.
      hf_dir: folder that save_to_disk of the library datasets wrote.
      hf_train_split: where it has splits.
      hf_validation_split: the held-out split; None: "validation" if there is one, else the end of the training split.
      language_symbols: of a generated language (markov, hierarchy, transduction); each is a token, `tokenizer` is not
        read.
      language_order: markov: tokens that decide the chances of the next.
      language_zipf: markov: frequencies fall as rank ** -this.
      language_depth: hierarchy: levels of rules.
      language_branching: hierarchy: symbols that one is replaced by; branching ** depth make a document.
      language_synonyms: hierarchy: rules of a symbol; transduction: symbols that translate it.
      language_rule_zipf: their chances fall as rank ** -this; 0.0: all alike.
      language_task: transduction: what becomes of a source; translate: synonyms of its symbols, neighbours exchanged.
      language_shortest: transduction: symbols of a source, all lengths to language_longest alike.
      language_longest: transduction: see language_shortest.
      language_block: transduction: translate exchanges neighbours within so many symbols; 1: their order stays.
      language_tokens: training tokens; validation_fraction times as many again are held out.
      language_seed: of the language and its text.
      max_train_bytes: use only the first bytes of the training text.
    """

    source: str | None = None
    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    validation_fraction: float = 0.1
    separator: str | None = None
    text_field: str = "text"
    source_field: str | None = None
    target_field: str | None = None
    on_error: Literal["stop", "skip"] = "stop"
    tokens: tuple[str, ...] = ()
    validation_tokens: tuple[str, ...] = ()
    tfds_name: str | None = None
    tfds_dir: str | None = None
    tfds_train_split: str = "train"
    tfds_validation_split: str = "validation"
    hf_dir: str | None = None
    hf_train_split: str = "train"
    hf_validation_split: str | None = None
    language_symbols: int = 32
    language_order: int = 2
    language_zipf: float = 1.0
    language_depth: int = 4
    language_branching: int = 2
    language_synonyms: int = 4
    language_rule_zipf: float = 0.0
    language_task: Literal["copy", "reverse", "sort", "translate"] = "translate"
    language_shortest: int = 4
    language_longest: int = 40
    language_block: int = 3
    language_tokens: int = 2_000_000
    language_seed: int = 0
    max_train_bytes: int | None = None

    @property
    def text_fields(self) -> str | tuple[str, str]:
        """`text_field`, or the fields of source and target."""
        if self.source_field is None or self.target_field is None:
            return self.text_field
        return self.source_field, self.target_field

    def _check(self):
        self._settle_source()
        for name, other in (("source_field", "target_field"), ("target_field", "source_field")):
            mine, others = getattr(self, name), getattr(self, other)
            if mine is not None and mine == others:
                raise ConfigError(f"config.data.{name}: {mine!r} is data.{other} as well; accepted: another field")
            if mine is not None and others is None:
                raise ConfigError(f"config.data.{other}: None; data.{name} is given; accepted: both or neither")
        if self.source == "files" and not self.files:
            raise ConfigError("config.data.files: () is empty; data.source=files needs at least one glob")
        if self.source == "tfds" and self.tfds_name is None and self.tfds_dir is None:
            raise ConfigError("config.data.tfds_name: None; data.source=tfds needs a name or data.tfds_dir")
        if self.source == "huggingface" and self.hf_dir is None:
            raise ConfigError("config.data.hf_dir: None; data.source=huggingface needs the folder of a dataset")
        if self.source == "tokens" and not self.tokens:
            raise ConfigError("config.data.tokens: () is empty; data.source=tokens needs a folder of token shards")
        if self.source == "tokens" and self.max_train_bytes is not None:
            raise ConfigError(
                f"config.data.max_train_bytes: {self.max_train_bytes}; data.source=tokens is read whole; accepted: none"
            )
        if self.source in LANGUAGES:
            self._check_language()

    def _settle_source(self):
        given = {name: source for name, source in SELECTS.items() if getattr(self, name, None)}
        if self.source is None:
            if len(set(given.values())) > 1:
                raise ConfigError(
                    f"config.data.source: None, and {' and '.join(f'data.{name}' for name in given)} are given; "
                    f"accepted: {' or '.join(dict.fromkeys(given.values()))}"
                )
            object.__setattr__(self, "source", next(iter(given.values()), None) or self._default_source())
        elif self.source == "stdlib" and given:
            name = next(iter(given))
            raise ConfigError(unread(name, getattr(self, name), self.source))

    def _default_source(self) -> str:
        return "stdlib"

    def _check_language(self):
        symbols, order, branching = self.language_symbols, self.language_order, self.language_branching
        if self.source == "markov":
            if symbols > 2048:  # a table of symbols ** (order + 1) numbers
                raise ConfigError(f"config.data.language_symbols: {symbols}; a Markov language accepts at most 2048")
            _up_to("language_order", order, 1, lambda n: symbols ** (n + 1) <= 2**22, symbols)
        elif self.source == "transduction":
            if self.language_shortest > self.language_longest:
                raise ConfigError(
                    f"config.data.language_shortest: {self.language_shortest}; accepted: at most "
                    f"data.language_longest {self.language_longest}"
                )
            if self.language_task == "translate":
                between(1, 20_000 // symbols)("config.data.language_synonyms", self.language_synonyms)
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


def _up_to(name: str, value: int, low: int, fits: Callable[[int], bool], symbols: int) -> None:
    """Raises ConfigError, with the largest value that fits, unless `fits(value)`."""
    if not fits(value):
        most = max(n for n in range(low, value) if fits(n))
        raise ConfigError(f"config.data.{name}: {value}; accepted with {symbols} symbols: {low} to {most}")


def unread(name: str, value: Any, source: str) -> str:
    """What is said of a field that the source in use does not read."""
    accepted = " or ".join(f"data.source={kind}" for kind in READ_BY[name])
    return f"config.data.{name}: {shown(value)}; data.source={source} does not read it; accepted with {accepted}"

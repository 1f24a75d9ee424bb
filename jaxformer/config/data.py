"""`data`: where text comes from, how it becomes tokens, and what is to be predicted."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config.checks import between, one_of
from jaxformer.config.denoising import READ_BY_OBJECTIVE, Denoising, PrefixLM, SpanCorruption, Ul2
from jaxformer.config.fields import field_types, options, shown
from jaxformer.config.labelled import Labelled
from jaxformer.config.mixture import Mixture, MixtureSource
from jaxformer.config.named import naming
from jaxformer.config.permutation import Permutation
from jaxformer.config.registry import OBJECTIVES, SOURCES
from jaxformer.config.suggestions import nearest
from jaxformer.config.text import LANGUAGES, READ_BY, SELECTS, TextConfig, unread
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class DataConfig(
    TextConfig,
    name="data",
    accepts={
        "objective": one_of(OBJECTIVES),
        **dict.fromkeys(("mask_rate", "mask_token_rate", "mask_random_rate"), between(0.0, 1.0)),
    },
    most={"tokenizer_vocab": 2**22},
    paths=("tokenizer_file", "cache_dir"),
    addresses=("tokenizer_file",),
):
    """How text becomes tokens, and the objective, besides where it comes from.

    Attributes:
      mixture: sources by name, each with a weight and its own fields about text; each row of a batch is of one of them.
      tokenizer: bytes: 256 tokens; chars: the characters of the training text; bpe: byte-level pairs, trained on it.
      tokenizer_vocab: entries of the trained BPE, special tokens included.
      tokenizer_file: a tokenizer.json to use instead of training one.
      cache_dir: where tokenised text is kept; None: jaxformer under the user's cache folder.
      objective: what is predicted: next_token or prefix_lm by a gpt, masked by a bert, permutation by an xlnet,
        segment_recurrence by a transformer_xl; the
        target of each of the pairs, or what span_corruption, denoising or a mixture of denoisers hid, by an
        encoder_decoder; or your own.
      mask_rate: tokens selected for prediction.
      mask_token_rate: of those, replaced by [MASK].
      mask_random_rate: of those, replaced by a random token; the rest stay as they are.
      whole_word: select whole words for prediction, not single tokens.
      pairs: rows of two spans with BERT's next-sentence label.
      long_pairs: with data.objective=pairs, what to do with one of which a side, its end token included, is longer than
        a row: stop; cut its end off; skip it.
      span_corruption: settings of that objective.
      denoising: settings of that objective.
      ul2: settings of the objective mixture.
      prefix_lm: settings of that objective.
      permutation: settings of that objective.
      labelled: settings of the objectives that learn a task from labels.
    """

    mixture: Mixture | None = None
    tokenizer: Literal["bytes", "chars", "bpe"] = "bpe"
    tokenizer_vocab: int = 4096
    tokenizer_file: str | None = None
    cache_dir: str | None = None
    objective: str = "next_token"
    mask_rate: float = 0.15
    mask_token_rate: float = 0.8
    mask_random_rate: float = 0.1
    whole_word: bool = False
    pairs: bool = False
    long_pairs: Literal["stop", "cut", "skip"] = "stop"
    span_corruption: SpanCorruption | None = None
    denoising: Denoising | None = None
    ul2: Ul2 | None = None
    prefix_lm: PrefixLM | None = None
    permutation: Permutation | None = None
    labelled: Labelled | None = None

    def _check(self):
        super()._check()
        self._settle_objective()
        if self.mask_token_rate + self.mask_random_rate > 1 + 1e-9:
            raise ConfigError(
                f"config.data.mask_random_rate: {self.mask_random_rate} and data.mask_token_rate "
                f"{self.mask_token_rate} add up to more than 1"
            )
        if self.source in LANGUAGES:
            for name, reason in (
                ("pairs", "has no sentences that follow each other"),
                ("whole_word", "has no words"),
                ("tokenizer_file", "has a tokenizer of its own"),
            ):
                if getattr(self, name):
                    raise ConfigError(f"config.data.{name}: {getattr(self, name)}; data.source={self.source} {reason}")
        if self.mixture is not None or self.source == "mixture":
            self._check_mixture()

    def _settle_objective(self):
        """The section of the objective is there, and no other; where it wants pairs, the source has some."""
        if self.objective == "pairs" and self.source in ("stdlib", "markov", "hierarchy"):
            raise ConfigError(
                f"config.data.source: {self.source}; data.objective=pairs needs pairs of texts; accepted: files, tfds, "
                "huggingface, tokens or transduction"
            )
        if self.objective == "pairs" and self.source in READ_BY["source_field"] and self.source_field is None:
            object.__setattr__(self, "source_field", "source")
            object.__setattr__(self, "target_field", "target")
        if self.source_field is not None and self.text_field != "text":
            raise ConfigError(
                f"config.data.text_field: {self.text_field!r}; pairs are read from data.source_field "
                f"{self.source_field!r} and data.target_field {self.target_field!r}; accepted: either"
            )
        tasks = tuple(name for name, traits in OBJECTIVES.items() if traits.labelled)
        for name, readers in {**READ_BY_OBJECTIVE, "labelled": tasks}.items():
            value = getattr(self, name)
            if self.objective in readers and value is None:
                object.__setattr__(self, name, options(field_types(DataConfig)[name])[0]())
            elif self.objective not in readers and value is not None:
                raise ConfigError(
                    f"config.data.{name}: {shown(value)}; data.objective={self.objective} does not read it; accepted "
                    f"with data.objective={' or '.join(readers)}"
                )
        if self.labelled is not None:
            names = {"label_field": self.labelled.label_field, "second_field": self.labelled.second_field}
            for name, value in names.items():
                if value == self.text_field:
                    raise ConfigError(
                        f"config.data.labelled.{name}: {value!r} is data.text_field as well; accepted: another field"
                    )

    def _check_mixture(self):
        if self.mixture is None:
            raise ConfigError(f"config.data.mixture: None; data.source=mixture needs {Mixture.described()}")
        if self.source != "mixture":
            raise ConfigError(unread("mixture", self.mixture, str(self.source)))
        for each in dataclasses.fields(TextConfig):
            if each.name != "source" and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"config.data.{each.name}: {shown(getattr(self, each.name))}; the sources of data.mixture have "
                    f"their own; accepted: data.mixture.NAME.{each.name}"
                )
        parts = self.parts()
        first = next((name for name, part in parts.items() if part.source in LANGUAGES), "")
        for name, part in parts.items() if first else ():
            where = f"config.data.mixture.{name}"
            if part.source not in LANGUAGES:
                raise ConfigError(
                    f"{where}.source: {part.source!r}; data.mixture.{first} is a generated language, whose symbols are "
                    f"the tokens; accepted: {' or '.join(LANGUAGES)} for all sources or for none"
                )
            if part.language_symbols != parts[first].language_symbols:
                raise ConfigError(
                    f"{where}.language_symbols: {part.language_symbols}; data.mixture.{first} has "
                    f"{parts[first].language_symbols}, and all sources share one tokenizer; accepted: the same number"
                )

    def parts(self) -> dict[str, "DataConfig"]:
        """Name -> the config of each source of a mixture, as if it were alone; of no mixture this one, without a name.

        Raises:
          ConfigError: a source cannot do what the config wants of all; names the source.
        """
        made = {"": self} if self.mixture is None else {}
        for name, entry in ({} if self.mixture is None else self.mixture.by_name()).items():
            with self.naming(name):
                own = {each.name: getattr(entry, each.name) for each in dataclasses.fields(TextConfig)}
                made[name] = dataclasses.replace(self, mixture=None, **own)
        return made

    @staticmethod
    def naming(name: str) -> Any:
        """Context in which errors about a source name it; of "" they are left as they are."""
        new = f"config.data.mixture.{name}"
        return naming("config.data", new, field_types(MixtureSource)) if name else contextlib.nullcontext()


def settle_sources(data: Any, given: list[str]) -> None:
    """Lets the command line choose the source, and that of each source of a mixture, even if the config file chose
    another.

    Args:
      data: the section; changed in place, if it is one.
      given: fields of it that the command line sets: "files", "mixture.code.files".

    Raises:
      ConfigError: the command line sets a field that the source does not read, or one of a source that is not there.
    """
    if not isinstance(data, dict) or not given:
        return
    if "objective" in given:  # what the config file set of another objective
        for name in {*READ_BY_OBJECTIVE, "labelled"} - {each.split(".")[0] for each in given}:
            data.pop(name, None)
    inside = [each.split(".") for each in given if each.count(".") == 2]
    for name in dict.fromkeys(name for _, name, _ in inside):
        with DataConfig.naming(name):
            own = [field for _, other, field in inside if other == name]
            entry, others = data["mixture"][name], [each for each in data["mixture"] if each != name]
            if entry.keys() <= set(own) and not entry.keys() & {"source", *SELECTS} and (near := nearest(name, others)):
                raise ConfigError(f"config.data.mixture.{name}: no such source; did you mean {near}?")
            settle_source(data["mixture"][name], own, "")
    settle_source(data, [each.split(".")[0] for each in given])


def settle_source(data: dict[str, Any], given: list[str], default: str = "stdlib") -> None:
    """As `settle_sources`, for one section, all of whose fields in `given` `data` holds; `default`: of no source."""
    wanted = {SELECTS[name] for name in given if name in SELECTS and data[name]}
    if "source" in given:
        wanted = {data["source"]} & {"stdlib"}
    elif wanted:
        data["source"] = None
    for name, source in SELECTS.items():  # what the config file chose by
        if wanted and source not in wanted and name not in given:
            data.pop(name, None)
    chosen = {kind for name, kind in SELECTS.items() if data.get(name)} or {default}
    source, *others = chosen if data.get("source") is None else [data["source"]]
    if others or source not in list(SOURCES):
        return  # refused by the section itself
    for each in dataclasses.fields(DataConfig):
        if each.name in given and source not in READ_BY.get(each.name, (source,)) and data[each.name] != each.default:
            raise ConfigError(unread(each.name, data[each.name], source))

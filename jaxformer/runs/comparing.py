"""Comparisons: a baseline and variants, each a scaling study of the same ladder in a folder of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxformer import records
from jaxformer.config import Config, diff, from_mapping, load, to_dict
from jaxformer.config.aliases import ALIASES
from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import Parsed
from jaxformer.scaling.comparison_table import value_text
from jaxformer.scaling.ladder import LadderConfig, StudyConfig
from jaxformer.storage import files
from jaxformer.storage.address import place

BASELINE = "baseline"
RECORDS = "records.jsonl"
WRITTEN = "comparison.json", "comparison.html"
# The text and its tokens, what is held out of it, the ladder and what it sets: where they differ, losses cannot be
# compared. How deep a width is and how many heads it has may differ.
SHARED = (
    "data", "ladder", "workdir", "mesh", "distributed", "train.eval_rows", "train.steps", "model.context_length",
    "model.vocab_size", "model.width", "model.num_layers", "model.attention.num_heads",
)  # fmt: skip
SHAPES = tuple(f"ladder.{name}" for name in LadderConfig.SHAPE)
# Two objectives that predict the same targets, so that their losses can be compared, and the fields that differ then.
OF_PAIRS = (
    "data.objective", "data.text_field", "data.source_field", "data.target_field", "data.labelled",
    "model.context_length",
)  # fmt: skip
FORMS = {
    frozenset({"pairs", "instructions"}): OF_PAIRS,
    frozenset({"next_token", "segment_recurrence"}): ("data.objective",),
}


class Entrant(NamedTuple):
    """The baseline or a variant.

    Attributes:
      name: of it and of its folder.
      values: field -> value, what it changes.
      config: its study's.
      overrides: lines "field: old -> new", against the config file.
    """

    name: str
    values: Mapping[str, Any]
    config: StudyConfig
    overrides: list[str]


def entrants(parsed: Parsed) -> list[Entrant]:
    """The baseline and the variants of a command line.

    Args:
      parsed: with `variants` beside the config: name -> {field: value}.

    Raises:
      ConfigError: no variants, a name that no folder can have, a field that is unknown, shared by all or given on the
        command line, or a value that its field refuses.
    """
    variants = parsed.beside.get("variants")
    if not isinstance(variants, Mapping) or not variants:
        raise ConfigError("config.variants: are needed; accepted: {name: {field: value}}")
    mapping = load(parsed.source)
    mapping.pop("variants")
    base, folder = to_dict(parsed.config), place(parsed.config.workdir)
    given = {ALIASES.get(field, field) for field in parsed.given}
    out = []
    for name, values in {BASELINE: {}, **variants}.items():
        where = f"config.variants.{name}"
        if wrong := _no_folder(str(name)):
            raise ConfigError(f"{where}: {wrong}; accepted: names that a folder can have")
        if not isinstance(values, Mapping) or (not values and name != BASELINE):
            raise ConfigError(f"{where}: {shown(str(values))}; accepted: {{field: value}}, one field at least")
        if name == BASELINE and values:
            raise ConfigError(f"{where}: is what the others are compared with; accepted: another name")
        objective = parsed.config.data.objective
        free = FORMS.get(frozenset({objective, str(values.get("data.objective"))}), ())
        if "data.objective" in values and not free:
            others = [name for form in FORMS for name in form - {objective} if objective in form]
            raise ConfigError(
                f"{where}: data.objective {values['data.objective']!r}; accepted beside a baseline of {objective}: "
                f"{', '.join(others) or 'none other'}"
            )
        for field in values:
            today = ALIASES.get(field) or field
            if today not in SHAPES and _within(today, SHARED) and not _within(today, free):
                raise ConfigError(
                    f"{where}: {field} is shared by all; accepted: fields of model and optimizer, {', '.join(SHAPES)}"
                )
            if today in given:
                raise ConfigError(f"{where}: {field} is given on the command line too; accepted: one of the two")
        try:
            changes = {field: value_text(value) for field, value in values.items()}
            config = from_mapping(mapping, {**parsed.given, **changes}, StudyConfig)
            config.model.attention.summary()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if free == OF_PAIRS:
            _check_pairs(where, parsed.config, config)
        told = parsed.overrides + diff(base, to_dict(replace(config, workdir=parsed.config.workdir)))
        out.append(Entrant(name, dict(values), replace(config, workdir=str(folder / name)), told))
    return out


def chosen(found: Sequence[Entrant], only: str | None) -> list[Entrant]:
    """The entrants that `only` names, with commas between, in the comparison's order; None: all of them.

    Raises:
      ConfigError: a name that none of them has.
    """
    names = None if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in names or () if name not in {each.name for each in found}]:
        raise ConfigError(f"--only: no ladder {unknown[0]!r}; accepted: {', '.join(each.name for each in found)}")
    return [each for each in found if names is None or each.name in names]


def _within(field: str, sections: Sequence[str]) -> bool:
    return any(f"{field}.".startswith(f"{each}.") for each in sections)


def _no_folder(name: str) -> str | None:
    """Why a variant's folder, beside the files of the comparison, cannot have this name; None if it can."""
    if not name or name[0] == ".":
        return "begins with a ." if name else "is empty"
    if name in WRITTEN:
        return "is a file of the comparison"
    return "holds a /" if "/" in name else files.unusable(name)


def finished(entrant: Entrant) -> list[dict[str, Any]]:
    """The records of an entrant's study; [] if no run has finished."""
    path = place(entrant.config.workdir) / RECORDS
    return records.load(path, more=records.STUDY) if path.exists() else []


def plan(
    found: Sequence[Entrant],
    settings: Any,
    verify: bool,
    log: Callable[[str], None] = print,
    *,
    baseline: Entrant | None = None,
    by_trial: bool = False,
    at_once: int | None = None,
) -> list[Any]:
    """Opens all studies, and prints what each would run; returns them. `by_trial` and `at_once` as in
    `scaling_study.print_plan`; `baseline`: what they are compared with, for where it is none of them."""
    from jaxformer.runs import scaling_study

    opened: list[Any] = []
    first = None
    objectives = {each.config.data.objective for each in found}
    if baseline is not None and baseline not in found and objectives != {baseline.config.data.objective}:
        first = scaling_study.open_study(baseline.config, verify=verify)
    for entrant in found:
        log(f"== {entrant.name}: {told(entrant)}")
        try:
            opened.append(scaling_study.open_study(entrant.config, verify=verify))
        except ConfigError as error:
            where = "" if entrant.name == BASELINE else f"config.variants.{entrant.name}: "
            raise ConfigError(f"{where}{error}") from None
        _check_targets(entrant.name, first or opened[0], opened[-1])
        scaling_study.print_plan(opened[-1], settings, log, by_trial=by_trial, at_once=at_once)
    return opened


def _check_pairs(where: str, base: Config, config: Config) -> None:
    """Raises ConfigError: a baseline and a variant do not tell all of the same pairs, whole, in their two forms."""
    pairs, row = (base, config) if base.data.objective == "pairs" else (config, base)
    assert row.data.labelled is not None
    fields = [(pairs.data.source_field, pairs.data.target_field), (row.data.text_field, row.data.labelled.label_field)]
    if fields[0] != fields[1]:
        raise ConfigError(
            f"{where}: pairs are {' and '.join(map(str, fields[0]))} of a line, with instructions "
            f"{' and '.join(map(str, fields[1]))}; accepted: the same data.source_field as data.text_field, and "
            "data.target_field as data.labelled.label_field"
        )
    room = (pairs.source_length or 0) + pairs.model.context_length
    if row.model.context_length < room:
        raise ConfigError(
            f"{where}: model.context_length {row.model.context_length} with instructions; accepted: at least {room}, "
            "the room for a pair with pairs"
        )
    for field, value, wanted in (
        ("data.long_pairs", pairs.data.long_pairs, "stop"),
        ("data.on_error", row.data.on_error, "stop"),
        ("data.labelled.max_examples", row.data.labelled.max_examples or "none", "none"),
    ):
        if value != wanted:
            raise ConfigError(f"{where}: {field} {shown(value)}; accepted where pairs have two forms: {wanted}")


def _check_targets(name: str, baseline: Any, variant: Any) -> None:
    """Raises ConfigError: a variant's study has another objective than the baseline's, and its held-out rows ask for
    other tokens."""
    first, last = baseline.config.data.objective, variant.config.data.objective
    if first == last:
        return
    one, other = (_targets(study) for study in (baseline, variant))
    if one == other:
        return
    what = f"{len(other)} held-out rows, and {len(one)}"
    if len(one) == len(other):
        wrong = next(row for row in range(len(one)) if one[row] != other[row])
        what = f"held-out row {wrong + 1} asks for other tokens than"
    raise ConfigError(
        f"config.variants.{name}.data.objective: with {last} {what} with {first}; accepted: one data.tokenizer_file, "
        "and rows with room for every pair but not for two"
    )


def _targets(study: Any) -> list[bytes]:
    """What each held-out row of a study asks for."""
    from jaxformer.runs import texts
    from jaxformer.training.sweep.kept_rows import targets_of

    every = [each.batches for each in texts.held_out_of(study.config, study.corpus).values()]
    batches = (each[number] for each in every for number in range(len(each)))
    return [row for batch in batches for row in targets_of(batch.targets, batch.weights)]


def told(entrant: Entrant) -> str:
    """What an entrant changes.

    >>> told(Entrant("a", {"model.positions": "rotary", "seed": 3}, StudyConfig(), []))
    'model.positions=rotary, seed=3'
    """
    return ", ".join(f"{field}={value_text(value)}" for field, value in entrant.values.items()) or "the config as it is"

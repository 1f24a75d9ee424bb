"""What a run that learns from labels needs beside any other: the names of its labels, and how it is scored."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from jaxformer.config import Config
from jaxformer.data.answer_spans import answer_text, best_answers
from jaxformer.data.choice_rows import best_choices
from jaxformer.data.labelled_rows import in_order
from jaxformer.data.objectives import OBJECTIVES
from jaxformer.data.sources import SOURCES
from jaxformer.errors import ConfigError
from jaxformer.models.families import HEADS
from jaxformer.runs.texts import Text
from jaxformer.training import task_metrics
from jaxformer.training.evaluate import HeldOut, Score
from jaxformer.training.metrics import WeightedMean, estimate

C = TypeVar("C", bound=Config)


def label_counts(config: Config, text: Text) -> Counter[str]:
    """How often each label is in the training examples; empty where labels have no names."""
    counts = OBJECTIVES[config.data.objective].labels
    found: Counter[str] = Counter()
    for each in text.sources.values() if counts is not None else ():
        found += counts(each.train)  # type: ignore[misc]
    return found


def fit_labels(config: C, text: Text) -> C:
    """`config` with the names of the labels filled in, those of the training examples, and the outputs of the head.

    Raises:
      ConfigError: the examples have fewer than two labels, or the head has another number of outputs.
    """
    labelled, head = config.data.labelled, config.model.head
    if labelled is None:
        return config
    names = labelled.labels
    if OBJECTIVES[config.data.objective].labels is not None:
        names = _named(config, set(label_counts(config, text))) if names is None else names
        if len(names) < 2:
            raise ConfigError(
                f"config.data.labelled.label_field: {labelled.label_field!r}; the training examples have the labels "
                f"{', '.join(names) or 'none'}; accepted: at least two"
            )
    config = replace(config, data=replace(config.data, labelled=replace(labelled, labels=names)))
    if head is None:
        return config
    outputs = HEADS[str(head.task)].count or len(names or ())
    if head.outputs not in (None, outputs):
        raise ConfigError(f"config.model.head.outputs: {head.outputs}; accepted: none, or {outputs}")
    return replace(config, model=replace(config.model, head=replace(head, outputs=outputs)))


def _named(config: Config, found: set[str]) -> tuple[str, ...]:
    """The names of labels in the order that their source gives them, or else as `in_order` does."""
    for part in config.data.parts().values():
        classes = SOURCES[str(part.source)].class_names(part)
        if found <= set(classes):
            return tuple(name for name in classes if name in found)
    return in_order(found)


def scored(held_out: dict[str, HeldOut], config: Config, text: Text) -> dict[str, HeldOut]:
    """What is held out of each source, with how its examples are scored where the means over tokens do not say all."""
    make = SCORES.get(config.data.objective)
    if make is None:
        return held_out
    return {name: each._replace(score=make(config, text, text.sources[name].validation))
            for name, each in held_out.items()}  # fmt: skip


def _classification(config: Config, text: Text, held_out: Any) -> Score:
    assert config.data.labelled is not None
    names = config.data.labelled.labels or ()
    counts = label_counts(config, text)
    usual = names.index(max(names, key=lambda name: counts[name]))

    def score(found: dict[str, np.ndarray]) -> dict[str, WeightedMean]:
        predicted, targets, weights = (found[name] for name in ("predicted", "targets", "weights"))
        rows = ((targets == usual) * weights).sum(axis=1), weights.sum(axis=1)
        more = task_metrics.classification(predicted, targets, weights, len(names))
        return more | {"majority_accuracy": estimate(*rows)}

    return score


def _regression(config: Config, text: Text, held_out: Any) -> Score:
    return lambda found: task_metrics.regression(found["predicted"], found["targets"], found["weights"])


def _extractive_qa(config: Config, text: Text, held_out: Any) -> Score:
    labelled = config.data.labelled
    assert labelled is not None

    def score(found: dict[str, np.ndarray]) -> dict[str, WeightedMean]:
        spans = best_answers(found, labelled.max_answer, labelled.null_threshold)
        answers = {number: answer_text(held_out, number, span) for number, span in spans.items()}
        right = [[text for _, text in held_out.labels[number]["answers"]] for number in answers]
        return task_metrics.answers(list(answers.values()), right)

    return score


def _multiple_choice(config: Config, text: Text, held_out: Any) -> Score:
    def score(found: dict[str, np.ndarray]) -> dict[str, WeightedMean]:
        told = best_choices(found)
        right = [(whole == held_out.labels[n], per_byte == held_out.labels[n]) for n, (whole, per_byte) in told.items()]
        names, ones = ("choice_accuracy", "per_byte_accuracy"), np.ones(len(right))
        return {name: estimate(hits, ones) for name, hits in zip(names, zip(*right, strict=True), strict=True)}

    return score


SCORES: dict[str, Callable[[Config, Text, Any], Score]] = {
    "sequence_classification": _classification,
    "token_classification": _classification,
    "regression": _regression,
    "extractive_qa": _extractive_qa,
    "multiple_choice": _multiple_choice,
}

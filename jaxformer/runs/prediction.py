"""What a tuned run says of texts that have no labels: a line for each example of some files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.config import Config
from jaxformer.data import labelled_files, text_files
from jaxformer.data.answer_spans import answer_text, best_answers
from jaxformer.data.batches import eval_batches
from jaxformer.data.choice_rows import best_choices
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_rows import tokenized
from jaxformer.data.labelled_text import Example, LabelledSplit, split_of
from jaxformer.data.unpacked_files import open_file
from jaxformer.errors import ConfigError
from jaxformer.models.attention_support import fallback_to_auto
from jaxformer.models.families import tasks_of
from jaxformer.modules import make_model
from jaxformer.runs import manifest
from jaxformer.runs.other_text import of_dataset
from jaxformer.runs.pretrain import laid_out, mesh_of, params_of, tokenizer_of
from jaxformer.runtime.program import keep_compiled_programs
from jaxformer.training.eval_step import compile_eval
from jaxformer.training.step import device_put_batch

WORD = re.compile(r"\w+|[^\w\s]+")
Line = dict[str, Any]


def predict(workdir: str | Path, files: tuple[str, ...], *, mesh: str | None = None) -> Iterator[Line]:
    """What the newest valid checkpoint of a run says of each example of some files, in order.

    Args:
      workdir: of a run that learned a task.
      files: globs of files, or folders of saved datasets, with the fields that the run's own text had; labels are not
        read.
      mesh: where, as `mesh_of` reads it.

    Returns:
      An iterator over lines to write: `label` and `probability`, `value`, `answer`, or the `spans` [first character,
      last one (excluded), label] of a text.

    Raises:
      ConfigError: there is no run, it has learned no task, or a file cannot be read.
    """
    config: Config = manifest.read_config(workdir)
    if "predict" not in tasks_of(config.model):
        raise ConfigError(
            f"--workdir: {workdir} holds a {config.model.family} that learned no task; accepted: a run whose "
            "data.objective has labels, as sequence_classification"
        )
    if config.compilation_cache:
        keep_compiled_programs()
    tokenizer, devices = tokenizer_of(workdir), mesh_of(workdir, mesh)
    examples = [_asked(each, config) for each in read(config, files)]
    split = split_of(examples, tokenizer)
    shape: Any = {"rows": config.train.global_batch_size, "context_length": config.model.context_length}
    batches = eval_batches(split, tokenizer, config.data, **shape)
    model = make_model(config.model, config.loss, fallback_to_auto(config.execution), tune=config.tune.of_weights)
    params, _ = params_of(workdir, laid_out(model.specs, devices))
    with jax.set_mesh(devices):
        step = compile_eval(model, devices)
        found = [jax.device_get(step(params, device_put_batch(batch, devices), None)[1]) for batch in batches]
    every = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    return iter(TELL[config.data.objective](config, every, split, tokenizer))


def read(config: Config, files: tuple[str, ...], flag: str = "--files") -> list[Example]:
    """The examples of some files, as a run's objective reads them, with labels or without. Raises ConfigError, which
    names the flag."""
    try:
        files = tuple(file for pattern in files for file in of_dataset(pattern))
        found = text_files.find(files, "data.files", tuple(labelled_files.READERS))
        fields: Any = {"data": config.data, "field": "data.files", "open_file": open_file, "unlabelled": True}
        return [each for path in found for each in labelled_files.examples(path, faults=Faults("stop"), **fields)]
    except ConfigError as error:
        line = str(error).replace("config.data.files", flag).replace("; data.on_error=skip skips it", "")
        raise ConfigError(line) from None


def _asked(example: Example, config: Config) -> Example:
    """The example without its label, but for what says where something is asked."""
    if config.data.objective == "extractive_qa":
        return Example(example.texts, {**example.label, "answers": []})
    if config.data.objective != "token_classification":
        return Example(example.texts)
    assert config.data.labelled is not None and config.data.labelled.labels
    if example.label is not None:
        begins, ends, _ = example.label
    else:
        words = [match.span() for match in WORD.finditer(example.texts[0])]
        begins, ends = [begin for begin, _ in words], [end for _, end in words]
    return Example(example.texts, [begins, ends, [config.data.labelled.labels[0]] * len(begins)])


def _by_example(found: dict[str, np.ndarray], *names: str) -> dict[int, list[tuple]]:
    """Example -> the named values where something was asked of it, in order."""
    out: dict[int, list[tuple]] = {}
    places = np.nonzero(found["weights"] > 0)
    for number, *values in zip(found["examples"][places], *(found[name][places] for name in names), strict=True):
        out.setdefault(int(number) - 1, []).append(tuple(value.item() for value in values))
    return out


def _labels(config: Config, found: dict[str, np.ndarray], split: LabelledSplit, tokenizer: Any) -> Iterator[Line]:
    names = _names(config)
    for _, [(label, sure)] in sorted(_by_example(found, "predicted", "probability").items()):
        yield {"label": names[label], "probability": round(sure, 4)}


def _values(config: Config, found: dict[str, np.ndarray], split: LabelledSplit, tokenizer: Any) -> Iterator[Line]:
    for _, [(value,)] in sorted(_by_example(found, "predicted").items()):
        yield {"value": value}


def _answers(config: Config, found: dict[str, np.ndarray], split: LabelledSplit, tokenizer: Any) -> Iterator[Line]:
    labelled = config.data.labelled
    assert labelled is not None
    spans = best_answers(found, labelled.max_answer, labelled.null_threshold)
    for number, label in enumerate(split.labels):
        yield {"id": label["id"], "answer": answer_text(split, number, spans.get(number))}


def _choices(config: Config, found: dict[str, np.ndarray], split: LabelledSplit, tokenizer: Any) -> Iterator[Line]:
    for _, (whole, per_byte) in best_choices(found).items():
        yield {"choice": whole, "per_byte": per_byte}


def _spans(config: Config, found: dict[str, np.ndarray], split: LabelledSplit, tokenizer: Any) -> Iterator[Line]:
    names, told = _names(config), _by_example(found, "predicted")
    for example in tokenized(split, tokenizer):
        begins, ends, _ = example.label
        of_token = np.searchsorted(example.covers[0][:, 1], np.array(begins), side="right")
        asked = np.unique(of_token)
        labels = [names[label] for (label,) in told.get(example.number, [])]
        number = np.searchsorted(asked, of_token)
        yield {"spans": [[b, e, labels[i]] for b, e, i in zip(begins, ends, number.tolist(), strict=True)]}


def _names(config: Config) -> tuple[str, ...]:
    assert config.data.labelled is not None
    return config.data.labelled.labels or ()


# Objective -> ``(config, predictions, split, tokenizer) -> iterator over lines``.
TELL: dict[str, Callable[..., Iterator[Line]]] = {
    "sequence_classification": _labels,
    "token_classification": _spans,
    "regression": _values,
    "extractive_qa": _answers,
    "multiple_choice": _choices,
}

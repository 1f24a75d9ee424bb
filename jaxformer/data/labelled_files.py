"""Examples with labels from files: JSON lines, CSV, tab-separated columns as GLUE has them, and SQuAD's JSON.

A file gives records, mappings of names to values; the objective says how a record becomes an example.

>>> record = {"text": "It rains.", "label": 1}
>>> example = EXAMPLES["sequence_classification"](record, DataConfig(objective="sequence_classification"))
>>> example, example.label
('It rains.', '1')
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.config.fields import shown
from jaxformer.data.example_forms import SPEAKER, conversation, question
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import Example
from jaxformer.data.unpacked_files import OpenFile, decoded, lines
from jaxformer.errors import ConfigError

Record = dict[str, Any]


def examples(path: Path, *, data: DataConfig, field: str, faults: Faults, open_file: OpenFile) -> Iterator[Example]:
    """The examples of one file, in order.

    Args:
      path: one of READERS' endings.
      data: the objective, and the names of the fields.
      field: of the config, to name in an error.
      faults: handles records that are no examples.
      open_file: opens the file, still compressed.

    Raises:
      ConfigError: the file cannot be read, or holds no example; depending on `faults` also a record that lacks a field,
        or whose label is not what the objective wants.
    """
    kind = next(ending for ending in READERS if f"{ending}." in f"{path.name}.")
    make, found = EXAMPLES[data.objective], False
    for place, record in READERS[kind](path, data, field, open_file):
        try:
            if isinstance(record, Exception):
                raise record
            example = make(record, data)
        except (ValueError, TypeError) as error:
            faults.meet(ConfigError(f"config.{field}: {path}:{place}: {' '.join(str(error).split())[:300]}"))
        else:
            found = True
            yield example
    if not found:
        raise ConfigError(f"config.{field}: {path} holds no example{f' ({faults.first})' if faults.first else ''}")


def json_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """(line, record or the error that it is) of each line that is not blank."""
    for number, line in enumerate(lines(path, field, open_file), 1):
        if line is None or line.strip():
            try:
                record = json.loads(line or b"")
                yield number, record if isinstance(record, dict) else ValueError("the line is no JSON object")
            except ValueError as error:
                yield number, ValueError(f"not JSON ({error})")


def column_records(
    path: Path, data: DataConfig, field: str, open_file: OpenFile, **dialect: Any
) -> Iterator[tuple[Any, Any]]:
    """(line, record) of each line but the first, which names the columns, unless those are asked for by number."""
    assert data.labelled is not None
    wanted = [data.text_field, data.labelled.label_field, data.labelled.second_field or "1"]
    text = "".join(decoded(path, field, open_file))
    reader = csv.reader(text.splitlines(keepends=True) if not dialect else text.split("\n"), **dialect)
    names = None
    for cells in reader:
        if not cells:
            continue
        if names is None and not all(name.isdecimal() for name in wanted):
            names = cells
            continue
        columns = [str(number) for number in range(1, len(cells) + 1)] if names is None else names
        if len(columns) != len(cells):
            yield reader.line_num, ValueError(f"number of columns: {len(cells)}; the first line names {len(columns)}")
            continue
        yield reader.line_num, dict(zip(columns, cells, strict=True))


def tabbed_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """As `column_records`, with tabs between columns and no quotation marks."""
    return column_records(path, data, field, open_file, delimiter="\t", quoting=csv.QUOTE_NONE)


def squad_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """(id, record) of each question in SQuAD's JSON; a file that is a list of records gives those."""
    try:
        tree = json.loads("".join(decoded(path, field, open_file)))
    except ValueError as error:
        raise ConfigError(f"config.{field}: {path}: not JSON ({error})") from None
    if isinstance(tree, list):
        yield from enumerate(tree, 1)
        return
    try:
        for article in tree["data"]:
            for paragraph in article["paragraphs"]:
                for each in paragraph["qas"]:
                    yield each["id"], {**each, "context": paragraph["context"]}
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"config.{field}: {path}: lacks {error}; accepted: SQuAD's data, paragraphs, qas, or a list of records"
        ) from None


# Ending -> ``(path, data, field, open_file) -> iterator over (place, record, or the error that stands there)``.
READERS: dict[str, Callable[..., Iterator[tuple[Any, Any]]]] = {
    ".jsonl": json_records,
    ".csv": column_records,
    ".tsv": tabbed_records,
    ".json": squad_records,
}


def value_of(record: Record, name: str, kind: Any = object) -> Any:
    """The value of a field. Raises ValueError: there is none, or it is of another kind."""
    if not isinstance(record, dict) or name not in record:
        raise ValueError(f"no field {name!r}; it has {', '.join(map(str, [*record][:12]))}")
    if not isinstance(record[name], kind):
        raise ValueError(f"the field {name!r} holds {shown(record[name])}")
    return record[name]


def texts_of(record: Record, data: DataConfig) -> list[str]:
    """The one or two texts of a record."""
    assert data.labelled is not None
    second = data.labelled.second_field
    texts = [value_of(record, name, str) for name in (data.text_field, second) if name is not None]
    if any(not text.strip() for text in texts):
        raise ValueError("a text is blank")
    return texts


def label_of(record: Record, data: DataConfig) -> Any:
    """The label of a record; None where it has none, as what is to be predicted."""
    assert data.labelled is not None
    return record.get(data.labelled.label_field)


def class_example(record: Record, data: DataConfig) -> Example:
    """An example of sequence_classification; a label that is no text has the name that JSON gives it."""
    texts, label = texts_of(record, data), label_of(record, data)
    if isinstance(label, list | dict) or label == "":
        raise ValueError(f"the label is {shown(label)}")
    return Example(texts, label if isinstance(label, str | None) else json.dumps(label))


def value_example(record: Record, data: DataConfig) -> Example:
    """An example of regression."""
    texts, label = texts_of(record, data), label_of(record, data)
    try:
        return Example(texts, None if label is None else float(label))
    except (TypeError, ValueError):
        raise ValueError(f"the label {shown(label)} is no number") from None


def span_example(record: Record, data: DataConfig) -> Example:
    """An example of token_classification: words and a label for each, or a text and [first character, last one
    (excluded), label] of each span."""
    text, label = value_of(record, data.text_field, str | list), label_of(record, data)
    if isinstance(text, list):
        words = [str(word) for word in text]
        if label is not None and (not isinstance(label, list) or len(label) != len(words)):
            raise ValueError(f"{len(words)} words and {len(label) if isinstance(label, list) else shown(label)} labels")
        ends = [sum(len(word) + 1 for word in words[: i + 1]) - 1 for i in range(len(words))]
        begins = [end - len(word) for end, word in zip(ends, words, strict=True)]
        return Example([" ".join(words)], label and [begins, ends, [str(each) for each in label]])
    if label is None:
        return Example([text])
    spans = sorted((int(begin), int(end), str(name)) for begin, end, name in label)
    for begin, end, name in spans:
        if not 0 <= begin < end <= len(text):
            raise ValueError(f"the span {begin} to {end} of {name!r} is outside its text of {len(text)} characters")
    return Example([text], [list(part) for part in zip(*spans, strict=True)] if spans else [[], [], []])


def answer_example(record: Record, data: DataConfig) -> Example:
    """An example of extractive_qa, in SQuAD's own form or in that of the library datasets."""
    answers = record.get("answers") or []
    if isinstance(answers, dict):
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": begin} for text, begin in pairs]
    found = [] if record.get("is_impossible") else [(int(a["answer_start"]), str(a["text"])) for a in answers]
    asked, context = value_of(record, "question", str), value_of(record, "context", str)
    return question(asked, context, found, str(record.get("id", "")))


def choice_example(record: Record, data: DataConfig) -> Example:
    """An example of multiple_choice: a prompt, its continuations in the field `choices` or data.labelled.second_field,
    and which of them is right, from 0. A space goes between the two where neither has one."""
    assert data.labelled is not None
    prompt, label = value_of(record, data.text_field, str), label_of(record, data)
    choices = [str(each) for each in value_of(record, data.labelled.second_field or "choices", list)]
    if label is not None and (type(label) is not int or not 0 <= label < len(choices)):
        raise ValueError(f"the label is {shown(label)}, of {len(choices)} choices counted from 0")
    if len(choices) < 2 or not all(each.strip() for each in choices):
        raise ValueError("fewer than two choices, or one is blank")
    apart = prompt[-1:].isspace() or not prompt
    spaced = [each if apart or each[0].isspace() else f" {each}" for each in choices]
    return Example([prompt, *spaced], label)


def instruction_example(record: Record, data: DataConfig) -> Example:
    """An example of instructions: messages, or a prompt in data.text_field and its answer in the label's field."""
    assert data.labelled is not None
    if "messages" in record:
        messages = value_of(record, "messages", list)
    else:
        answer = value_of(record, data.labelled.label_field, str)
        messages = [{"role": "user", "content": value_of(record, data.text_field, str)}]
        messages.append({"role": SPEAKER, "content": answer})
    return conversation(messages, data.labelled.template)


# Objective -> ``(record, data) -> Example``; raises ValueError or TypeError for a record that is none.
EXAMPLES: dict[str, Callable[[Record, DataConfig], Example]] = {
    "sequence_classification": class_example,
    "regression": value_example,
    "token_classification": span_example,
    "extractive_qa": answer_example,
    "multiple_choice": choice_example,
    "instructions": instruction_example,
}

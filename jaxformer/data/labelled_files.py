"""Examples with labels from files: JSON lines, CSV, tab-separated columns as GLUE has them, SQuAD's JSON, and tables.

A file gives records, mappings of names to values; the objective says how a record becomes an example.

>>> record = {"text": "It rains.", "label": 1}
>>> example = EXAMPLES["sequence_classification"](record, DataConfig(objective="sequence_classification"))
>>> example, example.label
('It rains.', '1')
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.config.fields import shown
from jaxformer.data import arrow_records, text_files
from jaxformer.data.example_forms import SPEAKER, conversation, question
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import Example
from jaxformer.data.line_files import reason
from jaxformer.data.unpacked_files import LINE_BYTES, OpenFile, decoded, lines
from jaxformer.errors import ConfigError

Record = dict[str, Any]


def examples(
    path: Path, *, data: DataConfig, field: str, faults: Faults, open_file: OpenFile, unlabelled: bool = False
) -> Iterator[Example]:
    """The examples of one file, in order.

    Args:
      path: one of READERS' endings.
      data: the objective, and the names of the fields.
      field: of the config, to name in an error.
      faults: handles records that are no examples.
      open_file: opens the file, still compressed.
      unlabelled: nobody reads the labels, so an example may lack one.

    Raises:
      ConfigError: the file cannot be read, or holds no example; depending on `faults` also a record that lacks a field,
        or whose label is not what the objective wants.
    """
    make, found = EXAMPLES[data.objective], False
    for place, record in READERS[text_files.kind(path)](path, data, field, open_file):
        try:
            if isinstance(record, Exception):
                raise record
            example = make(_without(data, record) if unlabelled else record, data)
            example.encode()  # a \\u escape can bring a lone surrogate, which no tokenizer takes
            json.dumps(example.label, ensure_ascii=False).encode()
            if example.label is None and not unlabelled:
                assert data.labelled is not None
                value_of(record, data.labelled.label_field)
                raise ValueError(f"the field {data.labelled.label_field!r} holds no label")
        except (ValueError, TypeError, OverflowError) as error:
            faults.meet(ConfigError(f"config.{field}: {path}:{place}: {' '.join(reason(error).split())[:300]}"))
        else:
            found = True
            yield example
    if not found:
        raise ConfigError(f"config.{field}: {path} holds no example{f' ({faults.first})' if faults.first else ''}")


def _without(data: DataConfig, record: Any) -> Any:
    """A record without its label, unless that says where something is asked."""
    assert data.labelled is not None
    if not isinstance(record, dict) or data.objective not in (
        "sequence_classification",
        "regression",
        "multiple_choice",
    ):
        return record
    return {**record, data.labelled.label_field: None}


def json_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """(line, record or the error that it is) of each line that is not blank."""
    for number, line in enumerate(lines(path, field, open_file), 1):
        if line is None or line.strip():
            try:
                record = json.loads(line or b"")
                yield number, record if isinstance(record, dict) else ValueError("the line is no JSON object")
            except RecursionError as error:
                yield number, ValueError(reason(error))
            except ValueError as error:
                yield number, ValueError(f"not JSON ({error})")


def column_records(
    path: Path, data: DataConfig, field: str, open_file: OpenFile, **dialect: Any
) -> Iterator[tuple[Any, Any]]:
    """(line, record) of each line but the first, which names the columns, unless those are asked for by number."""
    assert data.labelled is not None
    wanted = [data.text_field, data.labelled.label_field, data.labelled.second_field or "1"]
    csv.field_size_limit(LINE_BYTES)  # the library's own is 128 KiB
    source = _Lines("".join(decoded(path, field, open_file)))
    reader, names, number = csv.reader(source, **dialect), None, 0
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, ValueError(str(error))
            continue
        if source.ended:  # the record goes on where the file does not
            yield number, ValueError("a quotation mark that nothing closes")
        elif names is None and cells and not all(name.isdecimal() for name in wanted):
            names = cells
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise ConfigError(
                    f"config.{field}: {path}:{number}: {names.count(twice[0])} columns {twice[0]!r}; accepted: one"
                )
        elif cells:
            columns = [str(column) for column in range(1, len(cells) + 1)] if names is None else names
            if len(columns) == len(cells):
                yield number, dict(zip(columns, cells, strict=True))
            else:
                what = f"number of columns: {len(cells)}; the first line names {len(columns)}"
                yield number, ValueError(what)


class _Lines:
    """The lines of a text, which end in \\n, \\r or both.

    Attributes:
      ended: whether one was asked for after the last.
    """

    def __init__(self, text: str):
        self._lines, self.ended = io.StringIO(text, newline=""), False

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._lines.readline()
        self.ended = not line
        if self.ended:
            raise StopIteration
        return line


def tabbed_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """As `column_records`, with tabs between columns and no quotation marks."""
    return column_records(path, data, field, open_file, delimiter="\t", quoting=csv.QUOTE_NONE)


def squad_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """(id, record) of each question in SQuAD's JSON; a file that is a list of records gives those."""
    try:
        tree = json.loads("".join(decoded(path, field, open_file)))
    except RecursionError as error:
        raise ConfigError(f"config.{field}: {path}: {reason(error)}") from None
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
        what = f"lacks {error}" if isinstance(error, KeyError) else "is of another form"
        raise ConfigError(
            f"config.{field}: {path}: {what}; accepted: SQuAD's data, paragraphs, qas, or a list of records"
        ) from None


TABLES = {".parquet": arrow_records.parquet, ".arrow": arrow_records.ipc, ".feather": arrow_records.ipc}
# Ending -> ``(path, data, field, open_file) -> iterator over (place, record, or the error that stands there)``.
READERS: dict[str, Callable[..., Iterator[tuple[Any, Any]]]] = {
    ".jsonl": json_records,
    ".csv": column_records,
    ".tsv": tabbed_records,
    ".json": squad_records,
    **TABLES,
}


def value_of(record: Record, name: str, kind: Any = object) -> Any:
    """The value of a field. Raises ValueError: there is none, or it is of another kind."""
    if not isinstance(record, dict):
        raise ValueError(f"{shown(record)} is no JSON object")
    if name not in record:
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
    """The label of a record; None where it has none, as what is to be predicted: tables write NaN for that."""
    assert data.labelled is not None
    found = record.get(data.labelled.label_field)
    return None if isinstance(found, float) and math.isnan(found) else found


def class_example(record: Record, data: DataConfig) -> Example:
    """An example of sequence_classification; a label that is no text has the name that JSON gives it."""
    texts, label = texts_of(record, data), label_of(record, data)
    if isinstance(label, list | dict) or label == "":
        raise ValueError(f"the label is {shown(label)}; accepted: a text, a number or a truth value")
    return Example(texts, label if isinstance(label, str | None) else json.dumps(label))


def value_example(record: Record, data: DataConfig) -> Example:
    """An example of regression."""
    texts, label = texts_of(record, data), label_of(record, data)
    try:
        return Example(texts, None if label is None else float(label))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the label {shown(label)} is no number") from None


def span_example(record: Record, data: DataConfig) -> Example:
    """An example of token_classification: words and a label for each, or a text and [first character, last one
    (excluded), label] of each span."""
    text, label = value_of(record, data.text_field, str | list), label_of(record, data)
    if isinstance(text, list):
        words = [_named(word, "a word") for word in text]
        if not any(word.strip() for word in words):
            raise ValueError("a text is blank")
        if label is not None and (not isinstance(label, list) or len(label) != len(words)):
            raise ValueError(f"{len(words)} words and {len(label) if isinstance(label, list) else shown(label)} labels")
        ends = [sum(len(word) + 1 for word in words[: i + 1]) - 1 for i in range(len(words))]
        begins = [end - len(word) for end, word in zip(ends, words, strict=True)]
        return Example([" ".join(words)], label and [begins, ends, [_named(each, "a label") for each in label]])
    if label is None:
        return Example([text])
    try:
        spans = sorted((_place(begin), _place(end), _named(name, "a label")) for begin, end, name in label)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the label is {shown(label)} ({error}); accepted: a list of [first character, last one (excluded), label]"
        ) from None
    for begin, end, name in spans:
        if not 0 <= begin < end <= len(text):
            raise ValueError(f"the span {begin} to {end} of {name!r} is outside its text of {len(text)} characters")
    return Example([text], [list(part) for part in zip(*spans, strict=True)] if spans else [[], [], []])


def _named(value: Any, what: str) -> str:
    """A word, or the name of a label, as text."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{what} is {shown(value)}")
    return str(value)


def _place(value: Any) -> int:
    """A character's number."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is no character's number")
    return int(value)


def answer_example(record: Record, data: DataConfig) -> Example:
    """An example of extractive_qa, in SQuAD's own form or in that of the library datasets."""
    answers = record.get("answers") or []
    try:
        if isinstance(answers, dict):
            found = [(_place(b), str(t)) for t, b in zip(answers["text"], answers["answer_start"], strict=True)]
        else:
            found = [(_place(each["answer_start"]), str(each["text"])) for each in answers]
    except (TypeError, ValueError, KeyError):
        raise ValueError(
            f"the answers are {shown(answers)}; accepted: a list of objects with text and answer_start, or one object "
            "with a list of each"
        ) from None
    if record.get("is_impossible"):
        found = []
    asked, context = value_of(record, "question", str), value_of(record, "context", str)
    return question(asked, context, found, str(record.get("id", "")))


def choice_example(record: Record, data: DataConfig) -> Example:
    """An example of multiple_choice: a prompt, its continuations in the field `choices` or data.labelled.second_field,
    and which of them is right, from 0. A space goes between the two where neither has one."""
    assert data.labelled is not None
    prompt, label = value_of(record, data.text_field, str), label_of(record, data)
    choices = [str(each) for each in value_of(record, data.labelled.second_field or "choices", list)]
    if isinstance(label, str) and re.fullmatch("[0-9]{1,9}", label):  # the name of a class, or a column of text
        label = int(label)
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

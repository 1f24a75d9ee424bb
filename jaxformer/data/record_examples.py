"""How a record of a file or a dataset, a mapping of names to values, becomes an example of an objective.

>>> record = {"text": "It rains.", "label": 1}
>>> example = EXAMPLES["sequence_classification"](record, DataConfig(objective="sequence_classification"))
>>> example, example.label
('It rains.', '1')
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.config.fields import shown
from jaxformer.data.example_forms import SPEAKER, conversation, question
from jaxformer.data.labelled_text import Example

Record = dict[str, Any]


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

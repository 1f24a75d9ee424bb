"""Examples with labels: what files say becomes what rows ask, each label once, each example in a segment of its own."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.config import DataConfig, Labelled
from jaxformer.data import (
    answer_spans,
    choice_rows,
    labelled_files,
    labelled_text,
    python_tasks,
    record_examples,
    tokenizers,
)
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.example_forms import conversation, question
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import Example
from jaxformer.data.objectives import OBJECTIVES
from jaxformer.data.unpacked_files import open_file
from jaxformer.errors import ConfigError

SOURCE = "def naïve(x):\n    # '→' is no string\n    return x + 1.5 if x else 'é→' * 2\n" * 5
TOKENIZER = tokenizers.train("bpe", [SOURCE], 300)


def data_of(objective, **fields):
    labelled = Labelled(opening=fields.pop("opening", "separator"), **fields)
    return DataConfig(objective=objective, labelled=labelled)


def rows_of(examples, objective, length=24, **fields):
    """(batches of the whole, the split, the config with labels filled in)."""
    split, data = labelled_text.split_of(examples, TOKENIZER), data_of(objective, **fields)
    counts = OBJECTIVES[objective].labels
    if counts is not None:
        names = tuple(sorted(counts(split)))
        data = replace(data, labelled=replace(data.labelled, labels=names))
    return eval_batches(split, TOKENIZER, data, rows=4, context_length=length), split, data


def test_every_label_of_a_token_counts_once_at_the_token_that_begins_it():
    (example,) = python_tasks.token_kinds(SOURCE)
    batches, _, data = rows_of([example], "token_classification")
    asked = []
    for batch in batches:
        for row, column in np.argwhere(batch.weights > 0):
            text = TOKENIZER.decode([batch.tokens[row, column]])
            asked.append((text, data.labelled.labels[batch.targets[row, column]]))
        assert (batch.inputs["examples"] > 0).sum() == batch.weights.sum()
    begins, ends, names = example.label
    spans = [(SOURCE[b:e], name) for b, e, name in zip(begins, ends, names, strict=True)]
    assert ("'é→'", "string") in spans and ("# '→' is no string", "comment") in spans
    assert 0.5 * len(spans) < len(asked) <= len(spans)  # of spans that one token holds, the first is asked
    order = iter(spans)
    for text, name in asked:  # in the order of the text
        assert any(name == kind and (span.startswith(text.strip()[:1])) for span, kind in order), (text, name)


def test_examples_of_a_row_have_segments_of_their_own():
    examples = [Example(["a" * n], "yes" if n % 2 else "no") for n in (1, 2, 3, 9, 40)]
    batches, *_ = rows_of(examples, "sequence_classification")
    numbers = []
    for batch in batches:
        first = (batch.positions == 0) & (batch.segments > 0)
        np.testing.assert_array_equal(batch.weights > 0, first)
        np.testing.assert_array_equal(batch.inputs["examples"] > 0, first)
        assert (batch.tokens[first] == TOKENIZER.separator_id).all()
        numbers += batch.inputs["examples"][first].tolist()
        labels = [len(examples[number - 1]) % 2 for number in batch.inputs["examples"][first]]
        assert batch.targets[first].tolist() == labels  # no, yes
    assert numbers == [1, 2, 3, 4, 5]


def test_two_texts_between_special_tokens():
    batches, *_ = rows_of(
        [Example(["a", "bc"], "x"), Example(["d", "e"], "y")], "sequence_classification", opening="cls"
    )
    batch, t = batches[0], TOKENIZER
    ids = [t.cls_id, *t.encode("a"), t.sep_id, *t.encode("bc"), t.sep_id]
    assert batch.tokens[0, : len(ids)].tolist() == ids
    assert batch.inputs["token_types"][0, : len(ids)].tolist() == [0, 0, 0] + [1] * (len(ids) - 3)


def test_training_batches_are_a_function_of_seed_and_step():
    examples = [Example([f"text {n}"], n / 2) for n in range(30)]
    split = labelled_text.split_of(examples, TOKENIZER)
    made = [
        Batches(split, TOKENIZER, data_of("regression"), rows=4, context_length=24, seed=seed) for seed in (0, 0, 1)
    ]
    a, b, c = (each[5] for each in made)
    np.testing.assert_array_equal(a.inputs["values"], b.inputs["values"])
    assert (a.inputs["values"] != c.inputs["values"]).any() and a.inputs["values"].dtype == np.float32
    where = a.inputs["examples"] > 0
    np.testing.assert_array_equal(a.inputs["values"][where], (a.inputs["examples"][where] - 1) / 2)
    half = Batches(split, TOKENIZER, data_of("regression", max_examples=15), rows=4, context_length=24, seed=0)
    assert half.rows_per_epoch < made[0].rows_per_epoch


@pytest.mark.parametrize("opening", ["separator", "cls"])
def test_an_answer_is_found_where_it_stands(opening):
    """Logits that are 1 at the right tokens give back the text of every answer, in windows that overlap."""
    context = " ".join(f"n{n}ö" for n in range(40))
    golds = [(context.index(word), word) for word in ("n3ö", "n17ö n18ö", "n39ö")]
    examples = [question("which?", context, [gold], str(i)) for i, gold in enumerate(golds)]
    examples.append(question("none?", context, []))
    batches, split, _ = rows_of(examples, "extractive_qa", 64, stride=12, opening=opening)
    found = {name: [] for name in ("start", "end", "segments", "examples", "places")}
    for batch in batches:
        told = {
            **batch.inputs,
            "segments": batch.segments,
            "start": batch.inputs["starts"],
            "end": batch.inputs["ends"],
        }
        for name in found:
            found[name].append(told[name])
        assert (
            batch.inputs["starts"].sum() == batch.inputs["ends"].sum() == batch.weights.sum()
        )  # one of each in a window
    every = {name: np.concatenate(parts) for name, parts in found.items()}
    spans = answer_spans.best_answers(every, 30, 0.5)
    told = [answer_spans.answer_text(split, number, spans[number]) for number in range(4)]
    assert told == [word for _, word in golds] + [""]


def test_only_what_the_assistant_says_is_asked():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]  # fmt: skip
    example = conversation(messages, "<{role}>{content}")
    assert example.texts == ("<user>hi<assistant>", "yes", "<user>so<assistant>", "no")
    batches, *_ = rows_of([example], "instructions", 96)
    (batch,) = batches
    asked = batch.targets[batch.weights > 0]
    end = TOKENIZER.end_id
    assert asked.tolist() == [*TOKENIZER.encode("yes"), end, *TOKENIZER.encode("no"), end] and batch.inputs is None
    np.testing.assert_array_equal(batch.tokens[0, 1:], np.where(batch.segments[0, 1:] > 0, batch.targets[0, :-1], 1))


SQUAD = {"data": [{"paragraphs": [{"context": "It rains.", "qas": [
    {"id": "1", "question": "What?", "answers": [{"text": "rains", "answer_start": 3}]},
    {"id": "2", "question": "Who?", "is_impossible": True, "answers": []},
]}]}]}  # fmt: skip
FILES = {
    ("a.jsonl", "sequence_classification"): ('{"text": "a", "label": 1}\n\n{"text": "b", "label": "x"}\n',
                                             [(("a",), "1"), (("b",), "x")]),
    ("a.csv", "sequence_classification"): ('text,label\n"a, ""b""\nc",1\nd,0\n',
                                           [(('a, "b"\nc',), "1"), (("d",), "0")]),
    ("a.tsv", "regression"): ('text\tlabel\n"a\t1.5\n', [(('"a',), 1.5)]),
    ("a.json", "extractive_qa"): (json.dumps(SQUAD), [
        (("What?", "It rains."), {"id": "1", "context": "It rains.", "answers": [[3, "rains"]]}),
        (("Who?", "It rains."), {"id": "2", "context": "It rains.", "answers": []}),
    ]),
    ("lines.csv", "sequence_classification"): (
        'text,label\r\n"to\nbe",yes\r\nor\x0c \x85 \u2028not,no',
        [(("to\nbe",), "yes"), (("or\x0c \x85 \u2028not",), "no")]
    ),
    ("long.csv", "sequence_classification"): (
        "text,label\n" + 200_000 * "a" + ",yes\n", [((200_000 * "a",), "yes")]
    ),
    ("long.tsv", "sequence_classification"): (
        "text\tlabel\n" + 200_000 * "a" + "\tyes\n", [((200_000 * "a",), "yes")]
    ),
    ("a.jsonl", "token_classification"): ('{"text": ["ab", "c"], "label": ["X", "Y"]}\n',
                                          [(("ab c",), [[0, 3], [2, 4], ["X", "Y"]])]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "objective"), FILES)
def test_files(tmp_path, name, objective):
    content, wanted = FILES[name, objective]
    (tmp_path / name).write_text(content, newline="")
    found = labelled_files.examples(
        tmp_path / name, data=data_of(objective), field="data.files", faults=Faults("stop"), open_file=open_file
    )
    assert [(each.texts, each.label) for each in found] == wanted


def test_columns_by_number_have_no_line_of_names(tmp_path):
    (tmp_path / "cola.tsv").write_text("x\t1\t\tIt rains.\nx\t0\t*\tIt rain.\n")
    data = replace(data_of("sequence_classification", label_field="2"), text_field="4")
    found = list(labelled_files.examples(
        tmp_path / "cola.tsv", data=data, field="data.files", faults=Faults("stop"), open_file=open_file
    ))  # fmt: skip
    assert found == ["It rains.", "It rain."] and [each.label for each in found] == ["1", "0"]


def test_an_unknown_label_names_its_example():
    split = labelled_text.split_of([Example(["a"], "yes"), Example(["b"], "maybe")], TOKENIZER)
    data = data_of("sequence_classification", labels=("no", "yes"))
    with pytest.raises(ConfigError, match="held-out example 2 has the label 'maybe'; accepted: no, yes"):
        eval_batches(split, TOKENIZER, data, rows=2, context_length=8)


def test_roles_of_names_are_those_of_the_symbol_tables():
    text = "import os\ndef f(a, b=len):\n    c = a + os.sep\n    def g():\n        return c\n    return g(len(b))\n"
    (example,) = python_tasks.name_roles(text)
    begins, ends, roles = example.label
    found = [(text[b:e], role) for b, e, role in zip(begins, ends, roles, strict=True)]
    assert found == [
        ("a", "parameter"), ("b", "parameter"), ("len", "builtin"), ("c", "local"), ("a", "parameter"),
        ("os", "global"), ("c", "free"), ("g", "local"), ("len", "builtin"), ("b", "parameter"),
    ]  # fmt: skip


def test_a_wrong_operator_differs_from_the_right_one_in_one_place():
    labels = []
    for number in range(40):
        text = f"def f{number}(x, y):\n    é = x + y\n    return x if é <= {number} and y is not None else y\n"
        (example,) = python_tasks.wrong_operator(text)
        same = str(example) == text.rstrip("\n")
        assert same == (example.label == "right")
        differ = [(a, b) for a, b in zip(example.split(), text.split(), strict=False) if a != b]
        assert same or example.count("\n") == text.count("\n") - 1
        assert same or len(differ) >= 1
        labels.append(example.label)
    assert 8 < labels.count("wrong") < 32


def test_a_choice_is_asked_at_its_own_tokens_and_learned_if_it_is_right():
    record = {"text": "it is", "choices": ["red", "not blue"], "label": 1}
    example = record_examples.EXAMPLES["multiple_choice"](record, data_of("multiple_choice"))
    assert example.texts == ("it is", " red", " not blue")
    (batch,), split, data = rows_of([example], "multiple_choice", 32)
    for number, text in enumerate(example.texts[1:], 1):
        asked = batch.inputs["choices"] == number
        assert batch.targets[asked].tolist() == TOKENIZER.encode(text).tolist()
        assert (batch.inputs["sizes"][asked] == len(text)).all() and (batch.weights[asked] == number - 1).all()
    training = Batches(split, TOKENIZER, data, rows=4, context_length=32, seed=0)[0]
    assert set(training.inputs["choices"].ravel().tolist()) == {0, 2}
    scores = np.where(batch.inputs["choices"] == 1, -3.0, -7.0)
    assert choice_rows.best_choices({"score": scores, **batch.inputs}) == {0: (0, 0)}
    scores = np.where(batch.inputs["choices"] == 1, -3.0, -4.0)
    assert choice_rows.best_choices({"score": scores, **batch.inputs}) == {0: (0, 1)}

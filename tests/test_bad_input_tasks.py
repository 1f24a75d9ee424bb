"""Bad examples with labels, and bad settings of tasks; the lines stand in bad_input.md."""

import json

import pytest
from bad_input_cases import TINY, expected, place

__all__ = ["place"]

BERT = "--config.model.family=bert"
GOOD = [{"text": "to be", "label": "yes"}, {"text": "or not", "label": "no"}] * 10
SPANS = [{"text": "to be", "label": [[0, 2, "a"], [3, 5, "b"]]}] * 20
ANSWERS = [{"question": "who?", "context": "to be", "answers": [{"text": "be", "answer_start": 3}]}] * 20

# case -> objective, examples, further flags
EXAMPLES = {
    "label that no training example has": ("sequence_classification", [*GOOD, {"text": "be", "label": "maybe"}], []),
    "examples that all have one label": ("sequence_classification", GOOD[::2], []),
    "example without a text": ("sequence_classification", [*GOOD, {"words": "to be", "label": "yes"}], []),
    "label that is a list": ("sequence_classification", [*GOOD, {"text": "to be", "label": ["yes"]}], []),
    "number that is none": ("regression", [*GOOD], []),
    "span outside its text": ("token_classification", [*SPANS, {"text": "be", "label": [[0, 3, "a"]]}], []),
    "words without a label each": ("token_classification", [*SPANS, {"text": ["to", "be"], "label": ["a"]}], []),
    "answer outside its context": (
        "extractive_qa", [*ANSWERS, {**ANSWERS[0], "answers": [{"text": "be", "answer_start": 4}]}], [],
    ),
    "windows that overlap too much": ("extractive_qa", ANSWERS, ["--config.data.labelled.stride=12"]),
    "conversation that ends with a question": (
        "instructions", [{"messages": [{"role": "user", "content": "to be?"}]}], [],
    ),
    "activation of a pooler that is not there": (
        "sequence_classification", GOOD, ["--config.model.family=gpt", "--config.model.head.activation=relu"],
    ),
    "example longer than a row": (
        "sequence_classification", [{"text": "to be or not to be", "label": "yes"}, *GOOD],
        ["--config.data.labelled.long=stop"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXAMPLES)
def test_examples(place, case):
    objective, examples, flags = EXAMPLES[case]
    (place.folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    family = [] if objective == "instructions" else [BERT]
    given = [f"--config.data.files={place.folder / 'a.jsonl'}", f"--config.data.objective={objective}"]
    assert place.pretrain(*family, *given, *flags) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


MESSAGES = [{"messages": [{"role": "assistant", "content": "to be"}]}] * 20
# case -> objective, name and content of the file
FILES = {
    "example without a label": ("sequence_classification", "a.jsonl", [*GOOD, {"text": "to be"}]),
    "example whose label is null": ("sequence_classification", "a.jsonl", [*GOOD, {"text": "to be", "label": None}]),
    "example with a lone surrogate": ("sequence_classification", "a.jsonl", [*GOOD, {"text": "\ud800", "label": "no"}]),
    "example nested too deeply": ("sequence_classification", "a.jsonl", '{"text":' + "[" * 100_000),
    "list of examples nested too deeply": ("sequence_classification", "a.json", "[" * 100_000),
    "list of examples that are text": ("sequence_classification", "a.json", '["to be", "or not"]'),
    "file of examples that is a number": ("extractive_qa", "a.json", "3"),
    "quotation mark in a CSV that nothing closes": (
        "sequence_classification", "a.csv", 'text,label\nto be,yes\nor not,"no\nto be,yes\nor not,no\n',
    ),
    "CSV with a column twice": ("sequence_classification", "a.csv", "text,label,label\nto be,yes,no\nor not,no,no\n"),
    "number that is too large to be one": ("regression", "a.jsonl", '{"text": "to be", "label": 1' + "0" * 400 + "}"),
    "number that is no float32": ("regression", "a.jsonl", [{"text": "to be", "label": 1e39}] * 20),
    "span between two characters": ("token_classification", "a.jsonl", [{"text": "be", "label": [[0.5, 2, "a"]]}]),
    "span without an end": ("token_classification", "a.jsonl", [{"text": "be", "label": [[0, float("inf"), "a"]]}]),
    "label of a span that is null": ("token_classification", "a.jsonl", [{"text": "be", "label": [[0, 2, None]]}]),
    "word that is null": ("token_classification", "a.jsonl", [{"text": ["to", None], "label": ["a", "b"]}]),
    "example without words": ("token_classification", "a.jsonl", [{"text": [], "label": []}, *SPANS]),
    "answers without their places": ("extractive_qa", "a.jsonl", [{**ANSWERS[0], "answers": {"text": ["be"]}}]),
    "message that is text": ("instructions", "a.jsonl", [*MESSAGES, {"messages": ["to be"]}]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_of_examples(place, case):
    objective, name, content = FILES[case]
    lines = content if isinstance(content, str) else "".join(json.dumps(each) + "\n" for each in content)
    (place.folder / name).write_text(lines)
    given = [f"--config.data.files={place.folder / name}", f"--config.data.objective={objective}"]
    assert place.pretrain(*([] if objective == "instructions" else [BERT]), *given) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


TASK = [BERT, "--config.data.objective=token_classification"]
LORA = ["--config.tune.lora_rank=4", "--config.init_from=other"]
FLAGS = {
    "task of a source without labels": [*TASK, "--config.data.source=markov"],
    "task of a family that has none": [
        "--config.model.family=encoder_decoder", "--config.model.encoder.source_length=8",
        "--config.data.objective=regression",
    ],
    "text file for a task": TASK,
    "head of another task": [*TASK, "--config.model.head.task=regression"],
    "labels given twice": [*TASK, "--config.data.labelled.labels=a,a"],
    "template without a place for what is said": [*TASK, "--config.data.labelled.template={role}"],
    "settings of labels without a task": ["--config.data.labelled.long=stop"],
    "early stopping at a metric of another task": [*TASK, "--config.tune.metric=pearson"],
    "text that is its own label": [*TASK, "--config.data.labelled.label_field=text"],
    "text beside itself": [*TASK, "--config.data.labelled.second_field=text"],
    "settings of a teacher that is not there": ["--config.distill.hard_weight=0"],
    "adapters beside random weights": ["--config.tune.lora_rank=4"],
    "adapters with a scale and no rank": ["--config.tune.lora_alpha=4"],
    "adapters under Muon": [*LORA, "--config.optimizer.name=muon"],
    "adapters with another optimizer's state": [*LORA, "--config.init_optimizer=true"],
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_settings_of_tasks(place, case):
    assert place.pretrain(*FLAGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


@pytest.mark.parametrize(("case", "flags"), [
    ("adapters of a rank above the width", ["--config.tune.lora_rank=17"]),
    ("adapters of a weight that is not there", ["--config.tune.lora_targets=gate,up"]),
])  # fmt: skip
def test_adapters(place, case, flags):
    words = [str(place.config), *TINY, *LORA, "--topology=cpu:1", *flags]
    assert place.run("plan", *words) == (2, expected()[case])


@pytest.mark.slow
def test_predict_with_a_run_that_learned_no_task(place):
    assert place.pretrain()[0] == 0
    found = place.run("predict", str(place.folder / "run"), "--files=a.jsonl")
    assert found == (2, expected()["predict with a run that learned no task"])

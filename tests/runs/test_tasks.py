"""Runs that learn a task from files with labels: they learn it, are scored, go on bit for bit, and label others."""

import json
import shutil

import jax
import numpy as np
import pytest
from quick_runs import quickly

from jaxformer.runs import evaluation, prediction, pretrain
from jaxformer.runs.command_line import parse_config, parser

pytestmark = pytest.mark.slow

CONFIG = """
def get_config(objective):
    family = "gpt" if objective in ("instructions", "multiple_choice") else "bert"
    return {
        "model": {"family": family, "num_layers": 1, "width": 32, "attention": {"num_heads": 2}, "context_length": 48,
                  "positions": "rotary", "initializer": "scaled", "head": HEAD},
        "execution": {"steps_per_dispatch": 5},
        "data": {"files": [FOLDER + "/" + objective + ".jsonl"], "objective": objective, "tokenizer": "bytes",
                 "cache_dir": FOLDER + "/cache"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5, "ema_decay": 0.9},
        "train": {"steps": 60, "global_batch_size": 8, "eval_every_steps": 20, "log_every_steps": 20},
    }
"""
WORDS = ["red", "blue", "one", "two", "three"]


def records(objective):
    """Sentences of three words, about which something simple is asked."""
    rng = np.random.default_rng(0)
    for number in range(160):
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), 3)]
        text, colours = " ".join(words), [word in ("red", "blue") for word in words]
        yield {
            "sequence_classification": {"text": text, "label": "red" in words},
            "regression": {"text": text, "label": sum(colours) - 1.0},
            "token_classification": {"text": words, "label": ["colour" if each else "number" for each in colours]},
            "extractive_qa": {
                "id": number, "question": "c?", "context": f"one {text} zero",
                "answers": [{"answer_start": 4, "text": words[0]}],
            },
            "instructions": {"text": words[0], "label": words[0].upper()},
            "multiple_choice": {"text": text, "choices": ["same", "longer words"], "label": int("red" in words)},
        }[objective]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def on_one_device():
    """tests/test_task_meshes.py has the meshes."""
    with quickly():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "config.py").write_text(CONFIG.replace("FOLDER", repr(str(folder))).replace("HEAD", "None"))
    return folder


def start(folder, objective, name, *fields):
    path = folder / f"{objective}.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records(objective)))
    words = [f"{folder / 'config.py'}:{objective}", f"--config.workdir={folder / name}"]
    return pretrain.pretrain(parse_config(parser("", "pretrain"), words + [f"--config.{field}" for field in fields]))


BETTER = {
    "sequence_classification": ("accuracy", 0.9), "token_classification": ("f1", 0.9), "regression": ("pearson", 0.6),
    "extractive_qa": ("exact_match", 0.8), "instructions": ("accuracy", 0.6),
    "multiple_choice": ("choice_accuracy", 0.7),
}  # fmt: skip


@pytest.mark.parametrize("objective", BETTER)
def test_a_task_is_learned_and_scored(folder, objective, capsys):
    name, least = BETTER[objective]
    values = start(folder, objective, objective).evaluation
    assert values[name] > least and values[f"{name}_stderr"] >= 0, values
    again = evaluation.evaluate(folder / objective, cache_dir=str(folder / "cache"), log=print)
    assert again[name] == pytest.approx(values[name], rel=1e-5) and name.replace("_", " ") in capsys.readouterr().out
    other = evaluation.OtherText((str(folder / f"{objective}.jsonl"),))
    assert evaluation.evaluate(folder / objective, other=other, log=lambda _: None)[name] > least
    if objective == "instructions":
        return
    told = list(prediction.predict(folder / objective, (str(folder / f"{objective}.jsonl"),)))
    wanted = list(records(objective))
    assert len(told) == len(wanted)
    right = {
        "sequence_classification": lambda line, record: line["label"] == json.dumps(record["label"]),
        "regression": lambda line, record: abs(line["value"] - record["label"]) < 1,
        "token_classification": lambda line, record: [each[2] for each in line["spans"]] == record["label"],
        "multiple_choice": lambda line, record: line["choice"] == record["label"],
        "extractive_qa": lambda line, record: line["answer"] == record["answers"][0]["text"],
    }[objective]
    assert np.mean([right(*both) for both in zip(told, wanted, strict=True)]) > 0.6


def test_a_run_that_was_stopped_ends_bit_for_bit_the_same(folder):
    objective, fields = "token_classification", ["tune.trained_layers=0", "tune.layer_decay=0.5", "train.steps=20"]
    start(folder, objective, "base", "train.steps=5")
    fields.append(f"init_from={folder / 'base'}")
    whole = start(folder, objective, "whole", *fields)
    start(folder, objective, "halves", *fields, "checkpoint.save_every_steps=10", "checkpoint.keep=9")
    newest = sorted((folder / "halves" / "checkpoints").iterdir())[-1]
    assert newest.name == "20"
    shutil.rmtree(newest)
    resumed = start(folder, objective, "halves", *fields, "checkpoint.save_every_steps=10", "checkpoint.keep=9")
    ends, other = (jax.device_get(each.state.params) for each in (whole, resumed))
    jax.tree.map(np.testing.assert_array_equal, ends, other)
    base = jax.device_get(pretrain.open_run(folder / "base").params)
    jax.tree.map(np.testing.assert_array_equal, ends["blocks"], base["blocks"])

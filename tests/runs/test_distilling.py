"""A student begins as layers of its teacher, learns from it, and goes on after a stop to the same bits."""

import json
import shutil

import jax
import numpy as np
import pytest
from devices import one_device

from jaxformer.models.distilled_model import initial_layers
from jaxformer.models.flops import flops_per_token, training_flops
from jaxformer.models.lora import merge_lora
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser

pytestmark = pytest.mark.slow

CONFIG = """
def get_config():
    return {
        "model": {"family": "bert", "num_layers": 2, "width": 16, "context_length": 16,
                  "attention": {"num_heads": 2}},
        "data": {"source": "files", "files": (TEXT,), "tokenizer": "bytes", "cache_dir": CACHE, "objective": "masked"},
        "optimizer": {"warmup_steps": 0},
        "train": {"steps": 4, "global_batch_size": 8, "eval_every_steps": 2, "log_every_steps": 2, "eval_rows": 8},
        "checkpoint": {"save_every_steps": 2, "save_every_minutes": None, "keep": 9},
        "compilation_cache": False,
    }
"""
# A rate so low that float32 adds nothing: what a run ends with is what it began with.
STILL = ("optimizer.learning_rate=1e-30", "train.steps=2")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a text and a config; `teacher` in it is a run of 2 layers."""
    one_device(monkeypatch)
    (tmp_path / "text.txt").write_text("All happy families are alike; each is unhappy in its own way. " * 60)
    text = CONFIG.replace("TEXT", repr(str(tmp_path / "text.txt"))).replace("CACHE", repr(str(tmp_path / "cache")))
    (tmp_path / "config.py").write_text(text)
    start(tmp_path, "teacher")
    return tmp_path


def start(place, name, *fields):
    flags = [f"--config.{field}" for field in fields]
    return pretrain.pretrain(
        parse_config(parser("", "pretrain"), [str(place / "config.py"), f"--config.workdir={place / name}", *flags])
    )


def params(place, name):
    return jax.device_get(pretrain.open_run(place / name).params)


def test_layers_are_evenly_spaced():
    assert initial_layers(2, 4) == [0, 2] and initial_layers(3, 3) == [0, 1, 2] and initial_layers(3, 7) == [0, 2, 4]


def test_a_student(place, capsys):
    student = ["model.num_layers=1", f"distill.teacher={place / 'teacher'}"]
    capsys.readouterr()
    start(place, "still", *student, *STILL)
    assert "teacher: the student's layers begin as its layers 0, counted from 0\n" in capsys.readouterr().out
    theirs, mine = params(place, "teacher"), params(place, "still")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:1], b), theirs["blocks"], mine["blocks"])
    jax.tree.map(np.testing.assert_array_equal, theirs["head"], mine["head"])

    whole = start(place, "whole", *student)
    shutil.copytree(place / "whole", place / "again")
    shutil.rmtree(place / "again" / "checkpoints" / "4")
    again = start(place, "again", *student)
    jax.tree.map(np.testing.assert_array_equal, params(place, "whole"), params(place, "again"))
    for one in (whole, again):  # nobody updates the teacher
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(one.state.frozen), theirs)
    records = [json.loads(line) for line in (place / "whole" / "records.jsonl").read_text().splitlines()]
    evaluated = [each for each in records if each["kind"] == "eval"]
    assert all(each["divergence"] > 0 for each in evaluated)

    # The teacher's forward pass is counted.
    of, theirs = (pretrain.open_run(place / name).config for name in ("whole", "teacher"))
    forward = flops_per_token(theirs.model, head_fraction=theirs.data.mask_rate).forward
    wanted = (training_flops(of.model, of.data) + forward) * records[-1]["tokens"]
    assert records[-1]["flops"] == pytest.approx(wanted, rel=1e-9)

    # It is used without its teacher.
    shutil.move(place / "teacher", place / "gone")
    try:
        found = evaluation.evaluate(place / "whole", cache_dir=str(place / "cache"), log=lambda _: None)
    finally:
        shutil.move(place / "gone", place / "teacher")
    assert found["loss"] == pytest.approx(whole.evaluation["loss"], rel=1e-6)


def test_the_adapters_of_a_teacher_are_part_of_its_weights(place):
    rates = ["optimizer.learning_rate=0.1", "train.steps=2"]
    start(place, "adapted", f"init_from={place / 'teacher'}", "tune.lora_rank=2", *rates)
    found = start(place, "student", f"distill.teacher={place / 'adapted'}", *STILL).state.frozen
    wanted = merge_lora(params(place, "adapted"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, wanted)
    before = params(place, "teacher")["blocks"]["attention"]["w_query"]
    assert np.abs(found["blocks"]["attention"]["w_query"] - before).max() > 1e-3

"""Studies of learning from other weights: what is chosen, what is planned."""

from dataclasses import replace

import pytest

from experiments import distillation_gain, pretraining_gain
from experiments import transfer_runs as runs
from jaxformer.models.flops import training_flops


def end(arm, seed, accuracy, **more):
    return {
        "run": f"{arm},{seed},{more}", "arm": arm, "seed": seed, "task": "token_kinds", "examples": 8, "rate": "1e-3",
        "accuracy": accuracy, "loss": 1 - accuracy, "majority_accuracy": 0.4, "step": 5, "tokens": 50, **more,
    }  # fmt: skip


def options(tmp_path, *flags):
    made = runs.arguments("", "study", 10)
    return made.parse_args([f"--out={tmp_path / 'out'}", f"--workdir={tmp_path}", *flags])


def test_a_gain_is_the_mean_of_the_differences_of_equal_seeds():
    ours, theirs = ([end(arm, seed, value) for seed, value in enumerate(values)]
                    for arm, values in (("full", (0.9, 0.7, 0.8)), ("scratch", (0.5, 0.4, 0.6))))  # fmt: skip
    found = runs.paired(ours, list(reversed(theirs)), "accuracy")
    assert found.text() == "0.300 [0.052, 0.548]"  # 0.3 and 4.303 * 0.1 / sqrt(3)
    assert runs.paired(ours[:2], theirs[1:], "accuracy").text("+.2f") == "+0.30"
    assert runs.paired(ours[:1], theirs[1:], "accuracy") is None


def test_the_better_rate_is_chosen_by_runs_that_do_not_count():
    tried = [end("full", runs.TRIAL, accuracy, rate=rate, rates=["1e-3", "3e-3"])
             for rate, accuracy in (("1e-3", 0.6), ("3e-3", 0.7))]  # fmt: skip
    counted = end("full", 0, 0.5)
    assert runs.best_rate([*tried, counted], arm="full") == "3e-3"
    assert runs.best_rate([tried[0], counted], arm="full") is None
    assert runs.select([*tried, counted], arm="full") == [counted]
    tie = [each | {"accuracy": 0.6, "loss": loss} for each, loss in zip(tried, (0.3, 0.4), strict=True)]
    assert runs.best_rate(tie, arm="full") == "1e-3"


def test_arms_differ_in_what_they_should_and_nothing_else(tmp_path):
    given = options(tmp_path)
    plans = {arm: pretraining_gain.run_of("name_roles", arm, 8, 3, "1e-3", given) for arm in pretraining_gain.ARMS}
    assert plans["full"].changes.items() - plans["scratch"].changes.items() == {("init_from", f"{tmp_path}/pretrained")}
    assert plans["lora"].changes.items() - plans["full"].changes.items() == {("tune.lora_rank", "8")}
    for plan in pretraining_gain.counted(given, []):
        config = runs.parsed_of(plan, tmp_path).config
        assert config.tune.layer_decay == 1 and config.data.objective.endswith("classification")
    names = [each.name for each in pretraining_gain.counted(given, [])]
    assert len(names) == len(set(names)) == 5 * 3 * (2 * 3 + 1)


def test_students_have_equal_flop(tmp_path, monkeypatch):
    given = options(tmp_path, "--steps=1000")
    teacher = runs.parsed_of(runs.pretrained(tmp_path), tmp_path).config
    teacher = replace(teacher, model=replace(teacher.model, vocab_size=2048))
    monkeypatch.setattr(distillation_gain.manifest, "read_config", lambda folder: teacher)
    flops = distillation_gain.costs(given)
    assert flops["alone"] < flops["taught"] < flops["alone"] + training_flops(teacher.model, teacher.data) / 2
    spent = {arm: int(distillation_gain.run_of(arm, 0, "1e-3", given).changes["train.steps"])
             * flops["taught" if arm == "distilled" else "alone"] for arm in distillation_gain.LABELS}  # fmt: skip
    assert spent["layers"] == spent["scratch"] == pytest.approx(spent["distilled"], rel=1e-3)


def test_a_record_of_the_same_run_takes_the_place_of_the_old_one(tmp_path):
    assert runs.read(tmp_path) == []
    runs.keep(tmp_path, {"run": "a", "loss": 1})
    runs.keep(tmp_path, {"run": "b", "loss": 2})
    assert runs.keep(tmp_path, {"run": "a", "loss": 3}) == runs.read(tmp_path) == [
        {"run": "b", "loss": 2}, {"run": "a", "loss": 3},
    ]  # fmt: skip

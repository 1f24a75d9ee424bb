"""What a capacity drops: the runs, what is read of their records, and a page that says what these do."""

import json
from pathlib import Path

import pytest

from experiments import expert_capacity as study
from experiments.transfer_runs import parsed_of, read
from jaxformer import records

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "capacity"


def test_runs_differ_in_their_capacity_alone():
    plain, *bounded = (parsed_of(study.capacity_run(factor, 1, 50), Path()).config.model for factor in study.FACTORS)
    assert plain.feed_forward.dispatch == "dropless"
    for factor, model in zip(study.FACTORS[1:], bounded, strict=True):
        kind = model.feed_forward
        assert (kind.dispatch, kind.capacity_factor, kind.count) == ("capacity", factor, plain.feed_forward.count)
        assert kind.capacity(64) == 8 * factor  # one of 8 experts for each of 64 tokens


def test_means_are_of_the_first_and_the_last_tenth(tmp_path):
    path = tmp_path / "records.jsonl"
    for step in range(10, 210, 10):
        about = {"expert_dropped": 0.5 if step <= 20 else 0.1, "expert_load": 1.0 + (step == 200)}
        about |= dict.fromkeys(("loss", "grad_norm", "learning_rate", "seconds"), 1.0) | {"skipped": 0}
        records.append(path, {"kind": "train", "step": step, "tokens": step, **about})
    assert study.routed(path) == {
        "expert_dropped_first": 0.5, "expert_load_first": 1.0, "expert_dropped_last": 0.1, "expert_load_last": 1.5,
    }  # fmt: skip


def made(arm, seed, loss, dropped=0.1):
    ends = {f"expert_{field}_{stretch}": dropped for field in ("dropped", "load") for stretch in study.STRETCHES}
    return {"run": f"{arm}{seed}", "arm": arm, "seed": seed, "loss": loss, "step": 9, "tokens": 90, **ends}


def test_what_is_said_follows_the_differences_seed_by_seed():
    found = [made("dropless", seed, 2 + seed) for seed in range(3)]
    found += [made("2", seed, 2 + seed + 0.1 * (seed - 1)) for seed in range(3)]
    assert study.said(found) == "No capacity is told apart from dropless by its loss."
    found += [made("0.5", seed, 2.5 + seed + 0.001 * seed) for seed in range(3)]
    assert study.said(found) == "Told apart from dropless by its loss, and worse: a capacity factor of 0.5."
    assert study.table(found)[-1].endswith("| 3.501 [1.014, 5.988] | +0.501 [+0.499, +0.503] |")


def test_the_committed_page_says_what_the_records_do():
    found = read(RESULT)
    assert (RESULT / "README.md").read_text(encoding="utf-8") == study.page(found)
    assert (RESULT / "capacity.svg").read_bytes().startswith(b"<?xml")
    assert {each["arm"] for each in found} == set(map(study.arm_of, study.FACTORS))
    for stretch in study.STRETCHES:  # smaller capacities drop more
        dropped = [study.mean_of(found, arm, f"expert_dropped_{stretch}").value for arm in study.arms(found)]
        assert dropped == sorted(dropped) and dropped[0] == 0


@pytest.mark.slow
def test_a_short_study_trains_reads_and_goes_on(tmp_path, monkeypatch, capsys):
    from test_language_experts import SHORT

    monkeypatch.setattr("experiments.language_experts.TEXT", SHORT)
    monkeypatch.setattr(study, "FACTORS", (None, 0.5))
    options = ["--out", str(tmp_path / "out"), "--workdir", str(tmp_path / "runs"), "--seeds=1", "--steps=20"]
    monkeypatch.setattr("sys.argv", ["expert_capacity", *options])
    study.main()
    found = {
        each["arm"]: each for each in map(json.loads, (tmp_path / "out" / "records.jsonl").read_text().splitlines())
    }
    assert found["dropless"]["expert_dropped_last"] == 0 < found["0.5"]["expert_dropped_last"] < 1
    capsys.readouterr()
    study.main()
    assert "2 runs, 0 to do" in capsys.readouterr().out

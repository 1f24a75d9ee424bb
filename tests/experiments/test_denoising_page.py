"""Objectives beside their floors: which records are kept, what the page says, and what a model gains by its source."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import denoising
from jaxformer import records
from jaxformer.config import from_mapping, load
from jaxformer.data import languages
from jaxformer.data.markov import markov

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "denoising"
CONFIG = from_mapping(load("denoising_entropy:span_corruption"))


def test_a_model_that_does_not_look_at_its_source_is_above_the_floor_by_what_neighbours_tell():
    floor = languages.floor(CONFIG.data, CONFIG.model.context_length, CONFIG.source_length).nats
    data = CONFIG.data
    drawn = markov(data.language_symbols, 1, data.language_zipf, data.language_seed)
    alone = -(drawn.stationary * np.log(drawn.stationary)).sum()
    wanted = 3 * alone + 7 * drawn.entropy_rate + np.log(9 * 8 / 2)  # ten symbols in three spans, 36 ways to cut them
    assert denoising.blind(CONFIG) == pytest.approx(wanted / 14, rel=1e-9) and wanted / 14 > floor + 0.03
    assert denoising.blind(from_mapping(load("denoising_entropy:mixture"))) is None


def run(workdir, name, loss, ended):
    folder = workdir / name
    folder.mkdir(parents=True)
    common = {"step": 20, "tokens": 200, "loss": loss, "loss_stderr": 0.01}
    ends = {"params": 9, "params_non_embedding": 5, "flops": 1.0, "floor": 1.0, "floor_stderr": 0.0}
    records.append(folder / "records.jsonl", {"kind": "eval", **common, "split": "validation"})
    if ended:
        records.append(folder / "records.jsonl", {"kind": "final", **common, **ends})


def test_finished_runs_are_kept_and_the_page_says_which_are_missing(tmp_path):
    workdir, out = tmp_path / "w", tmp_path / "out"
    out.mkdir()
    run(workdir, "span_corruption", 1.02, ended=True)
    run(workdir, "mixture", 1.5, ended=False)
    found = denoising.gather(workdir, out)
    assert [(each["run"], each["kind"]) for each in found] == [
        ("span_corruption", "eval"),
        ("span_corruption", "final"),
    ]
    run(tmp_path / "other", "last_span", 1.01, ended=True)
    found = denoising.gather(tmp_path / "other", out)  # another workdir adds to what there is
    assert {each["run"] for each in found} == {"span_corruption", "last_span"}
    assert [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()] == found
    page = denoising.page(found)
    assert "| T5's spans | 20 | 1.0000 ± 0.0000 | 1.0200 ± 0.0100 | 2.00 % | 1.3976 |" in page
    assert "Not trained yet: spans_of_32, prefix_lm, mixture, regular;" in page
    denoising.figure(found)


def test_the_page_is_what_the_records_say():
    found = [json.loads(line) for line in (RESULT / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (RESULT / "README.md").read_text(encoding="utf-8") == denoising.page(found)
    for end in (each for each in found if each["kind"] == "final"):
        assert end["loss"] > end["floor"] - 4 * end["loss_stderr"]

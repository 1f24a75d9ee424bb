"""`experiments.loss_by_place`: which run stands for a ladder, and what the page says of it."""

from pathlib import Path

import pytest

from experiments import loss_by_place, loss_by_place_page
from jaxformer.errors import ConfigError

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "mechanisms"


def test_the_run_is_the_best_of_the_longest():
    config, record = loss_by_place.longest_run(RESULT / "baseline", 60)
    assert (record["run"], record["step"]) == ("w60-n4200-lr0.00834-s0", 4200)
    assert (config.model.width, config.train.steps, config.optimizer.learning_rate) == (60, 4200, 0.00834)
    with pytest.raises(ConfigError, match=r"^--width: 61; accepted: 20, 40, 60, 80, 100, 140$"):
        loss_by_place.longest_run(RESULT / "baseline", 61)


def test_a_run_trained_again_ends_where_it_did_in_its_ladder():
    """Within what 1,024 held-out rows, of which the ladder knew the loss, say of all."""
    for each in loss_by_place_page.lines_of(RESULT / "places.jsonl"):
        assert abs(each["loss"] - each["loss_in_ladder"]) < 0.025, each["variant"]
        total = sum(row["weight"] for row in each["by_position"])
        mean = sum(row["weight"] * row["loss"] for row in each["by_position"]) / total
        assert mean == pytest.approx(each["loss"], abs=1e-4)


def test_nothing_is_said_where_nothing_was_measured(tmp_path):
    assert loss_by_place_page.section(tmp_path) == [] and loss_by_place_page.draw(tmp_path) == {}
    with pytest.raises(ConfigError, match="has no ladder that ended"):
        loss_by_place.ladders(tmp_path)


def test_what_has_not_made_its_turns_yet_has_no_speed(tmp_path):
    """The page was not written at all."""
    places = (RESULT / "places.jsonl").read_text(encoding="utf-8")
    speed = (RESULT / "speed.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "places.jsonl").write_text(places, encoding="utf-8")
    (tmp_path / "speed.jsonl").write_text("".join(x for x in speed if '"linear"' not in x), encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in loss_by_place_page.section(tmp_path) if line.startswith("| `")}
    assert rows["`linear`"].endswith("|  |  |") and not rows["`window`"].endswith("|  |  |")

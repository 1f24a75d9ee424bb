"""The page of `experiments.distillation_gain` says what its records do."""

from pathlib import Path

from experiments import distillation_gain
from experiments.transfer_runs import read

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "distillation_gain"


def test_the_page_is_what_the_records_say():
    text = (RESULT / "README.md").read_text(encoding="utf-8")
    assert text == distillation_gain.page(read(RESULT))
    assert "(loss.svg)" in text and (RESULT / "loss.svg").exists()

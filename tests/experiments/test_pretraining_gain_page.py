"""The page of `experiments.pretraining_gain` says what its records do."""

from pathlib import Path

from experiments import pretraining_gain_page
from experiments.transfer_runs import read

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "pretraining_gain"


def test_the_page_is_what_the_records_say():
    text = (RESULT / "README.md").read_text(encoding="utf-8")
    assert text == pretraining_gain_page.page(read(RESULT))
    assert "(labels.svg)" in text and (RESULT / "labels.svg").exists()

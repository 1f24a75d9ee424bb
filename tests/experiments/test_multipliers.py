"""The page of `experiments.multipliers` says what the finished ladders do."""

from pathlib import Path

import pytest

from experiments import multipliers
from jaxformer.config import load
from jaxformer.errors import ConfigError

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "ablations"
VARIANTS = load("compare_ablations")["variants"]


def test_every_variant_has_what_others_found():
    assert multipliers.LITERATURE.keys() == VARIANTS.keys()


def test_a_folder_without_a_baseline(tmp_path):
    with pytest.raises(ConfigError, match=r"has no baseline/records.jsonl; accepted: the folder of a comparison"):
        multipliers.finished(tmp_path, VARIANTS)


@pytest.mark.slow
def test_the_page_is_what_the_records_say():
    found = multipliers.worth(multipliers.finished(RESULT, VARIANTS))
    text = (RESULT / "README.md").read_text(encoding="utf-8")
    assert text == multipliers.page("compare_ablations", VARIANTS, "ablations", found)
    assert found["swiglu"].paired and (RESULT / "forest.svg").exists()

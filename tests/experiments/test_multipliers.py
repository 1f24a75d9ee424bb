"""The page of `experiments.multipliers` says what the finished ladders do."""

from pathlib import Path

import pytest

from experiments import loss_by_place_page, multipliers
from jaxformer.config import load
from jaxformer.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
# config -> its folder in `RESULTS`
COMPARISONS = {
    "compare_ablations": "ablations",
    "compare_mechanisms": "mechanisms",
    "compare_pairs": "pairs",
    "compare_tiny:seeds": "same",
}


def variants_of(config):
    return load(config)["variants"]


def test_every_variant_has_what_others_found():
    names = "compare_ablations", "compare_mechanisms", "compare_pairs"
    assert multipliers.LITERATURE.keys() == {variant for name in names for variant in variants_of(name)}


def test_a_folder_without_a_baseline(tmp_path):
    with pytest.raises(ConfigError, match=r"has no baseline/records.jsonl; accepted: the folder of a comparison"):
        multipliers.finished(tmp_path, variants_of("compare_ablations"))


@pytest.mark.slow
@pytest.mark.parametrize("config", COMPARISONS)
def test_the_page_is_what_the_records_say(config):
    folder, variants = RESULTS / COMPARISONS[config], variants_of(config)
    ladders = multipliers.finished(folder, variants)
    found, against = multipliers.worth(ladders), multipliers.beyond(ladders, variants)
    text = (folder / "README.md").read_text(encoding="utf-8")
    more = loss_by_place_page.section(folder)
    manifest = multipliers.manifest(folder)
    assert text == multipliers.page(config, variants, folder.name, found, manifest, against, more)
    assert all(of.paired for of in found.values()) and (folder / "forest.svg").exists()


def test_ladders_that_differ_in_their_seeds_alone():
    """Nine of ten intervals of really trained ladders hold the truth, which is 1."""
    variants = variants_of("compare_tiny:seeds")
    found = multipliers.worth(multipliers.finished(RESULTS / "same", variants), replicates=100)
    assert len(found) == 10 and sum(of.flop.low <= 1 <= of.flop.high for of in found.values()) >= 9

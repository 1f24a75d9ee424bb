"""The page of nanoGPT's run on characters says what its records say."""

from pathlib import Path

import pytest

from jaxformer import records

FOLDER = Path(__file__).parents[2] / "experiments" / "results" / "nanogpt_shakespeare"
PUBLISHED = 1.4697


@pytest.mark.parametrize("settings", ["nanogpt", "ours"])
def test_the_table_is_that_of_the_records(settings):
    found = records.load(FOLDER / settings / "records.jsonl")
    losses = {each["step"]: each["loss"] for each in found if each["kind"] == "eval"}
    best, first = min(losses, key=losses.get), min(step for step, loss in losses.items() if loss < PUBLISHED)
    row = f"| {settings} | {losses[best]:.4f} | {best} | {first} | {losses[5000]:.4f} |"
    assert row in (FOLDER / "README.md").read_text(encoding="utf-8")

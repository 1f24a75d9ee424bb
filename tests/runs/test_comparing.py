"""`jaxformer compare`, small: a baseline and a variant on one ladder, their rows kept, three lines and a page."""

import json
import sys

import numpy as np
import pytest
from quick_runs import one_device

from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.programs import compare
from jaxformer.runs import comparing
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.scaling import arms
from jaxformer.scaling.ladder import StudyConfig

CONFIG = """
def get_config():
    return {
        "model": {"context_length": 16, "positions": "rotary"},
        "data": {"source": "markov", "language_symbols": 16, "language_order": 1, "language_tokens": 500_000},
        "optimizer": {"schedule": "wsd", "warmup_steps": 5, "learning_rate": 1e-2},
        "train": {"global_batch_size": 8, "eval_rows": 32},
        "execution": {"steps_per_dispatch": 5},
        "ladder": {"widths": (8, 16, 24), "head_width": 8, "min_layers": 1, "budgets": (3e8, 6e8, 1.2e9), "min_steps": 5,
                   "max_tokens_per_parameter": 1e4, "min_tokens_per_parameter": 0.01, "learning_rates": (1.0,)},
        "variants": VARIANTS,
    }
"""


def config(folder, variants):
    (folder / "ladder.py").write_text(CONFIG.replace("VARIANTS", repr(variants)))
    return [f"--config={folder / 'ladder.py'}", f"--config.workdir={folder / 'study'}",
            f"--config.data.cache_dir={folder / 'cache'}"]  # fmt: skip


def entrants(folder, variants, *flags):
    return comparing.entrants(
        parse_config(parser("", "compare"), [*config(folder, variants), *flags], StudyConfig, beside=("variants",))
    )


def test_variants_differ_in_what_they_change(tmp_path):
    variants = {"slow": {"optimizer.learning_rate": 1e-3}, "wide": {"model.mlp_width": 64, "seed": 3}}
    base, slow, wide = entrants(tmp_path, variants, "--config.optimizer.weight_decay=0.3")
    assert [each.config.workdir for each in (base, slow)] == [str(tmp_path / "study" / n) for n in ("baseline", "slow")]
    assert base.config.optimizer.learning_rate == 1e-2 and slow.config.optimizer.learning_rate == 1e-3
    assert wide.config.model.feed_forward.width == 64 and wide.config.seed == 3
    assert {each.config.optimizer.weight_decay for each in (base, slow, wide)} == {0.3}
    assert len({each.config.ladder for each in (base, slow, wide)}) == 1
    assert slow.overrides[-1] == "optimizer.learning_rate: 0.01 -> 0.001"


@pytest.mark.parametrize(
    ("variants", "line"),
    [
        ({}, r"^config\.variants: are needed; accepted: \{name: \{field: value\}\}$"),
        ({"a": {}}, r"^config\.variants\.a: '\{\}'; accepted: \{field: value\}, one field at least$"),
        ({"baseline": {"seed": 1}}, r"^config\.variants\.baseline: is what the others are compared with"),
        ({"a/b": {"seed": 1}}, r"^config\.variants\.a/b: .*; accepted: names that a folder can have$"),
        ({"a": {"data.seed": 1}}, r"^config\.variants\.a: data\.seed is shared by all; accepted: fields of model"),
        ({"a": {"ladder.seeds": 2}}, r"^config\.variants\.a: ladder\.seeds is shared by all"),
        ({"a": {"model.widht": 2}}, r"^config\.variants\.a: config\.model\.widht: no such field; did you mean width\?$"),
        ({"a": {"model.dropout": 2}}, r"^config\.variants\.a: config\.model\.dropout: 2\.0; accepted"),
        ({"a": {"optimizer.weight_decay": 0}}, r"^config\.variants\.a: optimizer\.weight_decay is given on the command"),
    ],
)  # fmt: skip
def test_variants_are_checked_at_the_door(tmp_path, variants, line):
    with pytest.raises(ConfigError, match=line):
        entrants(tmp_path, variants, "--config.optimizer.weight_decay=0.3")
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_a_comparison_from_plan_to_page(tmp_path, monkeypatch, capsys):
    one_device(monkeypatch)
    flags = config(tmp_path, {"other_seeds": {"seed": 7}})

    def said(*more):
        monkeypatch.setattr(sys, "argv", ["jaxformer compare", *flags, "--bootstrap=100", *more])
        return compare.main(), capsys.readouterr().out

    code, out = said("--stage=plan")
    assert code == 0 and "== other_seeds: seed=7" in out and out.count("9 runs on 3 trunks") == 2
    with pytest.raises(ConfigError, match="no run of baseline, other_seeds has finished; --stage=run trains them$"):
        said("--stage=report")
    code, out = said("--at-once=1")
    assert code == 0 and out.splitlines()[-3].startswith("other_seeds (seed=7): ")
    study = tmp_path / "study"
    numbers = json.loads((study / "comparison.json").read_text())["other_seeds"]
    assert numbers["paired"] and len(numbers["budgets"]) == 3
    page = (study / "comparison.html").read_text()
    assert all(text in page for text in ("What each variant is worth", "What was tuned", "jaxformer compare --config="))
    assert page.count("<img") == 3
    # The rows that were kept are those whose mean is the loss, and the same ones for both.
    found = {name: records.load(study / name / "records.jsonl", "final") for name in ("baseline", "other_seeds")}
    for mine in found.values():
        for record in mine:
            losses, weights = arms.unpack_rows(record["row_losses"])
            assert losses.shape == (record["rows"],)
            assert np.average(losses, weights=weights) == pytest.approx(record["loss"], rel=2e-4)
    ours, theirs = (arms.unpack_rows(mine[-1]["row_losses"])[0] for mine in found.values())
    assert np.corrcoef(ours, theirs)[0, 1] > 0.8
    # The same command trains nothing again.
    before = {path: path.read_bytes() for path in study.rglob("*.jsonl")}
    code, again = said()
    assert code == 0 and again.splitlines()[-3:] == out.splitlines()[-3:] and "9 finished" in again
    assert {path: path.read_bytes() for path in study.rglob("*.jsonl")} == before

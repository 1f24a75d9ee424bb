"""The ladder: sizes from one dial, what a budget buys, and how a learning rate is chosen."""

import math
from dataclasses import replace

import pytest

from jaxformer.config import Config, EncoderConfig, encoder_of, from_mapping
from jaxformer.errors import ConfigError
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.scaling.ladder import StudyConfig, cells, planned, run_config, runs, size_model


def study(**ladder):
    base = {"widths": [32, 64, 96], "head_width": 16, "budgets": [2e11, 8e11, 3.2e12], "max_tokens_per_parameter": 1e4}
    return from_mapping(
        {
            "model": {"vocab_size": 256, "context_length": 64},
            "optimizer": {"schedule": "wsd", "warmup_steps": 10, "learning_rate": 0.01},
            "train": {"batch_rows": 8},
            "ladder": {**base, **ladder},
        },
        cls=StudyConfig,
    )


def test_sizes_follow_the_width():
    config = study(layer_width=24, min_layers=2)
    shapes = [size_model(config.model, width, config.ladder) for width in config.ladder.widths]
    assert [(m.width, m.num_layers, m.attention.num_heads, m.head_size) for m in shapes] == [
        (32, 2, 2, 16), (64, 3, 4, 16), (96, 4, 6, 16)
    ]  # fmt: skip


def test_an_encoder_is_as_deep_as_its_decoder():
    config = study(layer_width=24, min_layers=2)
    model = replace(config.model, family="encoder_decoder", encoder=EncoderConfig(num_layers=9, source_length=96))
    sizes = [size_model(model, width, config.ladder) for width in config.ladder.widths]
    assert [(encoder_of(m).num_layers, m.num_layers) for m in sizes] == [(2, 2), (3, 3), (4, 4)]
    assert {m.encoder.source_length for m in sizes} == {96}


def test_a_budget_is_spent():
    """Every cell's FLOP are its budget within one step, by the exact count of its own size."""
    config = study()
    grid = cells(config)
    assert len(grid) == len({(c.width, c.steps) for c in grid}) > 5
    for cell in grid:
        price = training_flops(size_model(config.model, cell.width, config.ladder), config.data)
        assert cell.tokens == cell.steps * 8 * 64 and cell.flops == pytest.approx(cell.tokens * price)
        assert abs(cell.flops - cell.budget) <= 0.5 * price * 8 * 64


def test_what_a_budget_cannot_sensibly_train_is_left_out():
    config = study(min_tokens_per_parameter=5.0, max_tokens_per_parameter=100.0, min_steps=200)
    for cell in cells(config):
        size = count_parameters(size_model(config.model, cell.width, config.ladder)).total
        assert 5 <= cell.tokens / size <= 100 and cell.steps >= 200
    with pytest.raises(ConfigError, match=r"config\.ladder\.budgets: 1e\+06 FLOP trains none"):
        cells(study(budgets=[1e6, 8e11]))


def test_fixed_tokens_are_for_every_size():
    grid = cells(study(budgets=[], tokens=[100_000, 400_000]))
    assert [(c.width, c.steps, c.budget) for c in grid] == [
        (width, steps, None) for width in (32, 64, 96) for steps in (195, 781)
    ]


def test_no_run_reads_its_text_twice_unless_asked():
    longest = max(c.tokens for c in cells(study()))
    with pytest.raises(ConfigError, match=r"width 32 needs \d+ tokens, 1\.25 epochs .*ladder\.max_epochs 1$"):
        cells(study(), available=int(longest / 1.25))
    assert cells(study(max_epochs=2.0), available=int(longest / 1.25))


def losses_by(found, best):
    """Losses as if each width had its best rate at `best[width]`."""
    return {r.name: 3 + abs(math.log(r.learning_rate / best[r.width])) for r in found}


def settle(config, best):
    """Runs until the ladder asks for nothing new."""
    losses, rounds = {}, 0
    while True:
        found = runs(config, losses)
        if all(run.name in losses for run in found):
            return found, rounds
        losses |= losses_by([run for run in found if run.name not in losses], best)
        rounds += 1


def test_the_best_learning_rate_goes_on():
    config = study(learning_rate_exponent=0.0)
    first = runs(config, {})
    assert {r.learning_rate for r in first} == {0.005, 0.01, 0.02} and {r.role for r in first} == {"learning rate"}
    found, rounds = settle(config, {32: 0.02, 64: 0.01, 96: 0.0101})
    chosen = {w: {r.learning_rate for r in found if r.width == w and r.role == "ladder"} for w in (32, 64, 96)}
    assert chosen == {32: {0.02}, 64: {0.01}, 96: {0.01}}
    for width in (32, 64, 96):
        mine = [r.steps for r in found if r.width == width and r.role == "ladder"]
        assert sorted(mine) == [c.steps for c in cells(config) if c.width == width]  # each cell once
    assert rounds == 3  # the rates, one more (0.04, because 0.02 was the highest), the rest


def test_each_budget_up_to_the_middle_has_its_own_best_rate():
    config = study(learning_rate_exponent=0.0, seeds=2, seeded_sizes=1)
    found, losses = [], {}
    while not found or any(run.name not in losses for run in found):
        found = runs(config, losses)
        for run in found:  # the shorter a run, the higher the rate it wants: 0.02 for the shortest, then 0.01
            first = min(r.steps for r in found if r.width == run.width)
            best = 0.02 if run.steps == first else 0.01
            losses[run.name] = 3 + abs(math.log(run.learning_rate / best))
        found = runs(config, losses)
    steps = [c.steps for c in cells(config) if c.width == 32]
    points = {(r.steps, r.learning_rate, r.seed) for r in found if r.width == 32 and r.role == "ladder"}
    assert len(steps) == 3
    assert points == {(n, 0.02 if n == steps[0] else 0.01, seed) for n in steps for seed in (0, 1)}


def test_the_largest_sizes_can_take_the_factor_of_the_size_before():
    best = {32: 0.02, 64: 0.01 * 0.5**0.5, 96: 0.001}
    config = study(searched_sizes=2)
    assert {r.width for r in runs(config, {})} == {32, 64}
    found, _ = settle(config, best)
    rates = {r.learning_rate for r in found if r.width == 96}
    assert rates == {0.00577}  # 0.01 * (32 / 96) ** 0.5, as 64 chose its starting value, whatever 96 would choose
    assert {r.role for r in found if r.width == 96} == {"ladder"}
    assert {(r.width, r.steps) for r in found if r.role == "ladder"} == {(c.width, c.steps) for c in cells(config)}


def test_the_search_ends_at_its_limit():
    found, _ = settle(study(learning_rate_exponent=0.0, learning_rate_extensions=1), dict.fromkeys((32, 64, 96), 1.0))
    assert {r.learning_rate for r in found if r.role == "ladder"} == {0.04}  # the best of those tried
    single, rounds = settle(study(learning_rates=[1.0]), dict.fromkeys((32, 64, 96), 1.0))
    assert rounds == 1 and {r.role for r in single} == {"ladder"}


def test_a_diverged_rate_is_never_chosen():
    config = study(learning_rate_exponent=0.0)
    losses = {r.name: math.nan if r.learning_rate > 0.006 else 9.0 for r in runs(config, {})}
    losses |= {r.name: 10.0 for r in runs(config, losses) if r.name not in losses}  # 0.0025, worse
    found = runs(config, losses)
    assert {r.learning_rate for r in found if r.role == "ladder"} == {0.005}
    losses = dict.fromkeys((r.name for r in runs(config, {})), math.nan)
    while new := [r.name for r in runs(config, losses) if r.name not in losses]:
        losses |= dict.fromkeys(new, math.nan)
    assert all(r.role == "learning rate" for r in runs(config, losses))


def test_seeds_at_the_small_sizes():
    found = planned(study(seeds=3, seeded_sizes=1), {})
    seeds = {w: {r.seed for r in found if r.width == w and r.role == "ladder"} for w in (32, 64, 96)}
    assert seeds == {32: {0, 1, 2}, 64: {0}, 96: {0}}


def test_the_plan_is_what_will_be_asked_for():
    config = study(learning_rate_exponent=0.5)
    best = {w: 0.01 * math.sqrt(32 / w) for w in (32, 64, 96)}
    assert planned(config, {}) == settle(config, best)[0]
    assert len({r.name for r in planned(config, {})}) == len(planned(config, {}))


def test_a_run_is_a_whole_config():
    config = study()
    run = planned(config, {})[-1]
    found = run_config(config, run)
    assert type(found) is Config
    assert (found.model.width, found.train.steps, found.optimizer.learning_rate) == (run.width, run.steps,
                                                                                     run.learning_rate)  # fmt: skip
    assert found.data == config.data and found.optimizer == replace(config.optimizer, learning_rate=run.learning_rate)


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"widths": []}, r"config\.ladder\.widths: \(\) is empty"),
        ({"widths": [64, 32]}, r"config\.ladder\.widths: \(64, 32\); accepted: numbers above 0, ascending"),
        ({"widths": [40]}, r"config\.ladder\.head_width: 16 does not divide the width 40"),
        ({"budgets": []}, r"config\.ladder\.budgets: \(\) is empty, and so is ladder\.tokens"),
        ({"budgets": [float("nan")]}, r"config\.ladder\.budgets: nan; accepted: a finite number"),
        ({"budgets": ["1e12"]}, r"config\.ladder\.budgets: .* is not a comma-separated list of numbers"),
        ({"seeds": 0}, r"config\.ladder\.seeds: 0; accepted: at least 1"),
        ({"max_epochs": 0.0}, r"config\.ladder\.max_epochs: 0\.0; accepted"),
        ({"max_tokens_per_parameter": 1.0}, r"config\.ladder\.max_tokens_per_parameter: 1\.0; accepted: more than"),
        ({"wdiths": [32]}, r"config\.ladder\.wdiths: no such field; did you mean widths\?"),
    ],
)
def test_bad_ladders(fields, line):
    with pytest.raises(ConfigError, match=line) as error:
        study(**fields)
    assert "\n" not in str(error.value)


def test_overrides_are_read_by_type():
    mapping = {"ladder": {"budgets": [1e12]}}
    found = from_mapping(mapping, {"ladder.widths": "32,64", "ladder.budgets": "1e12, 3e12"}, cls=StudyConfig)
    assert found.ladder.widths == (32, 64) and found.ladder.budgets == (1e12, 3e12)
    with pytest.raises(ConfigError, match=r"config\.ladder\.widths: '32,wide' is not a comma-separated list of int"):
        from_mapping(mapping, {"ladder.widths": "32,wide"}, cls=StudyConfig)

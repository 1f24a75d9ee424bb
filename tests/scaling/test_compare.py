"""Compute multipliers: what is planted lies in the interval, what is not there is not seen."""

import numpy as np
import pytest

from experiments import simulated_ladders as simulated
from jaxformer.errors import ConfigError
from jaxformer.scaling import arms, surface, worth
from jaxformer.scaling.compare import compare
from jaxformer.scaling.worth import Interval, verdict


def valley(noise=0.0):
    """Chinchilla's sum on a small grid; no rates, no rows."""
    found = simulated.truths()["the sum"]
    return found._replace(noise=noise)


def exact(m, growth=1.0, bend=0.05, name="w"):
    """A ladder without noise whose log loss is a parabola in log N and a power law of M C."""
    out = []
    for c in (1e15, 1e16, 1e17):
        used = m * growth ** np.log10(c / 1e17) * c
        for n in np.sqrt(c / 120) * np.geomspace(0.2, 5, 6):
            loss = 9 * used**-0.06 * np.exp(bend * np.log(n / np.sqrt(used / 120)) ** 2)
            out.append(record(f"{name}-{c:g}-{n:g}", n, c, loss))
    return out


def record(run, n, c, loss, seed=0, rate=0.01, role="ladder", width=None, **more):
    return {"kind": "final", "run": run, "role": role, "status": "finished", "width": int(width or n), "params": n,
            "flops": c, "tokens": c / 6 / n, "seed": seed, "learning_rate": rate, "loss": loss, "loss_stderr": 0.0,
            **more}  # fmt: skip


@pytest.mark.parametrize("m, growth", [(1.0, 1.0), (0.5, 1.0), (1.5, 1.0), (1.5, 1.2), (0.8, 0.9)])
def test_without_noise_the_multiplier_is_what_was_planted(m, growth):
    found = compare(exact(1.0), exact(m, growth), replicates=100)
    assert found.flop.value == pytest.approx(m, rel=2e-3) and found.trend.value == pytest.approx(growth, rel=2e-3)
    for at in found.budgets:
        assert at.multiplier.value == pytest.approx(m * growth ** np.log10(at.flops / 1e17), rel=5e-3)
        assert at.loss_v.value == pytest.approx(9 * (at.multiplier.value * at.flops) ** -0.06, rel=1e-4)
    # At equal loss the best sizes are equal: the variant's is that of M C.
    assert found.parameters.value == pytest.approx(1.0, rel=0.02)


def test_exchanged_ladders_have_the_inverse_multiplier():
    one, other = exact(1.0), exact(1.4)
    there, back = (compare(*pair, replicates=100).flop.value for pair in ((one, other), (other, one)))
    assert there * back == pytest.approx(1.0, rel=2e-3)


def test_a_loss_of_all_runs_in_another_unit_changes_nothing():
    """Bits in place of nats."""
    bits = [[{**each, "loss": each["loss"] / np.log(2)} for each in ladder] for ladder in (exact(1.0), exact(1.3))]
    nats = compare(exact(1.0), exact(1.3), replicates=100)
    assert compare(*bits, replicates=100).flop == pytest.approx(nats.flop, rel=1e-9)


def test_a_steeper_valley_is_no_gain():
    """A variant whose losses are worse at every size but the best."""
    found = compare(exact(1.0), exact(1.0, bend=0.1), replicates=100)
    assert found.flop.value == pytest.approx(1.0, abs=0.01)


def test_paired_rows_are_tighter_than_each_ladders_own_error():
    truth, rng = valley(0.001), np.random.default_rng(0)
    hard = simulated.ROW_SPREAD * rng.standard_normal(simulated.ROWS_READ)
    both = [simulated.ladder(truth, 1.0, 1.0, rng, hard) for _ in range(2)]
    apart = [[{k: v for k, v in each.items() if k != arms.ROWS} for each in ladder] for ladder in both]
    paired, unpaired = (compare(*pair, replicates=200) for pair in (both, apart))
    widths = [np.log(found.flop.high / found.flop.low) for found in (paired, unpaired)]
    assert paired.paired and not unpaired.paired and 4 * widths[0] < widths[1]
    assert any("not kept" in line for line in unpaired.notes) and not any("not kept" in line for line in paired.notes)


def test_rows_move_both_ladders_together():
    rng = np.random.default_rng(1)
    hard = rng.normal(size=64)
    ladders = [exact(1.0), exact(1.0)]
    for ladder in ladders:
        for each in ladder:
            each[arms.ROWS] = arms.pack_rows(each["loss"] * np.exp(0.2 * hard), np.full(64, 32.0))
    b, v = (arms.arm(ladder, "it") for ladder in ladders)
    one, other = worth.row_shifts((b, v), 50, rng)
    assert np.abs(one).max() > 0.02 and np.abs(one - other).max() < 1e-4 and np.ptp(one, 1).max() < 1e-3


def test_what_the_grid_of_rates_hides_is_in_the_interval():
    """The loss is a parabola in the log rate whose vertex lies 0.4 steps of the grid from the best rate tried."""
    step = np.log(2.0)

    def tried(ladder):
        out = []
        for each in ladder:
            for factor in (-1, 0, 1):
                excess = 0.02 * (step * (factor - 0.4)) ** 2
                role = "ladder" if factor == 0 else "learning rate"
                out.append({**each, "run": f"{each['run']}{factor}", "role": role, "learning_rate": 0.01 * 2.0**factor,
                            "loss": each["loss"] * np.exp(excess)})  # fmt: skip
        return out

    found = arms.arm(tried(exact(1.0)), "it")
    assert found.excess == pytest.approx(np.full(18, 0.02 * (0.4 * step) ** 2)) and found.edges == ()
    told = compare(exact(1.0), tried(exact(1.0)), replicates=200).flop
    assert told.low < 0.99 < told.high > 0.998


def test_a_best_rate_at_the_edge_is_said():
    ladder = exact(1.0)
    more = [{**each, "run": each["run"] + "+", "role": "learning rate", "learning_rate": 0.02,
             "loss": each["loss"] * 1.01} for each in ladder]  # fmt: skip
    notes = compare(ladder, ladder + more, replicates=100).notes
    assert sum("is the lowest tried" in line and line.startswith("variant: width") for line in notes) == 18


def test_seconds_are_of_whole_runs_and_at_the_best_size():
    def timed(ladder, speed):
        return [{**each, "step": 100, "branched_at": 80, "trunk": each["run"], "seconds": each["flops"] / speed}
                for each in ladder]  # fmt: skip

    found = compare(timed(exact(1.0), 1e9), timed(exact(1.2), 0.5e9), replicates=100)
    assert found.seconds is not None and found.seconds.value == pytest.approx(0.6, rel=0.01)
    # The second run of a trunk has measured only what it did after the first one's branch.
    first, second = (
        record(f"{i}", 1e6, 1e15, 3.0, step=s, branched_at=at, trunk="t", seconds=sec)
        for i, (s, at, sec) in enumerate([(100, 80, 10.0), (200, 160, 12.0)])
    )
    assert arms.arm([first, second], "it").seconds.tolist() == pytest.approx([10.0, 20.0])


def test_forms_that_the_data_refute_have_no_weight():
    truth, rng = simulated.truths()["a lopsided valley"]._replace(noise=1e-4), np.random.default_rng(0)
    both = [simulated.ladder(truth, 1.0, 1.0, rng, np.zeros(16)) for _ in range(2)]
    weights = compare(*both, replicates=100).forms
    assert weights["quadratic"] == 0 and sum(weights.values()) == pytest.approx(1.0)


def test_few_runs_have_few_forms():
    t, x = (axis.ravel() for axis in np.meshgrid([-1.0, 0.0, 1.0], np.linspace(-2, 2, 3)))
    assert surface.possible(surface.Runs(x, t, x)) == ["quadratic"]


@pytest.mark.parametrize(
    "top, trend, first, said",
    [
        ((1.3, 1.2, 1.4), (1.0, 0.9, 1.1), (1.3, 1.1, 1.5), "saves"),
        ((0.5, 0.4, 0.6), (1.0, 0.9, 1.1), (0.5, 0.4, 0.6), "costs"),
        ((1.0, 0.9, 1.1), (1.0, 0.9, 1.1), (1.0, 0.8, 1.2), "no difference seen"),
        ((1.0, 0.7, 1.6), (1.0, 0.9, 1.1), (1.0, 0.8, 1.2), "not resolved by these runs"),
        ((np.nan,) * 3, (np.nan,) * 3, (1.0, 0.8, 1.2), "not resolved by these runs"),
        ((1.5, 1.4, 1.6), (1.2, 1.1, 1.3), (1.1, 0.9, 1.3), "saves, grows"),
        ((1.0, 0.9, 1.1), (0.8, 0.7, 0.9), (1.5, 1.3, 1.7), "no difference seen, vanishes"),
        ((0.7, 0.6, 0.8), (1.2, 1.1, 1.3), (0.4, 0.3, 0.5), "costs, vanishes"),
        ((0.7, 0.6, 0.8), (0.8, 0.7, 0.9), (1.0, 0.8, 1.2), "costs, grows"),
    ],
)
def test_verdicts(top, trend, first, said):
    assert verdict(Interval(*top), Interval(*trend), Interval(*first)) == said


def test_ladders_that_cannot_be_compared_are_refused_in_one_line():
    ladder = exact(1.0)
    with pytest.raises(ConfigError, match=r"^comparison: 2 budgets at which both ladders have 3 sizes; at least 3"):
        compare(ladder, [each for each in ladder if each["flops"] > 2e15])
    with pytest.raises(ConfigError, match=r"^variant: the final record of .* lacks seed$"):
        compare(ladder, [{k: v for k, v in each.items() if k != "seed"} for each in ladder])
    with pytest.raises(ConfigError, match=r"^baseline: none of 18 runs is a finished point of the ladder"):
        compare([{**each, "status": "diverged"} for each in ladder], ladder)
    with pytest.raises(ConfigError, match=r"row_losses: 'no'"):
        arms.unpack_rows("no")
    one, other = ([{**each, arms.ROWS: arms.pack_rows(np.ones(rows), np.ones(rows))} for each in ladder]
                  for rows in (4, 5))  # fmt: skip
    with pytest.raises(ConfigError, match="variant: evaluated on 5 held-out rows, the baseline on 4"):
        compare(one, other)
    counts = [{**each, arms.ROWS: arms.pack_rows(np.ones(4), np.array([1, 1, 3, 1]))} for each in ladder]
    asked, others = ([{**each, arms.TARGETS: digest} for each in one] for digest in ("a1", "b2"))
    for pair in ((one, counts), (asked, others)):
        with pytest.raises(ConfigError, match="variant: its held-out rows ask for other tokens than the baseline's"):
            compare(*pair)
    with pytest.raises(ConfigError, match="variant: its runs were evaluated on different held-out rows"):
        compare(asked, [*asked[1:], others[0]])
    compare(asked, [*asked[1:], one[0]])  # an earlier record
    for name, value in (("loss", np.nan), ("loss", 0.0), ("loss", np.inf), ("flops", None), ("params", 0)):
        with pytest.raises(ConfigError, match=rf"^variant: .*: {name} {value}; accepted: a number above 0$"):
            compare(ladder, [*ladder[:-1], {**ladder[-1], name: value}])
    line = np.geomspace(1e15, 1e17, 40)
    with pytest.raises(ConfigError, match="do not fall into budgets"):
        compare(*[[record(f"{c:g}", c / 1e9, c, 3.0) for c in line]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name, planted", [
    ("the sum", "A/A"),
    ("Kaplan's law", "half"),
    ("a lopsided valley", "1.5, growing"),
])  # fmt: skip
def test_intervals_hold_what_was_planted(name, planted):
    """The whole table is `experiments.coverage --what=multipliers`; 20 pairs: at 95 %, 16 or fewer once in 400."""
    found = simulated.multiplier_coverage(simulated.truths()[name], planted, 20, replicates=200)
    assert found["m_held"] >= 17 and found["trend_held"] >= 17, found
    if planted == "1.5, growing":
        assert found["verdicts"] == {"saves, grows": 20}


def test_a_best_size_hardly_above_the_smallest_is_said():
    same = {
        "kind": "final",
        "role": "ladder",
        "status": "finished",
        "seed": 0,
        "learning_rate": 0.01,
        "loss_stderr": 0.0,
    }

    def ladder(smallest):
        rng, out = np.random.default_rng(3), []
        for c in (1e15, 1e16, 1e17):
            for n in smallest * (1e15 / 120) ** 0.5 * np.geomspace(1, 40, 7):
                loss = 9 * c**-0.06 * np.exp(0.05 * np.log(n / (c / 120) ** 0.5) ** 2 + 0.0003 * rng.normal())
                out.append({**same, "run": f"{c:g}, {n:g}", "width": n, "params": n, "flops": c, "tokens": c / 6 / n,
                            "loss": loss})  # fmt: skip
        return out

    line = "variant: at 1e+15 FLOP the best size is hardly above the smallest tried"
    for smallest, said in ((0.93, True), (0.4, False)):
        notes = compare(ladder(0.3), ladder(smallest), replicates=100).notes
        assert (line in notes) == said, notes

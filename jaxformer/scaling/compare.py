"""What a change is worth: how many times the baseline's compute buys the variant's loss, and whether that lasts.

`compare` reads the records of two ladders, the same budgets, several sizes at each. L(C) is the loss at the best size
of each budget; the multiplier M(C) solves L_b(M C) = L_v(C). Its 95 % interval includes

    the runs' noise    of seeds, from the residuals (Student's t)
    held-out rows      both ladders read the same ones: reweighted together where the runs kept each row's loss
    learning rates     between the best rate tried and the best there is, of each ladder by itself
    misfit             every form of the loss surface that is not refuted, in equal numbers, and the shift when one
                       size, drawn at random, counts half (`surface`)

`experiments.coverage --what=multipliers` measures how often the intervals hold what was planted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import surface, worth
from jaxformer.scaling.arms import Arm, arm
from jaxformer.scaling.isoflop import budget_groups
from jaxformer.scaling.surface import Floats, Runs, Surface
from jaxformer.scaling.worth import Interval

BUDGETS, SIZES = 3, 3  # fewest common budgets, and fewest sizes of each ladder there
HARDLY = 1.2  # times the smallest size tried: a best size below this could be smaller still
REFUTED = 10.0  # Mallows' Cp above the lowest: a form without support
_LEAST_NOISE = 1e-7
_FRONTIER_POINTS = 21
_BEYOND = 0.3  # decades beyond the baseline's budgets that its surface is read; further, the frontier goes on straight
# Times the shift when a size counts half: twice that of leaving it out where others tell as much, because the noise of
# a size is shared along its trunk. Without a size that no other can replace, a cubic goes anywhere.
_LEFT_OUT = 4.0
_FARTHEST = 1.0  # decades beyond the baseline's budgets that its frontier is followed


class AtBudget(NamedTuple):
    """What two ladders have at a common budget.

    Attributes:
      flops: the budget.
      multiplier: M(C).
      loss_b, loss_v: of the frontiers, nats per token.
      size_b, size_v: parameters of the best sizes.
      inside: whether both best sizes lie between sizes that were tried.
    """

    flops: float
    multiplier: Interval
    loss_b: Interval
    loss_v: Interval
    size_b: float
    size_v: float
    inside: bool


class Multiplier(NamedTuple):
    """What a variant is worth beside its baseline.

    Attributes:
      at: the largest common budget at which both ladders have a best size between others, FLOP.
      flop: M there: above 1, the variant saves.
      trend: factor by which M changes per tenfold compute.
      seconds: M in measured seconds; None if the records do not tell them.
      parameters: the same for parameters of the best sizes.
      verdict: in words, see `worth.verdict`.
      budgets: every common one, ascending.
      forms: of the loss surface -> weight in the estimate; 0: refuted.
      paired: whether the held-out rows are compared one by one.
      noise: of one run, relative.
      notes: lines about what the numbers leave open.
    """

    at: float
    flop: Interval
    trend: Interval
    seconds: Interval | None
    parameters: Interval
    verdict: str
    budgets: tuple[AtBudget, ...]
    forms: dict[str, float]
    paired: bool
    noise: float
    notes: tuple[str, ...]


class _Drawn(NamedTuple):
    """Estimates or replicates: m [R, K] log10 of M, ratio [R, K] log of sizes at equal loss, f and n of both ladders
    [R, K]."""

    m: Floats
    ratio: Floats
    f_b: Floats
    f_v: Floats
    n_b: Floats
    n_v: Floats


def compare(
    records_b: Sequence[Mapping[str, Any]],
    records_v: Sequence[Mapping[str, Any]],
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> Multiplier:
    """The compute multiplier of a variant, with intervals.

    Args:
      records_b: of the baseline's study, as `records.load` reads them; only final records are used.
      records_v: of the variant's.
      replicates: that the intervals come from.
      seed: of them.

    Raises:
      ConfigError: a record lacks a field, fewer than three common budgets with three sizes of each ladder, or they
        have read other rows.

    >>> def ladder(m, seed):
    ...     rng = np.random.default_rng(seed)
    ...     return [{"kind": "final", "run": f"{c:g}, {n:g}", "role": "ladder", "status": "finished", "width": n,
    ...              "params": n, "flops": c, "tokens": c / 6 / n, "seed": 0, "learning_rate": 0.01, "loss_stderr": 0.0,
    ...              "loss": 9 * (m * c) ** -0.06 * np.exp(
    ...                  0.05 * np.log(n / (m * c / 120) ** 0.5) ** 2 + 0.001 * rng.normal())}
    ...             for c in (1e15, 1e16, 1e17) for n in (c / 120) ** 0.5 * np.geomspace(0.3, 3, 5)]
    >>> found = compare(ladder(1.0, 0), ladder(1.5, 1))
    >>> found.flop.low < 1.5 < found.flop.high, found.verdict
    (True, 'saves')
    """
    b, v = arm(records_b, "baseline"), arm(records_v, "variant")
    if b.rows is not None and v.rows is not None and b.rows.shape[1] != v.rows.shape[1]:
        raise ConfigError(
            f"variant: evaluated on {v.rows.shape[1]} held-out rows, the baseline on {b.rows.shape[1]}; "
            "accepted: the same"
        )
    counts = b.weights is not None and v.weights is not None and not np.array_equal(b.weights, v.weights)
    if counts or (None not in (b.targets, v.targets) and b.targets != v.targets):
        raise ConfigError("variant: its held-out rows ask for other tokens than the baseline's; accepted: the same")
    both, flops, common = _together(b, v)
    names = [name for name in surface.possible(both[0]) if name in surface.possible(both[1])]
    pairs = {}
    for name in names:
        fits = [surface.fitted(name, runs) for runs in both]
        if fits[0] is not None and fits[1] is not None:
            pairs[name] = (fits[0], fits[1])
    if not pairs:
        raise ConfigError("comparison: too few runs to fit a surface of loss over size and compute; add sizes or seeds")
    weights, noises = _weighed(pairs)
    parts = {name: _m(pair, (pair[0].theta[None], pair[1].theta[None]), common) for name, pair in pairs.items()}
    mean = _Drawn(*(sum(w * part for w, part in zip(weights.values(), column, strict=True))
                    for column in zip(*parts.values(), strict=True)))  # fmt: skip
    drawn = _replicates(pairs, weights, noises, both, (b, v), common, replicates, seed)
    best = max(weights, key=lambda name: weights[name])
    inside = np.all(
        [fit.inside(size, common)[0] for fit, size in zip(pairs[best], (mean.n_b, mean.n_v), strict=True)], 0
    )
    used = np.flatnonzero(inside) if inside.sum() >= 2 else np.arange(len(common))
    top, x = used[-1], common[used] - common[used].mean()

    def trend(m: Floats) -> Floats:
        return m[:, used] @ x / (x @ x)

    speed = worth.log_seconds_per_flop(b.n, b.c, b.seconds, mean.n_b[0, top]) - worth.log_seconds_per_flop(
        v.n, v.c, v.seconds, mean.n_v[0, top])  # fmt: skip
    tens = np.log(10.0)
    budgets = tuple(
        AtBudget(
            float(flops[k]), worth.interval(tens * mean.m[0, k], tens * drawn.m[:, k]),
            worth.interval(mean.f_b[0, k], drawn.f_b[:, k]), worth.interval(mean.f_v[0, k], drawn.f_v[:, k]),
            float(np.exp(mean.n_b[0, k])), float(np.exp(mean.n_v[0, k])), bool(inside[k]),
        ) for k in range(len(common))
    )  # fmt: skip
    flop, change = budgets[top].multiplier, worth.interval(tens * trend(mean.m)[0], tens * trend(drawn.m))
    paired = b.rows is not None and v.rows is not None
    return Multiplier(
        float(flops[top]), flop, change,
        flop.times(float(np.exp(speed))) if np.isfinite(speed) else None,
        worth.interval(mean.ratio[0, top], drawn.ratio[:, top]),
        worth.verdict(flop, change, budgets[used[0]].multiplier), budgets, weights, paired, noises[best],
        _notes(b, v, budgets, paired),
    )  # fmt: skip


def _together(b: Arm, v: Arm) -> tuple[tuple[Runs, Runs], Floats, Floats]:
    """The runs of both ladders with compute on one scale, and the common budgets: FLOP and t."""
    c = np.concatenate([b.c, v.c])
    groups = budget_groups(c)
    if not groups:
        raise ConfigError("comparison: the runs do not fall into budgets; accepted: ladders with ladder.budgets")
    budget, middle = np.empty(len(c)), np.median([np.log10(np.median(c[group])) for group in groups])
    flops = []
    for group in groups:
        budget[group] = np.log10(np.median(c[group])) - middle
        mine, others = group[group < len(b.c)], group[group >= len(b.c)] - len(b.c)
        if min(len(np.unique(b.n[mine])), len(np.unique(v.n[others]))) >= SIZES:
            flops.append(float(np.median(c[group])))
    if len(flops) < BUDGETS:
        raise ConfigError(
            f"comparison: {len(flops)} budgets at which both ladders have {SIZES} sizes; at least {BUDGETS} are needed"
        )
    runs = tuple(
        Runs(np.log(each.n), part, np.log(each.loss))
        for each, part in ((b, budget[: len(b.c)]), (v, budget[len(b.c) :]))
    )
    return (runs[0], runs[1]), np.array(flops), np.log10(flops) - middle


def _weighed(pairs: Mapping[str, tuple[Surface, Surface]]) -> tuple[dict[str, float], dict[str, float]]:
    """Weight of each form by Mallows' Cp, 0 if it is refuted, and the noise of a run by it."""
    freedom = {name: sum(fit.freedom for fit in pair) for name, pair in pairs.items()}
    rss = {name: sum(fit.rss for fit in pair) for name, pair in pairs.items()}
    noises = {name: max(_LEAST_NOISE, float(np.sqrt(rss[name] / freedom[name]))) for name in pairs}
    least = noises[min(freedom, key=lambda name: freedom[name])]
    cp = {name: rss[name] / least**2 + 2 * sum(len(fit.powers) for fit in pair) for name, pair in pairs.items()}
    low = min(cp.values())
    raw = {name: float(np.exp((low - value) / 2)) * (value - low <= REFUTED) for name, value in cp.items()}
    total = sum(raw.values())
    return {name: value / total for name, value in raw.items()}, noises


def _m(pair: tuple[Surface, Surface], thetas: tuple[Floats, Floats], t: Floats) -> _Drawn:
    """The multipliers by parameters [R, P] of both surfaces at budgets t [K]."""
    b, v = pair
    path = np.linspace(b.ends[0, 0] - _BEYOND, b.ends[0, -1] + _BEYOND, _FRONTIER_POINTS)
    f_path, n_path = b.frontier(thetas[0], path)
    f_b, n_b = b.frontier(thetas[0], t)
    f_v, n_v = v.frontier(thetas[1], t)
    f = np.minimum.accumulate(f_path, 1) - 1e-12 * np.arange(len(path))
    step = path[1] - path[0]
    first, last = (np.minimum(f[:, i + 1] - f[:, i], -1e-9)[:, None] / step for i in (0, -2))
    at = np.stack([np.interp(target, row[::-1], path[::-1]) for target, row in zip(f_v, f, strict=True)])
    at += np.minimum((f_v - f[:, :1]) / first, 0.0) + np.maximum((f_v - f[:, -1:]) / last, 0.0)
    at[(at > path[-1] + _FARTHEST) | (at < path[0] - _FARTHEST)] = np.nan
    size = np.stack([np.interp(row, path, mine) for row, mine in zip(at, n_path, strict=True)])
    size += (at - np.clip(at, path[0], path[-1])) * b.centre[1]
    return _Drawn(at - t, size - n_v, f_b, f_v, n_b, n_v)


def _replicates(
    pairs: Mapping[str, tuple[Surface, Surface]],
    weights: Mapping[str, float],
    noises: Mapping[str, float],
    runs: tuple[Runs, Runs],
    arms: tuple[Arm, Arm],
    t: Floats,
    count: int,
    seed: int,
) -> _Drawn:
    """Replicates of everything that `_m` returns."""
    rng = np.random.default_rng(seed)
    held = [name for name in pairs if weights[name] > 0]
    share = np.arange(count) % len(held)
    moved = worth.row_shifts(arms, count, rng)
    out = _Drawn(*(np.empty((count, len(t))) for _ in _Drawn._fields))
    for i, name in enumerate(held):
        mine = np.flatnonzero(share == i)
        pair, freedom = pairs[name], sum(fit.freedom for fit in pairs[name])
        noise = noises[name] * np.sqrt(freedom / rng.chisquare(freedom, len(mine)))
        thetas = []
        for fit, each, shift in zip(pair, arms, moved, strict=True):
            y = shift[mine] - rng.uniform(size=(len(mine), 1)) * each.excess
            drawn = rng.standard_normal((len(mine), len(fit.theta))) @ fit.root.T
            thetas.append(fit.theta + y @ fit.solve.T + noise[:, None] * drawn)
        found = _m(pair, (thetas[0], thetas[1]), t)
        for side in (0, 1):
            shifts = _left_out(pair, runs, t, side)
            chosen = rng.integers(len(shifts.m), size=len(mine))
            found = _Drawn(*(part + shift[chosen] for part, shift in zip(found, shifts, strict=True)))
        for column, part in zip(out, found, strict=True):
            column[mine] = part
    return out


def _left_out(pair: tuple[Surface, Surface], runs: tuple[Runs, Runs], t: Floats, side: int) -> _Drawn:
    """How everything moves when one size of a ladder counts half, a row for each size."""
    whole = _m(pair, (pair[0].theta[None], pair[1].theta[None]), t)
    sizes = np.unique(runs[side].log_n)
    mine = runs[side]
    kept = np.array([surface.refitted(pair[side], mine.y, 1 - 0.5 * (mine.log_n == size)) for size in sizes])
    other = np.repeat(pair[1 - side].theta[None], len(kept), 0)
    moved = _m(pair, (kept, other) if side == 0 else (other, kept), t)
    return _Drawn(*(np.where(np.isfinite(part - middle), _LEFT_OUT * (part - middle), 0.0)
                      for part, middle in zip(moved, whole, strict=True)))  # fmt: skip


def _notes(b: Arm, v: Arm, budgets: Sequence[AtBudget], paired: bool) -> tuple[str, ...]:
    out = [f"{at.flops:.3g} FLOP: a best size is the smallest or largest tried" for at in budgets if not at.inside]
    for who, each, best in (("baseline", b, "size_b"), ("variant", v, "size_v")):
        low = [f"{at.flops:.3g}" for at in budgets if at.inside and getattr(at, best) < HARDLY * each.n.min()]
        if low:
            out.append(f"{who}: at {', '.join(low)} FLOP the best size is hardly above the smallest tried")
    out += [f"{who}: {line}" for who, each in (("baseline", b), ("variant", v)) for line in each.edges]
    if not paired:
        out.append("held-out rows were not kept: their errors count as independent, so the interval is too wide")
    if all(len(np.unique(each.seeds)) == 1 for each in (b, v)):
        out.append("one seed of every size: the noise is that of the residuals alone")
    return tuple(out)

"""Fits one law to one table: point estimate, bootstrap replicates, an interval for every parameter, profile of E."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import bootstrap, laws, verdict
from jaxformer.scaling.profile import Profile, profile_floor
from jaxformer.scaling.table import LARGEST, Floats, Table

_MAX_RATIO = {"E": 2.0, "A": 1000.0, "B": 1000.0, "alpha": 3.0, "beta": 3.0}
_MAX_RATIO |= {"N_c": 1e6, "D_c": 1e6, "alpha_N": 3.0, "alpha_D": 3.0}
_LEAST_DELTA, _MOST_REPLICATES = 1e-9, 100_000
_MOST_WEIGHTS = 200_000_000  # replicates x rows: 1.6 GB
_WORTHLESS = 1e-3  # E below this share of the lowest loss counts as zero


@dataclass(frozen=True)
class Settings:
    """Settings of a fit.

    Attributes:
      delta: of Huber's function on log-residuals.
      replicates: number of bootstrap replicates.
      seed: of the bootstrap.
      resampling: "weights" or "rows", see `bootstrap`.
      budgets: FLOPs at which to report the compute-optimal N and D; if empty, the table's largest and ten times it.
      holdout: number of the largest budgets to leave out and predict; 0: none.
      budget_tolerance: budgets within this relative difference count as equal.
    """

    delta: float = 1e-3
    replicates: int = 1000
    seed: int = 0
    resampling: str = "weights"
    budgets: tuple[float, ...] = ()
    holdout: int = 1
    budget_tolerance: float = 0.05

    def __post_init__(self):
        for name, valid, accepted in (
            ("delta", _LEAST_DELTA <= self.delta < 1, f"a number between 0 and 1, {_LEAST_DELTA:g} at least"),
            ("budget_tolerance", 0 < self.budget_tolerance < 1, "a number between 0 and 1"),
            ("seed", self.seed >= 0, "0 or more"),
            ("replicates", 100 <= self.replicates <= _MOST_REPLICATES, f"100 to {_MOST_REPLICATES}"),
            ("holdout", self.holdout >= 0, "0 or more"),
            ("resampling", self.resampling in bootstrap.RESAMPLING, ", ".join(bootstrap.RESAMPLING)),
        ):
            if not valid:
                raise ConfigError(f"{name}: {getattr(self, name)!r}; accepted: {accepted}")
        for budget in self.budgets:
            if not 1 / LARGEST <= budget <= LARGEST:
                raise ConfigError(f"budget: {budget}; accepted: FLOPs above 0, {LARGEST:g} at most")

    @classmethod
    def of_flags(cls, **fields: Any) -> "Settings":
        """As the class, with an error that names the flag of a program."""
        try:
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"--{error}") from None


def fit_law(law: laws.Law, table: Table, settings: Settings) -> tuple[laws.Estimate, Floats, dict[str, Any]]:
    """Fits a law to all rows of a table: the estimate, its replicates theta [R, P], parameters with intervals."""
    xs = [table.column(name) for name in law.variables]
    found = laws.estimate(law, xs, table.loss, delta=settings.delta, where=table.source)
    drawn = drawn_weights(table, settings)
    thetas = laws.replicate(found, xs, table.loss, drawn)
    value, values = found.natural(found.theta[None]), replicated(found, thetas, table, settings)
    low, high = laws.EXPONENT_RANGE
    stuck = stuck_exponents(law, values)
    ends = f"{low} or {high}, the ends of its range"
    limits = {name: (stuck[pair[1]], f"{pair[1]} = {ends}") for pair in law.terms for name in pair}
    if law.floor:
        limits["E"] = values["E"] < _WORTHLESS * table.loss.min(), "zero"
    levels = bootstrap.tails(len(table), len(law.names), table.clusters)
    profile = profile_floor(found, xs, table.loss, drawn, thetas, levels) if law.floor else None
    parameters: dict[str, Any] = {
        name: bootstrap.quantity(
            float(value[name][0]),
            values[name],
            levels=levels,
            max_ratio=_MAX_RATIO[name],
            at_bound=limits[name][0],
            bound=limits[name][1],
            doubt=_doubt(name, found, profile) if profile else None,
        )
        for name in law.names
    }
    residuals = np.log(table.loss / found.predict(found.theta[None], xs)[0])
    parameters |= {
        "law": str(law),
        "objective": found.value,
        "rms": float(np.sqrt(np.mean(residuals**2))),
        "aicc": verdict.aicc(residuals, len(law.names), table.num_clusters),
        "starts": {"tried": found.num_starts, "reached_best": found.num_reached},
    }
    if profile:
        parameters["profile"] = {
            "E": profile.floor.tolist(),
            "statistic": np.minimum(profile.statistic, 1e6).tolist(),
            "cut": profile.cut,
            "ci95": _crossings(profile.floor, profile.statistic, profile.cut),
        }
        if profile.statistic[0] < profile.cut:  # the first point represents zero
            parameters["E"]["ci95"][0] = parameters["profile"]["ci95"][0] = 0.0
    return found, thetas, parameters


def stuck_exponents(law: laws.Law, values: dict[str, Floats]) -> dict[str, Floats]:
    """[R] bool of each exponent, by name: True where it reached a bound of its range."""
    low, high = laws.EXPONENT_RANGE
    return {name: (values[name] <= low * 1.001) | (values[name] >= high * 0.999) for _, name in law.terms}


def drawn_weights(table: Table, settings: Settings) -> Floats:
    """[R, I] bootstrap weights of the table's rows.

    Raises:
      ConfigError: too many to keep in memory.
    """
    if settings.replicates * len(table) > _MOST_WEIGHTS:
        raise ConfigError(f"replicates (--bootstrap): {settings.replicates} for {len(table)} rows; accepted: "
                          f"rows times replicates of {_MOST_WEIGHTS} at most")  # fmt: skip
    return bootstrap.weights(
        len(table), settings.replicates, seed=settings.seed, clusters=table.clusters, resampling=settings.resampling
    )


def replicated(found: laws.Estimate, thetas: Floats, table: Table, settings: Settings) -> dict[str, Floats]:
    """[R] of each parameter in natural units; E varies additionally by the error that all losses share.

    The profile of E does not include that error.
    """
    values = found.natural(thetas)
    if table.common_error and "E" in values:
        moved = np.random.default_rng((settings.seed, 1)).normal(0.0, table.common_error, len(thetas))
        values = {**values, "E": np.maximum(values["E"] + moved, 0.0)}
    return values


def _doubt(name: str, found: laws.Estimate, profile: Profile) -> str | None:
    """Why the profile of E shows that a parameter is not determined: E is unbounded, or the parameter varies with E."""
    if name == "E":
        if profile.statistic[0] < profile.cut:
            return "its profile is flat down to zero"
        return "its profile is flat up to the lowest loss" if profile.statistic[-1] < profile.cut else None
    path = found.natural(profile.theta)[name][profile.statistic < profile.cut]
    if not len(path) or path.max() <= _MAX_RATIO[name] * path.min():
        return None
    return f"it varies from {path.min():.3g} to {path.max():.3g} as E varies over its 95% interval"


def _crossings(x: Floats, statistic: Floats, cut: float) -> list[float]:
    """Where the statistic's root, interpolated linearly, crosses that of `cut`; an end of x if it does not."""
    root, level = np.sqrt(statistic), np.sqrt(cut)
    inside = np.flatnonzero(root < level)
    if not len(inside):
        return [float(x[statistic.argmin()])] * 2
    ends = []
    for edge, step in ((inside[0], -1), (inside[-1], 1)):
        out = edge + step
        if 0 <= out < len(x):
            share = (level - root[edge]) / (root[out] - root[edge])
            ends.append(float(x[edge] + share * (x[out] - x[edge])))
        else:
            ends.append(float(x[edge]))
    return ends

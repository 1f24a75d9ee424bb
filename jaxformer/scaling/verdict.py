"""Which law of a table fits best, which are beaten clearly, and whether the data know the irreducible loss E at all.

The laws are compared by AICc, with the Laplace likelihood, whose estimate is the one of least absolute deviations that
the fits nearly are: 2 n log(mean |log-residual|) + 2 k + 2 k (k + 1) / (n - k - 1). A law `CLEARLY` above the best has
essentially no support (Burnham & Anderson 2002, section 2.6); its numbers answer a question that these data do not ask,
and are printed with a warning. An E counts as pinned only if the law that fits best pins it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# What the laws of size and tokens are called, by their keys in the result; the sum is Chinchilla's, of E, A / N^alpha
# and B / D^beta.
CALLED = {"parametric": "the sum", "kaplan": "Kaplan's law", "kaplan_floor": "Kaplan's law with a floor"}
CLEARLY = 10.0
_EXACT = 1e-12  # log-residuals below this are rounding


def aicc(residuals: np.ndarray, params: int, clusters: int | None = None) -> float:
    """AICc of a fit of least absolute deviations.

    Args:
      residuals: [I], of log loss.
      params: of the law; the scale of the noise is one more.
      clusters: how many groups of rows vary together; each counts as one observation.

    >>> round(aicc(np.array([0.01, -0.01] * 10), 4), 1)
    -169.9
    """
    count, k = clusters or len(residuals), params + 1
    fit = 2 * count * np.log(max(float(np.abs(residuals).mean()), _EXACT))
    return float(fit + 2 * k + 2 * k * (k + 1) / max(count - k - 1, 1))


def rank(fits: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The laws that were fitted, best first: {"law": key, "aicc", "behind": the best by so much, "rms", "beaten"}.

    Args:
      fits: the laws by the keys of `CALLED`; those that were skipped are left out.
    """
    done = sorted((fit["aicc"], key) for key, fit in fits.items() if key in CALLED and "aicc" in fit)
    return [
        {"law": key, "aicc": value, "behind": value - done[0][0], "rms": fits[key]["rms"],
         "beaten": value - done[0][0] >= CLEARLY} for value, key in done
    ]  # fmt: skip


def higher(difference: float) -> str:
    """A difference of AICc as text.

    >>> higher(963.2), higher(2.916)
    ('963', '2.9')
    """
    return f"{difference:.0f}" if difference >= CLEARLY else f"{difference:.2g}"


def fits_best(ranking: list[dict[str, Any]]) -> str:
    """A clause about the law at the top of a ranking.

    >>> fits_best([{"law": "kaplan", "rms": 0.005, "behind": 0.0}, {"law": "parametric", "rms": 0.02, "behind": 99.0}])
    "Kaplan's law: residuals of 0.5 % (root mean square); then the sum, 2 %, AICc 99 higher"
    """
    first, *others = ranking
    line = f"{CALLED[first['law']]}: residuals of {100 * first['rms']:.2g} % (root mean square)"
    rest = [f"{CALLED[row['law']]}, {100 * row['rms']:.2g} %, AICc {higher(row['behind'])} higher" for row in others]
    return line + (f"; then {'; '.join(rest)}" if rest else "")


def closer(fits: Mapping[str, Mapping[str, Any]]) -> str:
    """Which of the two laws of five parameters, E among them, fits more closely: its E is the one to believe."""
    joined = fits["kaplan_floor"].get("objective", np.inf)
    return "kaplan_floor" if joined < fits["parametric"]["objective"] else "parametric"


def settle_floor(fits: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of the two laws with an E, the one that fits less well: {its key: its E, not pinned} where the better one does
    not pin its own or fits clearly better; {} where it can stand."""
    best = closer(fits)
    other = "parametric" if best == "kaplan_floor" else "kaplan_floor"
    if "E" not in fits[other] or fits[other]["E"]["value"] is None:
        return {}
    judge, name = fits[best]["E"], CALLED[best]
    if judge["value"] is None:
        ends = [*judge["ci95"], *fits[other]["E"]["ci95"]]
        known = [end for end in ends if end is not None]
        return {other: _unpinned(fits[other]["E"], [min(known), max(known)],
                                 f"{name}, which fits better, does not pin it ({judge['why']})")}  # fmt: skip
    if fits[other]["aicc"] - fits[best]["aicc"] < CLEARLY:
        return {}
    low, high = judge["ci95"]
    return {other: _unpinned(fits[other]["E"], judge["ci95"],
                             f"{name}, which fits clearly better, has E = {judge['value']:.4g} "
                             f"[{low:.4g}, {high:.4g}]")}  # fmt: skip


def settle_frontier(floor: Mapping[str, Any], fits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """E of a power law in one variable, which the best law of both has to pin as well."""
    best = closer(fits)
    judge = fits[best]["E"]
    if floor["value"] is None or judge["value"] is not None:
        return dict(floor)
    return _unpinned(floor, floor["ci95"], f"{CALLED[best]}, fitted to all rows, does not pin it")


def warnings(fits: Mapping[str, Any]) -> list[str]:
    """A line about the laws that another beats clearly, or none.

    Args:
      fits: with "ranking", and "holdout" where the largest budgets were predicted.
    """
    ranking = fits["ranking"]
    best, beaten = ranking[0], [row for row in ranking if row["beaten"]]
    if not beaten:
        return []
    names = " and ".join(CALLED[row["law"]] for row in beaten)
    rms = " and ".join(f"{100 * row['rms']:.2g} %" for row in beaten)
    more = " and ".join(f"{higher(row['behind'])}" for row in beaten)
    verb = "is" if len(beaten) == 1 else "are"
    line = (f"{names} {verb} beaten clearly by {CALLED[best['law']]}: residuals of {rms} (root mean square) "
            f"against {100 * best['rms']:.2g} %, AICc {more} higher")  # fmt: skip
    held = fits.get("holdout", {})
    missed = {row["law"]: (held if row["law"] == "parametric" else held.get(row["law"], {})).get("mean_abs_error")
              for row in [best, *beaten]}  # fmt: skip
    if all(value is not None for value in missed.values()):
        off = " and ".join(f"{100 * missed[row['law']]:.2g} %" for row in beaten)
        line += f"; the largest budgets, held out, missed by {off} against {100 * missed[best['law']]:.2g} %"
    whose = "Its E, exponents and best sizes" if len(beaten) == 1 else "Their E, exponents and best sizes"
    return [f"{line}. {whose} are numbers of a law that these data deny"]


def _unpinned(quantity: Mapping[str, Any], ends: list[float], why: str) -> dict[str, Any]:
    return {**quantity, "value": None, "ci95": list(ends), "why": why, "estimate": quantity["value"]}

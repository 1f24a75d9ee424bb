"""Which law fits a table best, which are clearly beaten, and whether the data determine the irreducible loss E at all.

Laws are compared by AICc with the Laplace likelihood, because the fits are nearly least absolute deviations:
2 n log(mean |log-residual|) + 2 k + 2 k (k + 1) / (n - k - 1). A law whose AICc is `CLEARLY` above the lowest has
essentially no support (Burnham & Anderson 2002, section 2.6); its numbers are printed with a warning. E counts as
determined only if the law that fits best determines it.

Of fewer than `FEWEST` rows no law is called beaten. There the last term, a correction for small samples (Hurvich & Tsai
1989), exceeds the 2 k that it corrects, for k = 6: five parameters and the noise scale. With 9 rows it puts those laws
22 above Kaplan's law, which has four parameters, whatever the residuals.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Names of the laws of N and D, by their keys in the result; "the sum" is Chinchilla's, E + A / N^alpha + B / D^beta.
CALLED = {"parametric": "the sum", "kaplan": "Kaplan's law", "kaplan_floor": "Kaplan's law with a floor"}
CLEARLY = 10.0
FEWEST = 14  # 2 k (k + 1) / (n - k - 1) <= 2 k means n >= 2 (k + 1)
_EXACT = 1e-12  # log-residuals below this are rounding


def aicc(residuals: np.ndarray, params: int, clusters: int | None = None) -> float:
    """AICc of a fit of least absolute deviations.

    Args:
      residuals: [I], of log loss.
      params: number of the law's parameters; the noise scale counts as one more.
      clusters: number of groups of rows that vary together, each counted as one observation; None: every row counts.

    >>> round(aicc(np.array([0.01, -0.01] * 10), 4), 1)
    -169.9
    """
    count, k = clusters or len(residuals), params + 1
    fit = 2 * count * np.log(max(float(np.abs(residuals).mean()), _EXACT))
    return float(fit + 2 * k + 2 * k * (k + 1) / max(count - k - 1, 1))


def too_few(count: int) -> str | None:
    """Why so many rows, or clusters of rows, do not allow to compare laws; None if they do."""
    return None if count >= FEWEST else f"{count} runs are too few to compare laws; at least {FEWEST} are needed"


def rank(fits: Mapping[str, Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """The fitted laws, best first: {"law": key, "aicc", "behind": AICc above the best, "rms", "beaten",
    "count"}.

    Args:
      fits: the laws by the keys of `CALLED`; skipped ones are left out.
      count: rows, or clusters of rows.
    """
    done = sorted((fit["aicc"], key) for key, fit in fits.items() if key in CALLED and "aicc" in fit)
    return [
        {"law": key, "aicc": value, "behind": value - done[0][0], "rms": fits[key]["rms"], "count": count,
         "beaten": count >= FEWEST and value - done[0][0] >= CLEARLY} for value, key in done
    ]  # fmt: skip


def higher(difference: float) -> str:
    """A difference of AICc as text.

    >>> higher(963.2), higher(2.916)
    ('963', '2.9')
    """
    return f"{difference:.0f}" if difference >= CLEARLY else f"{difference:.2g}"


def fits_best(ranking: list[dict[str, Any]]) -> str:
    """A clause that names the best law of a ranking and compares the others with it, or says that it cannot.

    >>> ranking = [{"law": "kaplan", "rms": 0.005, "behind": 0.0}, {"law": "parametric", "rms": 0.02, "behind": 99.0}]
    >>> fits_best([{**row, "count": 20} for row in ranking])
    "fits best: Kaplan's law, residuals of 0.5 % (root mean square); then the sum, 2 %, AICc 99 higher"
    >>> fits_best([{**row, "count": 9} for row in ranking]).partition("; at least 14 are needed: ")[::2]
    ('9 runs are too few to compare laws', "Kaplan's law, residuals of 0.5 % (root mean square); the sum, 2 %")
    """
    first, *others = ranking
    few = too_few(first["count"])
    line = f"{few or 'fits best'}: {CALLED[first['law']]}, residuals of {100 * first['rms']:.2g} % (root mean square)"
    for i, row in enumerate(others):
        line += f"; {'then ' * (not few and i == 0)}{CALLED[row['law']]}, {100 * row['rms']:.2g} %"
        line += "" if few else f", AICc {higher(row['behind'])} higher"
    return line


def closer(fits: Mapping[str, Mapping[str, Any]]) -> str:
    """The key of the better fit of the two laws with E (five parameters each): its E is the one to use."""
    joined = fits["kaplan_floor"].get("objective", np.inf)
    return "kaplan_floor" if joined < fits["parametric"]["objective"] else "parametric"


def settle_floor(fits: Mapping[str, Mapping[str, Any]], count: int) -> dict[str, dict[str, Any]]:
    """The corrected E of the worse of the two laws with E, by its key: not determined, if the better law does not
    determine its own E or fits clearly better; {} if it stays as it is. `count`: as in `rank`."""
    best = closer(fits)
    other = "parametric" if best == "kaplan_floor" else "kaplan_floor"
    if "E" not in fits[other] or fits[other]["E"]["value"] is None:
        return {}
    judge, name = fits[best]["E"], CALLED[best]
    if judge["value"] is None:
        known = [end for end in (*judge["ci95"], *fits[other]["E"]["ci95"]) if end is not None]
        return {other: _undetermined(fits[other]["E"], [min(known), max(known)],
                                     f"{name}, which fits better, does not determine it ({judge['why']})")}  # fmt: skip
    if too_few(count) or fits[other]["aicc"] - fits[best]["aicc"] < CLEARLY:
        return {}
    low, high = judge["ci95"]
    return {other: _undetermined(fits[other]["E"], judge["ci95"],
                                 f"{name}, which fits clearly better, has E = {judge['value']:.4g} "
                                 f"[{low:.4g}, {high:.4g}]")}  # fmt: skip


def settle_frontier(floor: Mapping[str, Any], fits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """E of a power law in one variable: determined only if the better law of N and D determines E too."""
    best = closer(fits)
    if floor["value"] is None or fits[best]["E"]["value"] is not None:
        return dict(floor)
    return _undetermined(floor, floor["ci95"], f"{CALLED[best]}, fitted to all rows, does not determine it")


def warnings(fits: Mapping[str, Any]) -> list[str]:
    """A line about the laws that the best one clearly beats, or that they cannot be compared; [] if there are none.

    Args:
      fits: a result with "ranking", and with "holdout" if the largest budgets were predicted.
    """
    ranking = fits["ranking"]
    best, beaten = ranking[0], [row for row in ranking if row["beaten"]]
    if not beaten:
        return [few] if (few := too_few(best["count"])) else []
    names = " and ".join(CALLED[row["law"]] for row in beaten)
    rms = " and ".join(f"{100 * row['rms']:.2g} %" for row in beaten)
    more = " and ".join(higher(row["behind"]) for row in beaten)
    verb, whose = ("is", "Its") if len(beaten) == 1 else ("are", "Their")
    line = (f"{names} {verb} beaten clearly by {CALLED[best['law']]}: residuals of {rms} (root mean square) "
            f"against {100 * best['rms']:.2g} %, AICc {more} higher")  # fmt: skip
    held = fits.get("holdout", {})
    missed = {row["law"]: (held if row["law"] == "parametric" else held.get(row["law"], {})).get("mean_abs_error")
              for row in [best, *beaten]}  # fmt: skip
    if all(value is not None for value in missed.values()):
        off = " and ".join(f"{100 * missed[row['law']]:.2g} %" for row in beaten)
        line += f"; the largest budgets, held out, missed by {off} against {100 * missed[best['law']]:.2g} %"
    return [f"{line}. {whose} E, exponents and best sizes belong to a law that these data reject"]


def _undetermined(quantity: Mapping[str, Any], ends: list[float], why: str) -> dict[str, Any]:
    return {**quantity, "value": None, "ci95": list(ends), "why": why, "estimate": quantity["value"]}

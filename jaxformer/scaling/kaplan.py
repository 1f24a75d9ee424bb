"""Kaplan's joint law: what size and data cost is not added up, but limits together.

    L = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D        (Kaplan et al. 2020, equation 1.5)

It has no irreducible loss, and a larger model has more to gain from more text: two things in which it differs from
L = E + A / N^alpha + B / D^beta, so that the two disagree about what was not measured. On a logarithmic scale and with
alpha_D held it is one of the laws of `solver`, losses being log L / alpha_D; alpha_D is searched around that.

>>> size, tokens = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e6, 3e7, 6), np.geomspace(2e7, 2e9, 7)))
>>> loss = ((8.8e13 / size) ** (0.076 / 0.095) + 5.4e13 / tokens) ** 0.095
>>> theta = estimate(size, tokens, loss)
>>> {name: float(f"{value[0]:.2g}") for name, value in natural(theta[None], size, tokens).items()}
{'alpha_N': 0.076, 'alpha_D': 0.095, 'N_c': 88000000000000.0, 'D_c': 54000000000000.0}
"""

from typing import Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.scaling import bootstrap, solver
from jaxformer.scaling.law_fit import Settings
from jaxformer.scaling.table import Table

Floats = np.ndarray

LAW = "L = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D"
_OUTER = np.geomspace(0.02, 2.0, 25)  # alpha_D
_AROUND = np.geomspace(0.5, 2.0, 9)  # of the estimate's, for replicates
_FINE = np.geomspace(0.85, 1.18, 9)  # of the best so far, closer each time
_RATIOS = (0.3, 1.0, 3.0)  # starts of alpha_N / alpha_D
_ROWS_NEEDED = 7
_MAX_RATIO = {"alpha_N": 3.0, "alpha_D": 3.0, "N_c": 1e6, "D_c": 1e6}
_MAX_REPLICATES = 200  # each costs a search of its own


def estimate(n: Floats, d: Floats, loss: Floats, *, delta: float = 1e-3) -> Floats:
    """The law of a table, theta [4] (for `predict`, `natural` and `replicate`).

    Args:
      n, d: [I] parameters and tokens.
      loss: [I].
      delta: of Huber's function on log-residuals, summed over rows.
    """
    half = np.log(0.5) + np.median(np.log(loss)) / _OUTER
    starts = [np.stack([half, np.full(len(_OUTER), ratio), half, _OUTER], axis=1) for ratio in _RATIOS]
    one = np.ones((1, len(loss)))
    theta, value = _best(n, d, loss, one, np.concatenate(starts)[None], delta)
    return _refined(n, d, loss, one, theta, value, delta)[0]


def replicate(theta: Floats, n: Floats, d: Floats, loss: Floats, weights: Floats, *, delta: float = 1e-3) -> Floats:
    """Refits under each row of weights [R, I], from the estimate theta [4]. Returns theta [R, 4]."""
    starts = _moved(theta[None], theta[3] * _AROUND)
    found = _best(n, d, loss, weights, np.tile(starts, (len(weights), 1, 1)), delta)
    return _refined(n, d, loss, weights, *found, delta)


def predict(theta: Floats, at: tuple[Floats, Floats], n: Floats, d: Floats) -> Floats:
    """Loss [R, J] of theta [R, 4] at the sizes and tokens `at`, [J] each; n, d: those of the fit."""
    outer = theta[:, 3:]
    return np.exp(outer * solver.predict_log(_design(*at, n, d), _inner(theta)))


def natural(theta: Floats, n: Floats, d: Floats) -> dict[str, Floats]:
    """alpha_N, alpha_D, N_c and D_c, [R] each, of theta [R, 4]; n, d: those of the fit."""
    ratio, outer = theta[:, 1], theta[:, 3]
    return {
        "alpha_N": ratio * outer,
        "alpha_D": outer,
        "N_c": np.exp(np.log(n).mean() + theta[:, 0] / ratio),
        "D_c": np.exp(np.log(d).mean() + theta[:, 2]),
    }


def fit(table: Table, settings: Settings) -> dict[str, Any]:
    """The parameters and the compute-optimal exponents with bootstrap intervals, and the root of the mean squared
    log-residual.

    The best size for C ~ N D grows as C^a with a = 1 / (1 + alpha_N / alpha_D), the best amount of text as C^b with
    b = 1 - a: where the loss is least, alpha_N / alpha_D times the term of N equals the term of D.

    Raises:
      ConfigError: too few rows or sizes.
    """
    check(table)
    drawn = _drawn(table, settings)
    theta = estimate(table.n, table.d, table.loss, delta=settings.delta)
    thetas = replicate(theta, table.n, table.d, table.loss, drawn, delta=settings.delta)
    values = natural(thetas, table.n, table.d)
    levels = bootstrap.tails(len(table), 4, table.clusters)
    a = 1 / (1 + np.append(theta[1], thetas[:, 1]))
    residuals = np.log(table.loss / predict(theta[None], (table.n, table.d), table.n, table.d)[0])
    return {
        "law": LAW,
        **{
            name: bootstrap.quantity(float(value[0]), values[name], levels=levels, max_ratio=_MAX_RATIO[name])
            for name, value in natural(theta[None], table.n, table.d).items()
        },
        "a": bootstrap.quantity(a[0], a[1:], levels=levels, max_width=0.5),
        "b": bootstrap.quantity(1 - a[0], 1 - a[1:], levels=levels, max_width=0.5),
        "rms": float(np.sqrt(np.mean(residuals**2))),
    }


def forecast(rest: Table, test: Table, settings: Settings) -> tuple[Floats, Floats]:
    """Losses [J] of the rows of `test` predicted from `rest`, and those of the replicates [R, J].

    Raises:
      ConfigError: too few rows or sizes in `rest`.
    """
    check(rest)
    theta = estimate(rest.n, rest.d, rest.loss, delta=settings.delta)
    thetas = replicate(theta, rest.n, rest.d, rest.loss, _drawn(rest, settings), delta=settings.delta)
    point, drawn = (predict(each, (test.n, test.d), rest.n, rest.d) for each in (theta[None], thetas))
    return point[0], drawn


def check(table: Table) -> None:
    """Refuses a table that is too small, saying how much is needed."""
    if len(table) < _ROWS_NEEDED:
        raise ConfigError(f"{table.source}: {len(table)} rows; {LAW} needs at least {_ROWS_NEEDED}")
    for name in ("n", "d"):
        found = len(np.unique(getattr(table, name)))
        if found < 3:
            raise ConfigError(f"{table.source}: {found} different {name.upper()}; {LAW} needs at least 3 of them")


def _drawn(table: Table, settings: Settings) -> Floats:
    count = min(settings.replicates, _MAX_REPLICATES)
    return bootstrap.weights(
        len(table), count, seed=settings.seed, clusters=table.clusters, resampling=settings.resampling
    )


def _design(n: Floats, d: Floats, fitted_n: Floats, fitted_d: Floats) -> Floats:
    """[I, 2, 4]: of theta without alpha_D, and with the exponent of D at one, what `_inner` returns."""
    out = np.zeros((len(n), 2, 4))
    out[:, 0, 0] = out[:, 1, 2] = 1.0
    out[:, 0, 1] = np.log(fitted_n).mean() - np.log(n)
    out[:, 1, 3] = np.log(fitted_d).mean() - np.log(d)
    return out


def _inner(theta: Floats) -> Floats:
    """[R, 4] as `_design` takes it: log of N's term at the middle of the data, its exponent, log of D's term, 1."""
    return np.concatenate([theta[:, :3], np.ones((len(theta), 1))], axis=1)


def _moved(theta: Floats, outer: Floats) -> Floats:
    """Theta [R, S, 4] at other alpha_D, [S] or [R, S], with the same terms and the same exponent of N."""
    outer = np.broadcast_to(outer, (len(theta), np.shape(outer)[-1]))
    return np.concatenate([theta[:, None, :3] * (theta[:, 3:] / outer)[..., None], outer[..., None]], axis=2)


def _refined(n, d, loss, weights, theta: Floats, value: Floats, delta: float) -> Floats:
    """Searched again around the best alpha_D of each problem, closer each time. Returns theta [R, 4]."""
    for closeness in (1.0, 0.2, 0.04):
        again, lower = _best(n, d, loss, weights, _moved(theta, theta[:, 3:] * _FINE**closeness), delta)
        better = lower < value
        theta[better], value[better] = again[better], lower[better]
    return theta


def _best(n, d, loss, weights: Floats, starts: Floats, delta: float) -> tuple[Floats, Floats]:
    """The best theta [R, 4] and its objective [R] over starts [R, S, 4], whose alpha_D is held.

    Huber's function of r / s with delta / s is that of r with delta, over s squared.
    """
    replicates, tries = starts.shape[:2]
    start, outer = starts.reshape(-1, 4), starts[..., 3].ravel()
    low, high = np.array([-1e3, 0.02, -1e3, 1.0]), np.array([1e3, 50.0, 1e3, 1.0])
    found, value = solver.minimise(
        _design(n, d, n, d), np.log(loss)[None] / outer[:, None], np.repeat(weights, tries, axis=0), _inner(start),
        low, high, delta=delta / outer,
    )  # fmt: skip
    theta = np.concatenate([found[:, :3], outer[:, None]], axis=1)
    value = (value * outer**2).reshape(replicates, tries)
    best, rows = value.argmin(1), np.arange(replicates)
    return theta.reshape(replicates, tries, 4)[rows, best], value[rows, best]

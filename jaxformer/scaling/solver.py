"""Many small robust fits at once: a batched minimiser for loss laws.

A law is a function of its parameters theta [R, P] that returns log L [R, I] and a function for its derivatives;
`forms` has those of this package. The objective is the sum of Huber's function over the log-residuals (Hoffmann et al.
2022, appendix D.3). Thousands of bootstrap replicates and starts take minutes to hours with a general minimiser called
for each; here they take their Newton steps together.

Suffixes: R problem (replicate or start), I row of the table, P parameter.
"""

from collections.abc import Callable

import numpy as np

Floats = np.ndarray  # float64 throughout
Slopes = Callable[[], list[Floats]]  # d log L / d theta_p, a list of P arrays [R, I]
LogLaw = Callable[[Floats], tuple[Floats, Slopes]]

_ROW_BUDGET = 40_000  # problems x rows per chunk: the temporaries stay in the CPU's cache


def huber(residuals: Floats, delta: float) -> Floats:
    """Huber's function: r^2 / 2 up to `delta`, then delta * (|r| - delta / 2).

    >>> huber(np.array([0.5, -3.0]), 1.0).tolist()
    [0.125, 2.5]
    """
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta))


def objective(law: LogLaw, target: Floats, weights: Floats, theta: Floats, delta: float) -> Floats:
    """Sum over rows of weight * huber(target - log L). Shapes as in `minimise`. Returns [R]."""
    return (weights * huber(target - law(theta)[0], delta)).sum(-1)


def minimise(
    law: LogLaw,
    target: Floats,
    weights: Floats,
    start: Floats,
    lower: Floats,
    upper: Floats,
    *,
    delta: float = 1e-3,
    max_steps: int = 300,
) -> tuple[Floats, Floats]:
    """Minimises the Huber objective of R independent problems within bounds, from one start each.

    The step solves (H + damping * M) step = gradient. H is the Gauss-Newton Hessian of Huber's function, to which only
    rows within `delta` of the curve contribute; M is that of its quadratic majoriser (iteratively reweighted least
    squares), to which every row contributes. So damping 1 is safe when few rows are within delta, and damping 0 is
    Newton's method. A parameter whose gradient points out of its bound is fixed during the step.

    Args:
      law: theta [R, P] -> log L [R, I], slopes.
      target: [I], log of the measured losses.
      weights: [I] or [R, I]; 0 leaves a row out, 2 counts it twice.
      start: [R, P].
      lower, upper: [P] or [R, P]; equal values fix a parameter.
      delta: where Huber's function changes from quadratic to linear.
      max_steps: most steps tried per problem; the best point so far is returned.

    Returns:
      theta [R, P] and its objective [R].
    """
    count, rows = len(start), len(target)
    lower, upper = np.broadcast_to(lower, start.shape), np.broadcast_to(upper, start.shape)
    weights = np.broadcast_to(weights, (count, rows))
    theta, value = np.empty_like(start), np.empty(count)
    chunk = max(1, _ROW_BUDGET // rows)
    for low in range(0, count, chunk):
        part = slice(low, low + chunk)
        theta[part], value[part] = _minimise_chunk(
            law, target, weights[part], start[part], lower[part], upper[part], delta, max_steps
        )
    return theta, value


def _minimise_chunk(law, target, weights, start, lower, upper, delta, max_steps):
    params = start.shape[1]
    theta = np.clip(start, lower, upper)
    value = objective(law, target, weights, theta, delta)
    damping = np.ones(len(start))
    small = np.zeros(len(start), int)  # consecutive steps with almost no improvement
    live = np.arange(len(start))
    for _ in range(max_steps):
        if not len(live):
            break
        th, wt = theta[live], weights[live]
        log_loss, slopes_of = law(th)
        residual = target - log_loss
        size = np.maximum(np.abs(residual), 1e-300)
        majorant = wt * np.minimum(1.0, delta / size)
        newton = np.where(size <= delta, wt, 0.0)
        curve = newton + damping[live, None] * majorant
        slopes = slopes_of()
        gradient = np.stack([(majorant * residual * s).sum(-1) for s in slopes], -1)
        matrix = np.empty((len(live), params, params))
        for p in range(params):
            weighted = curve * slopes[p]
            for q in range(p, params):
                matrix[:, p, q] = matrix[:, q, p] = np.einsum("ri,ri->r", weighted, slopes[q])
        held = ((th <= lower[live]) & (gradient <= 0)) | ((th >= upper[live]) & (gradient >= 0))
        free = ~held
        matrix *= free[:, :, None] & free[:, None, :]
        diagonal = np.einsum("rpp->rp", matrix)  # a view
        diagonal += 1e-10 * diagonal.max(-1, keepdims=True) + held + 1e-14
        step = np.linalg.solve(matrix, (gradient * free)[..., None])[..., 0]
        trial = np.clip(th + step, lower[live], upper[live])
        trial_value = objective(law, target, wt, trial, delta)
        old = value[live]
        better = trial_value < old
        theta[live] = np.where(better[:, None], trial, th)
        value[live] = np.where(better, trial_value, old)
        damping[live] = np.clip(np.where(better, damping[live] * 0.25, damping[live] * 6.0), 1e-9, 1e9)
        tiny = better & (old - trial_value <= 1e-10 * old)
        small[live] = np.where(better, np.where(tiny, small[live] + 1, 0), small[live])
        done = (small[live] >= 3) | (~better & (damping[live] > 1e6))
        live = live[~done]
    return theta, value

"""Many small robust fits at once: a batched minimiser for laws that are sums of power terms.

Every law fitted here is, on a log scale, a log-sum-exp of linear functions of its parameters:

    log L(theta) = log sum_k exp(design[i, k] . theta)

One term is a pure power law, two are `E + A x^-alpha`, three are Chinchilla's `E + A N^-alpha + B D^-beta`. The
loss is the sum of Huber's function over the log-residuals (Hoffmann et al. 2022, appendix D.3). With a thousand
bootstrap replicates times a few starts, a call to a general minimiser for each takes minutes to hours; here all of
them take their Newton steps together.

Suffixes: R problem (replicate or start), I row of the table, K term, P parameter.
"""

import numpy as np

Floats = np.ndarray  # float64 throughout

_ROW_BUDGET = 40_000  # problems x rows worked on at once, so that the temporaries stay in cache


def huber(residuals: Floats, delta: float | Floats) -> Floats:
    """Huber's function: r^2 / 2 up to `delta`, then delta * (|r| - delta / 2).

    >>> huber(np.array([0.5, -3.0]), 1.0).tolist()
    [0.125, 2.5]
    """
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta))


def predict_log(design: Floats, theta: Floats) -> Floats:
    """log L of every row. design: [I, K, P]; theta: [R, P]. Returns [R, I]."""
    return _terms(design, theta)[0]


def objective(design: Floats, target: Floats, weights: Floats, theta: Floats, delta: float) -> Floats:
    """Sum over rows of weight * huber(target - log L). Shapes as in `minimise`. Returns [R]."""
    return (weights * huber(target - predict_log(design, theta), delta)).sum(-1)


def minimise(
    design: Floats,
    target: Floats,
    weights: Floats,
    start: Floats,
    lower: Floats,
    upper: Floats,
    *,
    delta: float | Floats = 1e-3,
    max_steps: int = 300,
) -> tuple[Floats, Floats]:
    """Minimises the Huber objective of R independent problems over a box, from one start each.

    The step solves (H + damping * M) step = gradient. H is the Gauss-Newton Hessian of Huber's function, in which
    only rows within `delta` of the curve count; M is that of its quadratic majoriser (iteratively reweighted least
    squares), in which every row counts. Damping 1 is thus a safe step when few rows are within delta, and damping
    going to 0 is Newton's method. A parameter pressed against its bound is held there for the step.

    Args:
      design: [I, K, P].
      target: [I] or [R, I], log of the measured losses.
      weights: [I] or [R, I]; 0 leaves a row out, 2 counts it twice.
      start: [R, P].
      lower, upper: [P] or [R, P]; equal values fix a parameter.
      delta: where Huber's function turns from quadratic to linear; one, or [R].
      max_steps: steps tried per problem; the best point so far is returned.

    Returns:
      theta [R, P] and its objective [R].
    """
    count, rows = len(start), len(design)
    lower, upper = np.broadcast_to(lower, start.shape), np.broadcast_to(upper, start.shape)
    target, weights = np.broadcast_to(target, (count, rows)), np.broadcast_to(weights, (count, rows))
    edges = np.broadcast_to(delta, (count,))[:, None]
    theta, value = np.empty_like(start), np.empty(count)
    chunk = max(1, _ROW_BUDGET // rows)
    for low in range(0, count, chunk):
        part = slice(low, low + chunk)
        theta[part], value[part] = _minimise_chunk(
            design, target[part], weights[part], start[part], lower[part], upper[part], edges[part], max_steps
        )
    return theta, value


def _terms(design: Floats, theta: Floats) -> tuple[Floats, list[Floats]]:
    """log L [R, I], and the share of each term in L, a list of K arrays [R, I]."""
    logs = [theta @ design[:, k].T for k in range(design.shape[1])]
    if len(logs) == 1:
        return logs[0], [np.ones_like(logs[0])]
    top = logs[0]
    for log in logs[1:]:
        top = np.maximum(top, log)
    shares = [np.exp(log - top) for log in logs]
    total = sum(shares[1:], start=shares[0])
    return top + np.log(total), [share / total for share in shares]


def _minimise_chunk(design, target, weights, start, lower, upper, delta, max_steps):
    params = design.shape[2]
    theta = np.clip(start, lower, upper)
    log_loss, shares = _terms(design, theta)
    value = (weights * huber(target - log_loss, delta)).sum(-1)
    damping = np.ones(len(start))
    small = np.zeros(len(start), int)  # steps in a row that gained next to nothing
    live = np.arange(len(start))
    for _ in range(max_steps):
        if not len(live):
            break
        th, tg, wt = theta[live], target[live], weights[live]
        log_loss, shares = _terms(design, th)
        residual = tg - log_loss
        size = np.maximum(np.abs(residual), 1e-300)
        edge = delta[live]
        majorant = wt * np.minimum(1.0, edge / size)
        newton = np.where(size <= edge, wt, 0.0)
        curve = newton + damping[live, None] * majorant
        slopes = [_column(design, shares, p) for p in range(params)]
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
        trial_value = (wt * huber(tg - _terms(design, trial)[0], edge)).sum(-1)
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


def _column(design: Floats, shares: list[Floats], p: int) -> Floats:
    """d log L / d theta_p, [R, I]."""
    parts = [shares[k] * design[:, k, p] for k in range(design.shape[1]) if design[:, k, p].any()]
    return sum(parts[1:], start=parts[0]) if parts else np.zeros_like(shares[0])

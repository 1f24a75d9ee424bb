"""The two forms of a loss law, for `solver`: log L of every row, and its derivatives by the parameters.

    power_sum   log L = log sum_k exp(design[i, k] . theta): a power law, with or without E, or Chinchilla's sum of two
    joined      log L = log(E + ((A / N^alpha)^(1/beta) + (B / D^beta)^(1/beta))^beta): Kaplan's law, with or without E

Suffixes: R problem, I row of the table, K term, P parameter.
"""

import functools

import numpy as np

from jaxformer.scaling.solver import Floats, LogLaw


def power_sum(design: Floats) -> LogLaw:
    """The law whose terms' logarithms are linear in the parameters; design: [I, K, P]."""
    terms, params = range(design.shape[1]), range(design.shape[2])
    used = [[k for k in terms if design[:, k, p].any()] for p in params]

    def law(theta):
        total, shares = _log_sum([theta @ design[:, k].T for k in terms])

        def slopes():
            columns = [[shares()[k] * design[:, k, p] for k in used[p]] for p in params]
            return [sum(parts[1:], start=parts[0]) if parts else np.zeros_like(total) for parts in columns]

        return total, slopes

    return law


def joined(log_n: Floats, log_d: Floats, floor: bool) -> LogLaw:
    """Kaplan's law of log_n [I] and log_d [I], centred logarithms.

    A row of theta is (log E,) log A, alpha_N, log B, alpha_D: A / N^alpha_N is the loss above E with unlimited data,
    B / D^alpha_D that of an unlimited model; log E only with `floor`.
    """

    def law(theta):
        log_a, alpha, log_b, beta = (theta[:, p, None] for p in range(int(floor), 4 + floor))
        size, text = (log_a - alpha * log_n) / beta, (log_b - beta * log_d) / beta
        inner, inner_shares = _log_sum([size, text])
        total, shares = _log_sum([theta[:, :1], beta * inner]) if floor else (beta * inner, None)

        def slopes():
            of_size, of_text = inner_shares()
            # beta is also the root taken of each term; the remaining part of its derivative is the shares' entropy.
            out = [of_size, -of_size * log_n, of_text, inner - of_size * size - of_text * text - of_text * log_d]
            if shares is None:
                return out
            of_floor, rest = shares()
            return [of_floor, *(rest * slope for slope in out)]

        return total, slopes

    return law


def _log_sum(logs):
    """log sum exp of a list of arrays, and a function that returns each one's share of the sum."""
    if len(logs) == 1:
        return logs[0], lambda: [np.ones_like(logs[0])]
    top = functools.reduce(np.maximum, logs)
    parts = [np.exp(log - top) for log in logs]
    total = sum(parts[1:], start=parts[0])
    return top + np.log(total), lambda: [part / total for part in parts]

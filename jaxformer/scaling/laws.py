"""The loss laws and their point estimates: the best of a grid of starts, each run to convergence.

    Law(("N", "D"))               L = E + A / N^alpha + B / D^beta     (Hoffmann et al. 2022, approach 3)
    Law(("C",))                   L = E + A / C^alpha
    Law(("C",), floor=False)      L = A / C^alpha                      (Kaplan et al. 2020; the scale is A^(1/alpha))
    KAPLAN                        L = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D  (the same, equation 1.5)
    KAPLAN_FLOOR                  L = E + that

In Kaplan's law the two terms are not additive: a larger model gains more from more data. So it and Chinchilla's sum,
with the same number of parameters once both have E, extrapolate differently.

Internally, parameters are logarithms: e = log E, a = log of the term's value at the centre of the data, which makes
coefficient and exponent nearly independent; `natural` converts back to E, A, alpha, B, beta.

>>> law = Law(("N",))
>>> law.names, str(law)
(('E', 'A', 'alpha'), 'L = E + A / N^alpha')
>>> n = np.geomspace(1e5, 1e8, 12)
>>> found = estimate(law, [n], 1.7 + 400 * n**-0.34)
>>> {name: float(round(value[0], 3)) for name, value in found.natural(found.theta[None]).items()}
{'E': 1.7, 'A': 400.0, 'alpha': 0.34}
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import forms, solver

Floats = np.ndarray

EXPONENT_RANGE = (0.005, 5.0)
_SUM = (("A", "alpha"), ("B", "beta"))
_JOINED = (("N_c", "alpha_N"), ("D_c", "alpha_D"))
_START_EXPONENTS = (0.08, 0.2, 0.4, 0.8, 1.6)
_START_FLOORS = (0.05, 0.4, 0.75, 0.95)  # E as a share of the lowest loss
_MOST_LOG = 690.0  # largest logarithm that a float holds, for a coefficient whose exponent reached its bound
_SAMPLE = 48  # replicates that try the additional starts first


@dataclass(frozen=True)
class Law:
    """A loss law: power terms in `variables` (one or two names), added up or, if `joined`, combined as in Kaplan's law;
    with the irreducible loss E if `floor`.
    """

    variables: tuple[str, ...]
    floor: bool = True
    joined: bool = False

    @property
    def terms(self) -> tuple[tuple[str, str], ...]:
        """The coefficient and the exponent of each variable's term."""
        return (_JOINED if self.joined else _SUM)[: len(self.variables)]

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters, in the order of theta."""
        return ("E",) * self.floor + tuple(itertools.chain.from_iterable(self.terms))

    def __str__(self) -> str:
        if self.joined:
            terms = ["[(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D"]
        else:
            terms = [f"{a} / {x}^{alpha}" for x, (a, alpha) in zip(self.variables, self.terms, strict=True)]
        return "L = " + " + ".join(["E"] * self.floor + terms)

    @property
    def rows_needed(self) -> int:
        """Fewest rows that can be fitted: three more than the number of parameters."""
        return len(self.names) + 3

    def of(self, xs: Sequence[Floats], centres: Floats) -> solver.LogLaw:
        """The function for `solver`; xs: one [I] per variable; centres: [V], mean log of each."""
        logs = [np.log(x) - centre for x, centre in zip(xs, centres, strict=True)]
        if self.joined:
            return forms.joined(logs[0], logs[1], self.floor)
        first = int(self.floor)
        design = np.zeros((len(xs[0]), first + len(xs), len(self.names)))
        if self.floor:
            design[:, 0, 0] = 1.0
        for i, log in enumerate(logs):
            design[:, first + i, first + 2 * i] = 1.0
            design[:, first + i, first + 2 * i + 1] = -log
        return forms.power_sum(design)

    def bounds(self, loss: Floats) -> tuple[Floats, Floats]:
        """Bounds of theta: E from 1e-4 of the lowest loss ("zero") to 5 % above it; exponents 0.005 to 5."""
        low, high = float(np.log(loss.min())), float(np.log(loss.max()))
        lower = [low + np.log(1e-4)] * self.floor + [low - 20.0, EXPONENT_RANGE[0]] * len(self.variables)
        upper = [low + np.log(1.05)] * self.floor + [high + 5.0, EXPONENT_RANGE[1]] * len(self.variables)
        return np.array(lower), np.array(upper)

    def starts(self, loss: Floats) -> Floats:
        """[S, P]: every combination of the start exponents (and E); the terms share the remaining loss equally."""
        out = []
        for share in _START_FLOORS if self.floor else (0.0,):
            floor = share * loss.min()
            head = [np.log(floor)] if self.floor else []
            term = np.log((np.median(loss) - floor) / len(self.variables))
            for exponents in itertools.product(_START_EXPONENTS, repeat=len(self.variables)):
                out.append(head + [v for exponent in exponents for v in (term, exponent)])
        return np.array(out)

    def natural(self, theta: Floats, centres: Floats) -> dict[str, Floats]:
        """Parameters by name, [R] each, of theta [R, P]."""
        first = int(self.floor)
        out = {"E": np.exp(theta[:, 0])} if self.floor else {}
        for i, (coefficient, exponent) in enumerate(self.terms):
            log_size, alpha = theta[:, first + 2 * i], theta[:, first + 2 * i + 1]
            log_scale = log_size / alpha + centres[i]
            out[coefficient] = np.exp(np.clip(log_scale if self.joined else alpha * log_scale, -_MOST_LOG, _MOST_LOG))
            out[exponent] = alpha
        return out

    def check(self, xs: Sequence[Floats], where: str) -> None:
        """Raises ConfigError, saying what is needed, if the rows cannot determine all parameters."""
        if len(xs[0]) < self.rows_needed:
            rows = f"{len(xs[0])} row{'s' * (len(xs[0]) != 1)}"
            raise ConfigError(f"{where}: {rows}; {self} needs at least {self.rows_needed}")
        for name, x in zip(self.variables, xs, strict=True):
            different, needed = len(np.unique(x)), 3 if len(self.variables) > 1 else len(self.names) + 1
            if different < needed:
                raise ConfigError(f"{where}: {different} different {name}; {self} needs at least {needed} of them")
        if len(xs) == 2:
            logs = [np.log(x) - np.log(x).mean() for x in xs]
            if abs(logs[0] @ logs[1]) > 0.9999 * np.sqrt((logs[0] @ logs[0]) * (logs[1] @ logs[1])):
                raise ConfigError(
                    f"{where}: {' and '.join(self.variables)} rise and fall together; {self} needs rows of different "
                    f"{self.variables[1]} at the same {self.variables[0]} (3 of each at least)"
                )


SUM = Law(("N", "D"))
KAPLAN = Law(("N", "D"), floor=False, joined=True)
KAPLAN_FLOOR = Law(("N", "D"), joined=True)


@dataclass(frozen=True)
class Estimate:
    """A law's point estimate.

    Attributes:
      theta: [P], internal parameters at the lowest objective found.
      value: the objective there: sum (not mean) of Huber's function over log-residuals.
      others: [Q, P], additional starts for replicates: the best parameters with E fixed at lower and higher values.
      num_starts, num_reached: starts tried, and how many of them ended within a millionth of the lowest objective.
    """

    law: Law
    centres: Floats
    delta: float
    theta: Floats
    value: float
    others: Floats
    num_starts: int
    num_reached: int

    def natural(self, theta: Floats) -> dict[str, Floats]:
        """Parameters by name, [R] each, of theta [R, P]."""
        return self.law.natural(theta, self.centres)

    def predict(self, theta: Floats, xs: Sequence[Floats]) -> Floats:
        """Loss [R, I] of theta [R, P] at one [I] array per variable."""
        return np.exp(self.law.of(xs, self.centres)(theta)[0])


def estimate(law: Law, xs: Sequence[Floats], loss: Floats, *, delta: float = 1e-3, where: str = "table") -> Estimate:
    """Fits `law` from every start of its grid.

    Args:
      xs: one [I] array per variable, positive.
      loss: [I], nats per token (or any positive loss).
      delta: of Huber's function on log-residuals; 1e-3 as in Hoffmann et al. 2022.

    Raises:
      ConfigError: too few rows, or too few different values of a variable.
    """
    law.check(xs, where)
    centres = np.array([np.log(x).mean() for x in xs])
    curve, target, (lower, upper) = law.of(xs, centres), np.log(loss), law.bounds(loss)
    starts = law.starts(loss)
    theta, value = solver.minimise(curve, target, np.ones(len(loss)), starts, lower, upper, delta=delta)
    best = int(value.argmin())
    found = Estimate(law, centres, delta, theta[best], float(value[best]), theta[:0], len(starts),
                     int((value <= value[best] * (1 + 1e-6) + 1e-15).sum()))  # fmt: skip
    if not law.floor:
        return found
    floor = np.exp(theta[best, 0])
    floors = np.array([floor * 0.3, floor * 0.85, 0.5 * (floor + np.exp(upper[0]))])
    return replace(found, others=hold_floor(found, curve, target, floors, lower, upper)[0])


def replicate(found: Estimate, xs: Sequence[Floats], loss: Floats, weights: Floats) -> Floats:
    """Refits under each row of `weights` [R, I]. Returns theta [R, P].

    Every replicate starts at the estimate. A sample of them also starts at each of `found.others`; if that improves any
    of them, all replicates do so, and each keeps its best result.
    """
    curve, target, (lower, upper) = found.law.of(xs, found.centres), np.log(loss), found.law.bounds(loss)

    def solve(start, part):
        start = np.repeat(start[None], len(part), 0)
        return solver.minimise(curve, target, part, start, lower, upper, delta=found.delta)

    theta, value = solve(found.theta, weights)
    for start in found.others:
        _, sample = solve(start, weights[:_SAMPLE])
        if np.any(sample < value[:_SAMPLE] * (1 - 1e-6)):
            other, other_value = solve(start, weights)
            better = other_value < value
            theta[better], value[better] = other[better], other_value[better]
    return theta


def robust_scale(residuals: Floats, params: int) -> float:
    """Standard deviation of the noise from the median absolute deviation, corrected for the number of parameters."""
    count = len(residuals)
    spread = 1.4826 * float(np.median(np.abs(residuals - np.median(residuals))))
    return spread * float(np.sqrt(count / max(count - params, 1)))


def hold_floor(found, curve, target, floors, lower, upper):
    """Best theta [F, P] and objective [F] with E fixed at each of `floors` [F], from several starts each."""
    loss = np.exp(target)
    seeds = np.concatenate([found.theta[None], found.law.starts(loss)[::11]])
    start = np.tile(seeds, (len(floors), 1))
    held = np.repeat(floors, len(seeds))
    room = np.maximum(np.median(loss) - held, 0.01 * loss.min())  # the loss above E that the terms have to explain
    start[:, 1::2] = np.minimum(start[:, 1::2], np.log(room)[:, None])
    low, high = np.tile(lower, (len(start), 1)), np.tile(upper, (len(start), 1))
    low[:, 0] = high[:, 0] = np.log(held)
    theta, value = solver.minimise(curve, target, np.ones(len(target)), start, low, high, delta=found.delta)
    theta, value = theta.reshape(len(floors), len(seeds), -1), value.reshape(len(floors), len(seeds))
    best = value.argmin(1)
    return theta[np.arange(len(floors)), best], value[np.arange(len(floors)), best]

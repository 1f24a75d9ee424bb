"""Tables with a planted law, for the tests of the fits."""

import numpy as np

# Besiroglu et al. 2024, "Chinchilla Scaling: A replication attempt": estimate and standard error.
PUBLISHED = {
    "E": (1.8172, 0.03),
    "A": (482.01, 124.58),
    "B": (2085.43, 1293.23),
    "alpha": (0.3478, 0.02),
    "beta": (0.3658, 0.02),
}
TRUTH = {name: value for name, (value, _) in PUBLISHED.items()}


def loss_of(n, d, law=TRUTH):
    """L(N, D) without noise."""
    return law["E"] + law["A"] * n ** -law["alpha"] + law["B"] * d ** -law["beta"]


def iso_flop(sizes=8, budgets=7, reach=6.0):
    """N [I] and D [I]: `sizes` sizes around 20 tokens per parameter at each of `budgets` budgets."""
    c = np.repeat(np.geomspace(1e17, 1e19, budgets), sizes)
    n = np.sqrt(c / 120) * np.tile(np.geomspace(1 / reach, reach, sizes), budgets)
    return n, c / (6 * n)


def grid(sizes=6, tokens=8):
    """N [I] and D [I]: every size at every token count."""
    n, d = np.meshgrid(np.geomspace(1e7, 1e9, sizes), np.geomspace(2e8, 3e10, tokens))
    return n.ravel(), d.ravel()


def scattered(rng, rows=240):
    """N [I] and D [I] like the published table: nine budgets, sizes all over."""
    c = np.repeat(np.geomspace(6e18, 3e21, 9), -(-rows // 9))[:rows]
    n = np.exp(rng.uniform(np.log(5e7), np.log(1.6e10), rows))
    return n, c / (6 * n)


def noisy(rng, n, d, noise=0.005, law=TRUTH):
    """Losses with relative Gaussian noise."""
    return loss_of(n, d, law) * np.exp(noise * rng.standard_normal(len(n)))

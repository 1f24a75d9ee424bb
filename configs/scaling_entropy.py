"""Scaling on languages whose entropy is known exactly: does the law's E find it?

python -m experiments.scaling --config=configs/scaling_entropy.py:markov --delta=0.01
python -m experiments.scaling --config=configs/scaling_entropy.py:hierarchy --delta=0.01
python -m experiments.scaling --config=configs/scaling_entropy.py:masked --delta=0.01
"""

from ml_collections import ConfigDict

SOURCES = {
    "markov": {"source": "markov", "language_symbols": 32, "language_order": 2},
    "hierarchy": {"source": "hierarchy", "language_symbols": 16, "language_depth": 3, "language_synonyms": 2},
    "masked": {"source": "markov", "language_symbols": 16, "language_order": 1, "objective": "masked"},
}


def get_config(language="markov"):
    """A GPT on a Markov language or a random hierarchy, or a BERT ("masked") on the Markov language."""
    if language not in SOURCES:
        raise ValueError(f"{language!r}; accepted: {', '.join(SOURCES)}")
    return ConfigDict({
        "workdir": f"runs/scaling_entropy_{language}",
        "model": {
            "family": "bert" if language == "masked" else "gpt",
            "context_length": 72 if language == "hierarchy" else 68,  # 72: eight whole strings, separators included
            "norm": "rms_norm",
            "positions": "rotary",
            "initializer": "scaled",
        },
        "data": {**SOURCES[language], "language_tokens": 10_000_000, "validation_fraction": 0.08},
        "optimizer": {"learning_rate": 1.2e-2, "warmup_steps": 40, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.01, "beta2": 0.98},
        "train": {"batch_rows": 32, "steps_per_dispatch": 20, "log_every_steps": 20, "eval_rows": 4096},
        "ladder": {
            "widths": (16, 24, 32, 48, 64),
            "head_width": 8,
            "layer_width": 32,
            "tokens": (300_000, 800_000, 2_000_000, 5_000_000),
            "learning_rates": (1.0, 2.0),
            "learning_rate_exponent": 0.7,
        },
    })  # fmt: skip

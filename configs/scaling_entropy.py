"""Scaling on languages whose entropy is known exactly: does the law's E find it? About 20 minutes each on one core.

jaxformer scaling scaling_entropy:markov
jaxformer scaling scaling_entropy:hierarchy
jaxformer scaling scaling_entropy:masked
"""

from ml_collections import ConfigDict

LANGUAGES = ("markov", "hierarchy", "masked")


def get_config(language="markov"):
    """A GPT on a Markov language or a random hierarchy, or a BERT ("masked") on the Markov language."""
    if language not in LANGUAGES:
        raise ValueError(f"{language!r}; accepted: {', '.join(LANGUAGES)}")
    config = ConfigDict({
        "workdir": f"runs/scaling_entropy_{language}",
        "model": {
            "family": "gpt",
            "context_length": 68,
            "norm": "rms_norm",
            "positions": "rotary",
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 20},
        "data": {"source": "markov", "language_symbols": 32, "language_order": 2, "language_tokens": 10_000_000,
                 "validation_fraction": 0.08},
        "optimizer": {"learning_rate": 1.2e-2, "warmup_steps": 40, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.01, "beta2": 0.98},
        "train": {"global_batch_size": 32, "log_every_steps": 20, "eval_rows": 4096},
        "ladder": {
            "widths": (16, 24, 32, 48, 64),
            "head_width": 8,
            "layer_width": 32,
            "tokens": (300_000, 800_000, 2_000_000, 5_000_000),
            "learning_rates": (1.0, 2.0),
            "learning_rate_exponent": 0.7,
        },
    })  # fmt: skip
    if language != "markov":
        # Runs of 300,000 tokens know little but the frequencies of symbols yet.
        config.ladder.tokens = (800_000, 2_000_000, 5_000_000, 10_000_000)
        config.ladder.learning_rates = (1.0,)
        config.data.language_tokens = 10_500_000
        config.train.eval_rows = 8192
        config.model.positions = "t5"
    if language == "hierarchy":
        # Four rules a symbol, of unequal chances, and small batches: which pairs stand for one symbol is learned early.
        config.data.update(source="hierarchy", language_symbols=64, language_depth=2, language_rule_zipf=1.0)
        config.model.context_length = 70  # fourteen whole strings, separators included
        config.optimizer.warmup_steps = 100
        config.train.global_batch_size = 8
        config.execution.steps_per_dispatch = 50
        config.ladder.widths = (16, 24, 32, 40, 56)
    if language == "masked":
        # Always [MASK]: to tell a random token from the right one asks for more than models of this size learn.
        config.data.update(language_symbols=16, language_order=1)
        config.data.update(objective="masked", mask_token_rate=1.0, mask_random_rate=0.0)
        config.model.family = "bert"
        config.optimizer.learning_rate = 2.4e-2
    return config

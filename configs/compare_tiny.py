"""What two changes are worth to a small GPT on the source text of Python's standard library: minutes on 2 cores.

jaxformer compare compare_tiny
jaxformer compare compare_tiny:seeds
"""

from jaxformer.config import load


def get_config(variants="changes"):
    """The ladder of scaling_tiny, cut down to four budgets of five sizes. changes: rotary positions, and the same with
    other seeds, which is worth nothing; seeds: ten times the same with other seeds."""
    config = load("scaling_tiny")
    config["train"] |= {"eval_rows": 512}
    config["ladder"] |= {
        "widths": (12, 24, 36, 48, 72),
        "budgets": (1.5e10, 3e10, 6e10, 1.2e11),
        "min_steps": 50,
        "min_tokens_per_parameter": 0.3,
        "learning_rates": (0.5, 1.0, 2.0),
        "searched_sizes": 3,
    }
    if variants not in ("changes", "seeds"):
        raise ValueError(f"{variants!r}; accepted: changes, seeds")
    config["variants"] = {
        "rotary": {"model.positions": "rotary"},
        "other_seeds": {"seed": 100},
    }
    if variants == "seeds":
        config["variants"] = {f"seeds_from_{seed}": {"seed": seed} for seed in range(100, 1100, 100)}
    return config

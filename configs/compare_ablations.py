"""What twelve classic choices are worth to a GPT on text files: about five hours on 2 cores for all fifteen variants.

jaxformer compare compare_ablations --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from jaxformer.config import load

VARIANTS = {
    # Order of norm and sublayer, and norms themselves.
    "post_norm": {"model.block": "post_norm"},
    "parallel_block": {"model.block": "parallel"},
    "layer_norm": {"model.norm": "layer_norm"},
    "qk_norm": {"model.attention.qk_norm": True},
    # Positions; the baseline has T5's biases.
    "learned_positions": {"model.positions": "learned"},
    "rotary": {"model.positions": "rotary"},
    "alibi": {"model.positions": "alibi"},
    # What a token costs and where parameters are.
    "swiglu": {"model.feed_forward.activation": "swiglu"},
    "untied": {"model.tie_embeddings": False},
    "four_layers": {"ladder.min_layers": 4},
    "window_of_32": {"model.attention.window": 32},
    # Updates. Rates begin where each rule's best one lies for the baseline, and are searched from there.
    "lion": {"optimizer.name": "lion", "optimizer.learning_rate": 2e-3, "optimizer.weight_decay": 0.25},
    "muon": {"optimizer.name": "muon"},
    "batch_of_8": {"train.global_batch_size": 8},
    "cosine": {"optimizer.schedule": "cosine"},
}


def get_config():
    """The ladder of scaling_gpt, cut down to six sizes and a third of the compute; each variant one change."""
    config = load("scaling_gpt")
    config["data"] |= {"max_train_bytes": 60_000_000}
    config["ladder"] |= {
        "widths": (20, 40, 60, 80, 100, 140),
        "budgets": (1.8e11, 4.5e11, 1.1e12, 2.7e12),
        "min_steps": 150,
        "min_tokens_per_parameter": 0.5,
        "searched_sizes": 3,
        "seeded_sizes": 3,
    }
    config["variants"] = VARIANTS
    return config

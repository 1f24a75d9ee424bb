"""A small mixture of experts on the source text of Python's own standard library: 8 experts, 2 for each token.

jaxformer pretrain moe_tiny
jaxformer pretrain moe_tiny --config.model.feed_forward=dense --config.model.feed_forward.activation=swiglu
"""

from ml_collections import ConfigDict


def get_config():
    """The work for a token is that of gpt_tiny: its two experts are as wide together as the dense layer there."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 4,
            "width": 192,
            "attention": {"num_heads": 3},
            "context_length": 256,
            "norm": "rms_norm",
            "feed_forward": {"kind": "experts", "count": 8, "top_k": 2, "activation": "swiglu"},
            "positions": "rotary",
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 4096},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 50, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 450, "global_batch_size": 12, "eval_every_steps": 150, "eval_rows": 120},
    })  # fmt: skip

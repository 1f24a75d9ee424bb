"""A small Funnel-Transformer on the source text of Python's own standard library, in rows of two spans.

jaxformer pretrain funnel_tiny
jaxformer pretrain funnel_tiny --config.data.pairs=false --config.model.funnel.separate_cls=false
"""

from ml_collections import ConfigDict


def get_config():
    """Three blocks of 128, 64 and 32 tokens, and a decoder of one layer; 15 % of the tokens masked 80/10/10."""
    return ConfigDict({
        "model": {
            "family": "funnel",
            "num_layers": 7,
            "width": 128,
            "attention": {"kind": "funnel", "num_heads": 4},
            "funnel": {"blocks": [2, 2, 2], "decoder_layers": 1},
            "context_length": 128,
            "positions": "none",
            "block": "post_norm",
            "feed_forward": {"activation": "gelu_tanh"},
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 2048, "objective": "masked", "pairs": True},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 850, "global_batch_size": 24, "eval_every_steps": 425, "eval_rows": 240},
    })  # fmt: skip

"""A small T5 that restores hidden spans of Python's own standard library, no download.

jaxformer pretrain t5_tiny
jaxformer generate --workdir=runs/t5_tiny --source='import <extra_id_0>' --temperature=0
"""

from ml_collections import ConfigDict


def get_config():
    """T5 v1.1's layers in a small size; rows of 256 tokens of source with spans of 3 hidden tokens, 15 % in all."""
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "num_layers": 2,
            "width": 128,
            "encoder": {"source_length": 256},
            "context_length": 64,
            "attention": {"num_heads": 4, "scale": 1.0},
            "positions": "t5",
            "feed_forward": {"activation": "geglu_tanh"},
            "norm": "rms_norm",
            "norm_epsilon": 1e-6,
            "use_bias": False,
            "tie_embeddings": False,
            "initializer": "t5",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 2048, "objective": "span_corruption"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 600, "global_batch_size": 16, "eval_every_steps": 300, "eval_rows": 160},
    })  # fmt: skip

"""A small encoder-decoder on UL2's mixture of denoisers, on the source text of Python's own standard library.

jaxformer pretrain ul2_tiny
jaxformer pretrain ul2_tiny --config.data.ul2.sequential=0 --config.data.ul2.extreme=0
jaxformer pretrain ul2_tiny --config.data.objective=span_corruption --config.model.context_length=32
"""

from ml_collections import ConfigDict


def get_config():
    """T5's v1.1 blocks. Texts of 140 tokens, of which a source has 128 at most and a target 94."""
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "num_layers": 3,
            "width": 128,
            "attention": {"num_heads": 4, "scale": 1.0},
            "context_length": 96,
            "encoder": {"source_length": 128},
            "norm": "rms_norm",
            "norm_epsilon": 1e-6,
            "feed_forward": {"activation": "geglu_tanh"},
            "positions": "t5",
            "use_bias": False,
            "tie_embeddings": False,
            "initializer": "t5",
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 2048, "objective": "mixture"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 50, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 450, "global_batch_size": 16, "eval_every_steps": 150,
                  "eval_rows": 240},
    })  # fmt: skip

"""A small GPT on the source text of Python's own standard library: a few minutes on 2 cores, no download.

jaxformer pretrain gpt_tiny
"""

from ml_collections import ConfigDict


def get_config():
    """Rotary positions, SwiGLU and RMSNorm; byte-level BPE trained on the text itself."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 4,
            "width": 192,
            "attention": {"num_heads": 3},
            "context_length": 256,
            "norm": "rms_norm",
            "feed_forward": {"activation": "swiglu"},
            "positions": "rotary or sinusoidal or none",  # the first that model.attention can have
            "use_bias": False,
            "initializer": "scaled",
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 4096},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 50, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 450, "global_batch_size": 12, "eval_every_steps": 150,
                  "eval_rows": 120},
    })  # fmt: skip

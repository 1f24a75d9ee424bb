"""A small Reformer on the source text of Python's own standard library: LSH attention, reversible layers, rows of 1024.

jaxformer pretrain reformer_tiny
jaxformer pretrain reformer_tiny --config.model.attention=softmax
"""

from ml_collections import ConfigDict


def get_config():
    """Two rounds of hashing into chunks of 64 tokens; as many parameters as gpt_tiny has, but for the shared keys."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 4,
            "width": 192,
            "attention": {"kind": "lsh", "num_heads": 3, "rounds": 2, "chunk": 64},
            "block": "reversible",
            "context_length": 1024,
            "positions": "sinusoidal",
            "norm": "rms_norm",
            "feed_forward": {"activation": "swiglu"},
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 10, "layers": "scan", "feed_forward_chunks": 4},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 4096},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 50, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 300, "global_batch_size": 3, "eval_every_steps": 150, "eval_rows": 30},
    })  # fmt: skip

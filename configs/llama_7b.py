"""A Llama-shaped model of 6.7 billion parameters (Touvron et al. 2023a, table 2; contexts of 4096 as in 2023b).

jaxformer pretrain llama_7b --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict


def get_config():
    """RMSNorm, SwiGLU, rotary positions, an output table of its own; 4M tokens a step, split over all devices."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 32,
            "width": 4096,
            "attention": {"num_heads": 32},
            "feed_forward": {"width": 11008, "activation": "swiglu"},
            "context_length": 4096,
            "vocab_size": 32000,
            "norm": "rms_norm",
            "positions": "rotary",
            "use_bias": False,
            "tie_embeddings": False,
            "initializer": "scaled",
            "dtype": "bfloat16",
        },
        "execution": {"remat": "full", "layers": "scan", "steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.jsonl",), "tokenizer_vocab": 32000},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000},
        "mesh": {"data": 1, "fsdp": None},
        "train": {"steps": 500_000, "global_batch_size": 1024, "eval_every_steps": 1000,
                  "eval_rows": 2048, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 10_000},
    })  # fmt: skip

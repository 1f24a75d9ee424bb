"""A Llama-shaped model of 1.2 billion parameters (the shape of Llama 3.2 1B), sharded over the devices.

jaxformer pretrain llama_1b --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict


def get_config():
    """RMSNorm, SwiGLU, rotary positions, 8 key/value heads, tied embeddings; parameters split over all devices."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 16,
            "width": 2048,
            "attention": {"num_heads": 32, "num_kv_heads": 8},
            "feed_forward": {"width": 8192, "activation": "swiglu"},
            "context_length": 4096,
            "vocab_size": 65536,
            "norm": "rms_norm",
            "positions": {"kind": "rotary", "base": 500_000.0},
            "use_bias": False,
            "initializer": "scaled",
            "dtype": "bfloat16",
        },
        "execution": {"remat": "dots", "layers": "scan", "steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.jsonl",), "tokenizer_vocab": 65536},
        "optimizer": {"learning_rate": 3e-4, "schedule": "wsd", "warmup_steps": 2000, "decay_steps": 10_000},
        "mesh": {"data": 1, "fsdp": None},
        "train": {"steps": 100_000, "global_batch_size": 256, "eval_every_steps": 1000,
                  "eval_rows": 512, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 10_000},
    })  # fmt: skip

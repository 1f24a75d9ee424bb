"""GLaM (64B/64E): 1.2 trillion parameters, of which a token uses 96.6 billion (Du et al. 2022, table 4 and section 4).

jaxformer pretrain glam_64b_64e --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict


def get_config():
    """64 layers 8192 wide, 64 experts in every second one, 2 for a token; the others are gated. One table of 256,000
    words for both ends, 1M tokens a step. Positions are rotary in place of biases for each layer, which no kernel of
    attention adds. Experts over 64 devices."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 64,
            "width": 8192,
            "attention": {"num_heads": 128, "head_width": 128},
            "feed_forward": {
                "kind": "experts", "count": 64, "top_k": 2, "width": 32768, "activation": "gelu", "every": 2,
                "dense_activation": "geglu", "dispatch": "capacity", "balance": 0.01,
            },
            "context_length": 1024,
            "vocab_size": 256_000,
            "norm": "rms_norm",
            "positions": "rotary",
            "use_bias": False,
            "initializer": "scaled",
            "dtype": "bfloat16",
        },
        "execution": {"remat": "full", "layers": "scan", "steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.jsonl",), "tokenizer_vocab": 256_000},
        "optimizer": {"name": "adafactor", "learning_rate": 0.01, "schedule": "inverse_sqrt", "warmup_steps": 10_000},
        "mesh": {"data": 1, "fsdp": None, "expert": 64},
        "train": {"steps": 600_000, "global_batch_size": 1024, "eval_every_steps": 1000,
                  "eval_rows": 1024, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 10_000},
    })  # fmt: skip

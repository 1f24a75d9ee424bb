"""T5 small (Raffel et al. 2020), v1.0 or v1.1, on the user's files or TFDS: spans hidden in rows of 512 tokens.

jaxformer pretrain t5_small --config.data.files='/data/c4/*.json.gz'
jaxformer pretrain t5_small:v1.1 --config.data.files='/data/c4/*.json.gz'
"""

from ml_collections import ConfigDict


def get_config(version="v1.0"):
    """The argument is the version; v1.1 has gated feed-forward layers, an output table of its own, and 8 layers."""
    if version not in ("v1.0", "v1.1"):
        raise ValueError(f"version {version}; accepted: v1.0, v1.1")
    old = version == "v1.0"
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "num_layers": 6 if old else 8,
            "width": 512,
            "encoder": {"source_length": 512},
            "context_length": 128,
            "vocab_size": 32128,
            "attention": {"num_heads": 8 if old else 6, "head_width": 64, "scale": 1.0},
            "positions": "t5",
            "feed_forward": {"width": 2048 if old else 1024, "activation": "relu" if old else "geglu_tanh"},
            "norm": "rms_norm",
            "norm_epsilon": 1e-6,
            "use_bias": False,
            "tie_embeddings": old,
            "scale_output": old,
            "initializer": "t5",
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.jsonl",), "tokenizer_vocab": 32_000,
                 "objective": "span_corruption"},
        "optimizer": {"name": "adafactor", "learning_rate": 1e-2, "schedule": "inverse_sqrt", "warmup_steps": 10_000,
                      "weight_decay": 0.0},
        "train": {"steps": 524_288, "global_batch_size": 128, "eval_every_steps": 5000, "eval_rows": 2560,
                  "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 100_000},
    })  # fmt: skip

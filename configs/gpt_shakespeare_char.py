"""nanoGPT's documented CPU run: 4 layers, 4 heads, width 128, context 64, batch 12, 2000 steps, no dropout, characters.

    jaxformer pretrain gpt_shakespeare_char --config.data.files=tinyshakespeare.txt

The held-out tenth is the end of the file, as there. Products are computed in bfloat16, everything else in float32.
"""

from ml_collections import ConfigDict


def get_config():
    """The config; data.files is the user's."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 4,
            "width": 128,
            "attention": {"num_heads": 4},
            "context_length": 64,
            "use_bias": False,
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 20},
        "data": {"source": "files", "files": ("tinyshakespeare.txt",), "tokenizer": "chars"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.99, "weight_decay": 0.1},
        "train": {"steps": 2000, "global_batch_size": 12, "eval_every_steps": 1000, "eval_rows": 240,
                  "log_every_steps": 20},
    })  # fmt: skip

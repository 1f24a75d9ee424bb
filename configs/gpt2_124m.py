"""GPT-2 124M (Radford et al. 2019) on the user's files or TFDS; 0.5M tokens a step as in nanoGPT's reproduction.

jaxformer pretrain gpt2_124m --config.data.files='/data/openwebtext/*.txt.xz'
"""

from ml_collections import ConfigDict


def get_config():
    """Learned positions, GELU (tanh form), LayerNorm with biases, tied embeddings; 480 rows of 1024 tokens."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 12,
            "width": 768,
            "attention": {"num_heads": 12},
            "context_length": 1024,
            "vocab_size": 50304,
            "feed_forward": {"activation": "gelu_tanh"},
            "dtype": "bfloat16",
        },
        "execution": {"gradient_accumulation_steps": 5, "steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.txt",), "tokenizer_vocab": 50257},
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 2000},
        "train": {"steps": 600_000, "global_batch_size": 480,
                  "eval_every_steps": 1000, "eval_rows": 960, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 50_000},
    })  # fmt: skip

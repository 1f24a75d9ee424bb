"""A small BART that restores noisy text of Python's own standard library, no download.

jaxformer pretrain bart_tiny
jaxformer generate --workdir=runs/bart_tiny --source='import [MASK]' --temperature=0
"""

from ml_collections import ConfigDict


def get_config():
    """Learned positions and pre-norm blocks, which need no long warmup; 30 % of the tokens hidden in spans."""
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "num_layers": 2,
            "width": 128,
            "encoder": {"source_length": 128},
            "context_length": 128,
            "attention": {"num_heads": 4},
            "positions": "learned",
            "embedding_norm": True,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 2048, "objective": "denoising"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 600, "global_batch_size": 16, "eval_every_steps": 300, "eval_rows": 160},
    })  # fmt: skip

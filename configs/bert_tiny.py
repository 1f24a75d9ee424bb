"""A small BERT on the source text of Python's own standard library: a few minutes on 2 cores, no download.

jaxformer pretrain bert_tiny
python -m experiments.fill_mask --workdir=runs/bert_tiny --text='import [MASK]'
"""

from ml_collections import ConfigDict


def get_config():
    """Pre-norm blocks, which need no long warmup, and rotary positions; 15 % of the tokens masked 80/10/10."""
    return ConfigDict({
        "model": {
            "family": "bert",
            "num_layers": 4,
            "width": 128,
            "attention": {"num_heads": 4},
            "context_length": 128,
            "positions": "rotary or sinusoidal or none",  # the first that model.attention can have
            "initializer": "scaled",
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 2048, "objective": "masked"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 850, "global_batch_size": 24, "eval_every_steps": 425,
                  "eval_rows": 240},
    })  # fmt: skip

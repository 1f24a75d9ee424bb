"""Bahdanau's and Luong's models on pairs whose best possible loss and whose alignment are known.

jaxformer pretrain recurrent_tiny
jaxformer pretrain recurrent_tiny:reverse --config.model.attention.score=none
jaxformer pretrain recurrent_tiny --config.model.attention.decoder=luong --config.model.attention.cell=lstm
"""

from jaxformer.config import load


def get_config(task="translate"):
    """`transduction` with one recurrent layer of 128 units on each side."""
    config = load(f"transduction:{task}")
    del config["model"]["feed_forward"]
    config["model"] |= {
        "family": "recurrent_seq2seq", "num_layers": 1, "attention": {"kind": "alignment"}, "positions": "none",
        "block": "plain",
    }  # fmt: skip
    config["optimizer"] |= {"learning_rate": 1e-2}
    return config

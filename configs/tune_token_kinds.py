"""Tunes the small BERT to say of each token of Python's own source which kind it is: keyword, name, number, ...

jaxformer pretrain bert_tiny
jaxformer pretrain tune_token_kinds --config.init_from=runs/bert_tiny
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """The model of bert_tiny, with a head of its own; without init_from it learns from scratch."""
    return ConfigDict({
        "model": {**load("bert_tiny")["model"], "head": {"outputs": 6}},
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "token_kinds", "tokenizer": "bpe", "tokenizer_vocab": 2048,
                 "objective": "token_classification"},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 20, "schedule": "linear", "beta2": 0.98,
                      "final_fraction": 0.0},
        "tune": {"layer_decay": 0.9},
        "train": {"steps": 200, "global_batch_size": 24, "eval_every_steps": 100, "eval_rows": 240},
    })  # fmt: skip

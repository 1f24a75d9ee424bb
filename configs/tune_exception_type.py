"""Tunes the small BERT to say which exception is caught in a stretch of Python, the name of which is left out.

jaxformer pretrain bert_tiny
jaxformer pretrain tune_exception_type --config.init_from=runs/bert_tiny
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """The model of bert_tiny, with a head of its own; without init_from it learns from scratch."""
    return ConfigDict({
        "model": {**load("bert_tiny")["model"], "head": {"outputs": 9}},
        "execution": {"steps_per_dispatch": 10},
        "data": {"source": "exception_type", "tokenizer": "bpe", "tokenizer_vocab": 2048,
                 "objective": "sequence_classification"},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 20, "schedule": "linear", "beta2": 0.98,
                      "final_fraction": 0.0},
        "tune": {"layer_decay": 0.9, "metric": "accuracy"},
        "train": {"steps": 150, "global_batch_size": 16, "eval_every_steps": 50},
    })  # fmt: skip

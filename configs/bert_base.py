"""BERT base (Devlin et al. 2019): post-norm, token types, pooler and next-sentence head, on the user's files or TFDS.

jaxformer pretrain bert_base --config.data.files='/data/wiki/*.jsonl.gz'
jaxformer pretrain bert_base:512 --config.data.files='/data/wiki/*.jsonl.gz'
"""

from ml_collections import ConfigDict


def get_config(context_length="128"):
    """The argument is the context: 128 as in the first nine tenths of the published run (the default), or 512."""
    context = int(context_length)
    if context not in (128, 512):
        raise ValueError(f"context {context}; accepted: 128, 512")
    return ConfigDict({
        "model": {
            "family": "bert",
            "block": "post_norm",
            "num_layers": 12,
            "width": 768,
            "attention": {"num_heads": 12, "dropout": 0.1},
            "context_length": context,
            "vocab_size": 30592,
            "norm_epsilon": 1e-12,
            "bert": {"token_types": 2, "next_sentence": True},
            "dropout": 0.1,
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.txt",), "tokenizer_vocab": 30522, "objective": "masked",
                 "pairs": True},
        "optimizer": {"learning_rate": 1e-4, "schedule": "linear", "warmup_steps": 10_000, "final_fraction": 0.0,
                      "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01},
        "train": {"steps": 1_000_000, "global_batch_size": 256, "eval_every_steps": 5000,
                  "eval_rows": 2560, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 100_000},
    })  # fmt: skip

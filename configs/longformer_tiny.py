"""bert_tiny with rows four times as long and Longformer's attention: a window, and the first token of each document.

jaxformer pretrain longformer_tiny
jaxformer pretrain longformer_tiny --config.model.family=gpt --config.data.objective=next_token
"""

from jaxformer.config import load


def get_config():
    """`bert_tiny` with 512 tokens in a row, as many tokens in a batch, and a window of 64."""
    config = load("bert_tiny")
    config["model"] |= {
        "context_length": 512,
        "attention": {"kind": "longformer", "num_heads": 4, "attention_window": 64, "global_tokens": 1},
    }
    config["train"] |= {"global_batch_size": 6, "eval_rows": 60}
    return config

"""bert_tiny with rows four times as long and BigBird's attention: neighbouring, random and global blocks.

jaxformer pretrain bigbird_tiny
jaxformer pretrain bigbird_tiny --config.model.family=gpt --config.data.objective=next_token
"""

from jaxformer.config import load


def get_config():
    """`bert_tiny` with 512 tokens in a row, as many tokens in a batch, and blocks of 16."""
    config = load("bert_tiny")
    config["model"] |= {
        "context_length": 512,
        "attention": {"kind": "bigbird", "num_heads": 4, "block": 16, "random_blocks": 2},
    }
    config["train"] |= {"global_batch_size": 6, "eval_rows": 60}
    return config

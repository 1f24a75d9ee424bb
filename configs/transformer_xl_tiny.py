"""A small Transformer-XL on the source text of Python's own standard library, no download.

jaxformer pretrain transformer_xl_tiny
jaxformer generate --workdir=runs/transformer_xl_tiny --prompt='def '
"""

from jaxformer.config import load


def get_config():
    """The sizes of `gpt_tiny`, with rows of half its length behind a memory of the other half."""
    config = load("gpt_tiny")
    half = config["model"]["context_length"] // 2
    config["model"] |= {
        "family": "transformer_xl", "positions": "relative", "context_length": half, "memory": half,
    }  # fmt: skip
    config["data"]["objective"] = "segment_recurrence"
    return config

"""A small XLNet on the source text of Python's own standard library, no download.

jaxformer pretrain xlnet_tiny
"""

from jaxformer.config import load


def get_config():
    """The sizes of `bert_tiny`; one token in six is predicted."""
    config = load("bert_tiny")
    config["model"] |= {"family": "xlnet", "positions": "relative"}
    config["data"]["objective"] = "permutation"
    return config

"""The shape of XLNet base (Yang et al. 2019), without its memory, on your files or TFDS.

jaxformer pretrain xlnet_base --config.data.files='/data/wiki/*.jsonl.gz'
"""

from jaxformer.config import load


def get_config():
    """Rows of 512 tokens, of which one in six is predicted."""
    config = load("bert_base:512")
    config["model"] |= {"family": "xlnet", "positions": "relative", "bert": None, "vocab_size": 32_000}
    config["data"] |= {"objective": "permutation", "pairs": False, "tokenizer_vocab": 32_000}
    config["optimizer"]["learning_rate"] = 4e-4
    config["train"]["global_batch_size"] = 2048
    return config

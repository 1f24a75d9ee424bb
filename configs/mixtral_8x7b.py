"""Mixtral 8x7B: 46.7 billion parameters, of which a token uses 12.9 (Jiang et al. 2024, table 1).

jaxformer pretrain mixtral_8x7b --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """32 layers of 8 experts as wide as a layer of Mistral 7B, 2 for a token; rows of 32,768 tokens. How it was trained
    is not published: 4M tokens a step as llama_7b. Experts over 8 devices."""
    config = load("llama_7b")
    config["model"] |= {
        "attention": {"num_heads": 32, "num_kv_heads": 8},
        "positions": {"kind": "rotary", "base": 1_000_000.0},
        "feed_forward": {"kind": "experts", "count": 8, "top_k": 2, "width": 14336, "activation": "swiglu"},
        "context_length": 32768,
    }
    config["mesh"]["expert"] = 8
    config["train"] |= {"global_batch_size": 128, "eval_rows": 256}
    return ConfigDict(config)

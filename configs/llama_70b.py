"""A Llama-shaped model of 69 billion parameters (Touvron et al. 2023b, table 1).

jaxformer pretrain llama_70b --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """As llama_7b with 80 layers of width 8192 and 8 key/value heads; 4M tokens a step, split over all devices."""
    config = ConfigDict(load("llama_7b"))
    shape = {"num_layers": 80, "width": 8192, "attention": {"num_heads": 64, "num_kv_heads": 8}}
    config.model.update(shape)
    config.model.feed_forward.width = 28672
    config.optimizer.learning_rate = 1.5e-4
    return config

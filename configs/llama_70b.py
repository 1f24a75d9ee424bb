"""A Llama-shaped model of 69 billion parameters (Touvron et al. 2023b, table 1).

python -m experiments.pretrain --config=configs/llama_70b.py --config.data.files='/data/*.jsonl.zst'
"""

from configs import llama_7b


def get_config():
    """As llama_7b with 80 layers of width 8192 and 8 key/value heads; 4M tokens a step, split over all devices."""
    config = llama_7b.get_config()
    shape = {"num_layers": 80, "width": 8192, "attention": {"num_heads": 64, "num_kv_heads": 8}}
    config.model.update(shape)
    config.model.feed_forward.width = 28672
    config.optimizer.learning_rate = 1.5e-4
    return config

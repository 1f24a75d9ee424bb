"""GPT-2 1.5B (Radford et al. 2019) on the user's files or TFDS; otherwise as gpt2_124m.

python -m experiments.pretrain --config=configs/gpt2_1_5b.py --config.data.files='/data/openwebtext/*.txt.xz'
"""

from configs import gpt2_124m


def get_config():
    """48 layers of width 1600, 25 heads; learning rate 1.5e-4."""
    config = gpt2_124m.get_config()
    config.model.update({"num_layers": 48, "width": 1600, "attention": {"num_heads": 25}})
    config.optimizer.learning_rate = 1.5e-4
    return config

"""GPT-2 350M (Radford et al. 2019) on the user's files or TFDS; otherwise as gpt2_124m.

python -m experiments.pretrain --config=configs/gpt2_350m.py --config.data.files='/data/openwebtext/*.txt.xz'
"""

from configs import gpt2_124m


def get_config():
    """24 layers of width 1024, 16 heads; learning rate 3e-4."""
    config = gpt2_124m.get_config()
    config.model.update({"num_layers": 24, "width": 1024, "attention": {"num_heads": 16}})
    config.optimizer.learning_rate = 3e-4
    return config

"""GPT-2 1.5B (Radford et al. 2019) on the user's files or TFDS; otherwise as gpt2_124m.

jaxformer pretrain gpt2_1_5b --config.data.files='/data/openwebtext/*.txt.xz'
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """48 layers of width 1600, 25 heads; learning rate 1.5e-4."""
    config = ConfigDict(load("gpt2_124m"))
    config.model.update({"num_layers": 48, "width": 1600, "attention": {"num_heads": 25}})
    config.optimizer.learning_rate = 1.5e-4
    return config

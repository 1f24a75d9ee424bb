"""GPT-2 350M (Radford et al. 2019) on the user's files or TFDS; otherwise as gpt2_124m.

jaxformer pretrain gpt2_350m --config.data.files='/data/openwebtext/*.txt.xz'
"""

from ml_collections import ConfigDict

from jaxformer.config import load


def get_config():
    """24 layers of width 1024, 16 heads; learning rate 3e-4."""
    config = ConfigDict(load("gpt2_124m"))
    config.model.update({"num_layers": 24, "width": 1024, "attention": {"num_heads": 16}})
    config.optimizer.learning_rate = 3e-4
    return config

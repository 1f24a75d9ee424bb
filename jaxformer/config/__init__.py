"""The configuration: frozen, complete, typed; a file for each section. `from_mapping` makes it from an ml_collections
ConfigDict or any nested mapping. Every error is one line that names the field, the value and what is accepted.

A field that is absent is None, names carry their units, and the sections alone hold default values.

>>> config = from_mapping({"model": {"num_layers": 2, "width": 64, "attention": {"num_heads": 4}}})
>>> config.model.num_layers, config.model.attention.kv_heads, config.optimizer.name
(2, 4, 'adamw')
>>> from_mapping({"model": {"num_layer": 2}})
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.model.num_layer: no such field; did you mean num_layers?
>>> from_mapping({"model": {"block": "prenorm"}})
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.model.block: 'prenorm' is not one of pre_norm, post_norm, parallel; did you mean \
pre_norm?
"""

from jaxformer.config.attention import AttentionConfig, Softmax
from jaxformer.config.checkpoint import CheckpointConfig
from jaxformer.config.choice import Choice
from jaxformer.config.data import DataConfig
from jaxformer.config.distributed import DistributedConfig
from jaxformer.config.execution import Execution
from jaxformer.config.feed_forward import Dense, FeedForwardConfig
from jaxformer.config.fields import Section
from jaxformer.config.loading import load
from jaxformer.config.loss import LossConfig
from jaxformer.config.mesh import MeshConfig
from jaxformer.config.model import Bert, ModelConfig
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.config.positions import T5, Alibi, Learned, NoPositions, PositionsConfig, Rotary, Sinusoidal
from jaxformer.config.reading import diff, from_mapping, plain, to_dict
from jaxformer.config.run import Config
from jaxformer.config.train import TrainConfig

__all__ = [
    "Alibi", "AttentionConfig", "Bert", "CheckpointConfig", "Choice", "Config", "DataConfig", "Dense",
    "DistributedConfig", "Execution", "FeedForwardConfig", "Learned", "LossConfig", "MeshConfig", "ModelConfig",
    "NoPositions", "OptimizerConfig", "PositionsConfig", "Rotary", "Section", "Sinusoidal", "Softmax", "T5",
    "TrainConfig", "diff", "from_mapping", "load", "plain", "to_dict",
]  # fmt: skip

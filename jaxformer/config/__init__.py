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
jaxformer.errors.ConfigError: config.model.block: 'prenorm' is not one of pre_norm, post_norm, parallel, \
parallel_norms, sandwich, plain, reversible; did you mean pre_norm?
"""

from jaxformer.config.alignment import Alignment
from jaxformer.config.attention import AttentionConfig, Softmax
from jaxformer.config.checkpoint import CheckpointConfig
from jaxformer.config.choice import Choice
from jaxformer.config.data import DataConfig
from jaxformer.config.denoising import Denoising, PrefixLM, SpanCorruption, Ul2
from jaxformer.config.distill import DistillConfig
from jaxformer.config.distributed import DistributedConfig
from jaxformer.config.encoder import EncoderConfig
from jaxformer.config.execution import Execution
from jaxformer.config.experts import Experts
from jaxformer.config.feed_forward import Dense, FeedForwardConfig
from jaxformer.config.fields import Section
from jaxformer.config.funnel import Funnel, FunnelAttention
from jaxformer.config.head import HeadConfig
from jaxformer.config.labelled import Labelled
from jaxformer.config.linear import LinearAttention, Linformer, Performer
from jaxformer.config.loading import load
from jaxformer.config.loss import LossConfig
from jaxformer.config.lsh import Lsh
from jaxformer.config.mesh import MeshConfig
from jaxformer.config.mixture import Mixture
from jaxformer.config.model import Bert, ModelConfig, encoder_of, layers_of, period_of, stacks_of
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.config.parametrization import MuP, Parametrization, Standard
from jaxformer.config.permutation import Permutation
from jaxformer.config.positions import (
    T5,
    Alibi,
    Disentangled,
    Learned,
    NoPositions,
    PositionsConfig,
    Relative,
    Rotary,
    Sinusoidal,
)
from jaxformer.config.reading import diff, from_mapping, plain, to_dict
from jaxformer.config.recurrent import Gru, Lstm
from jaxformer.config.run import Config
from jaxformer.config.sparse import BigBird, Dilated, Fixed, Longformer, Strided
from jaxformer.config.tracking import TrackingConfig
from jaxformer.config.train import TrainConfig
from jaxformer.config.tune import TuneConfig

__all__ = [
    "Alibi", "Alignment", "AttentionConfig", "Bert", "BigBird", "CheckpointConfig", "Choice", "Config",
    "DataConfig", "Denoising", "Dense", "Dilated", "Disentangled", "DistillConfig", "DistributedConfig",
    "EncoderConfig", "Execution", "Experts", "FeedForwardConfig", "Fixed", "Funnel", "FunnelAttention", "Gru",
    "HeadConfig", "Labelled", "Learned", "LinearAttention", "Linformer", "Longformer", "LossConfig", "Lsh", "Lstm",
    "MeshConfig", "Mixture", "ModelConfig", "MuP", "NoPositions", "OptimizerConfig", "Parametrization", "Performer",
    "Permutation", "PositionsConfig", "PrefixLM", "Relative", "Rotary", "Section", "Sinusoidal", "Softmax",
    "SpanCorruption", "Standard", "Strided", "T5", "TrackingConfig", "TrainConfig", "TuneConfig", "Ul2", "diff",
    "encoder_of", "from_mapping", "layers_of", "load", "period_of", "plain", "stacks_of", "to_dict",
]  # fmt: skip

"""jaxformer: functional Transformers in JAX, from one attention function to a pod.

Everything here needs jax and numpy only, and importing it costs no more than importing those two. What owns
parameters (`jaxformer.modules`), reads data or trains is imported from its own module.
"""

import sys

try:
    import jax as _jax  # noqa: F401
except ValueError as _error:  # of a bad environment variable: one line, where the program is ours
    if (sys.argv[:1] != ["-m"] and not sys.argv[0].endswith("jaxformer")) or "--debug" in sys.orig_argv:
        raise
    _reason = " ".join(str(_error).split())
    print(f"error: environment: {_reason}; accepted: another value, or none", file=sys.stderr)
    raise SystemExit(2) from None

from jaxformer import masks, patterns
from jaxformer.config import (
    T5,
    Alibi,
    AttentionConfig,
    Bert,
    Config,
    Dense,
    EncoderConfig,
    Execution,
    Experts,
    Gru,
    Learned,
    LinearAttention,
    Linformer,
    LossConfig,
    Lsh,
    Lstm,
    ModelConfig,
    NoPositions,
    Performer,
    Rotary,
    Sinusoidal,
    Softmax,
    encoder_of,
    from_mapping,
)
from jaxformer.errors import ConfigError
from jaxformer.functional.attention import attention, combine
from jaxformer.functional.block import block, block_specs, stack
from jaxformer.functional.experts import capacity_mlp, expert_choice_mlp, expert_mlp
from jaxformer.functional.layer import Context, Cost, Sublayer
from jaxformer.functional.layers import (
    dropout,
    embed,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    mlp,
    relu,
    rms_norm,
    silu,
    unembed,
)  # fmt: skip
from jaxformer.functional.linear_attention import (
    elu_plus_one,
    favor_attention,
    favor_features,
    linear_attention,
    orthogonal_directions,
)
from jaxformer.functional.linformer import linformer_attention
from jaxformer.functional.losses import TokenLoss, cross_entropy, token_loss
from jaxformer.functional.lsh import lsh_attention
from jaxformer.functional.lsh_hashing import random_rotations
from jaxformer.functional.masked_loss import masked_token_loss
from jaxformer.functional.position_encodings import PositionEncoding, rotation, score_bias
from jaxformer.functional.positions import (
    alibi,
    alibi_slopes,
    learned,
    rotary,
    rotary_angles,
    rotary_frequencies,
    sinusoidal,
    t5_bias,
    t5_buckets,
)  # fmt: skip
from jaxformer.functional.recurrent import LstmState, gru, lstm
from jaxformer.functional.router import balance_loss, count_choices, route, z_loss
from jaxformer.masks import Mask, causal, dense, expand, padding, prefix, segments, window
from jaxformer.models import bert, encoder_decoder, gpt
from jaxformer.specs import ParamSpec, abstract_params, count_params, init_params, param_axes, stack_specs
from jaxformer.types import Array, Batch, Model, Params

__version__ = "0.1.0"

__all__ = [
    "Alibi", "Array", "AttentionConfig", "Batch", "Bert", "Config", "ConfigError", "Context", "Cost", "Dense",
    "EncoderConfig", "Execution", "Experts", "Gru", "Learned", "LinearAttention", "Linformer", "LossConfig", "Lsh",
    "Lstm", "LstmState", "Mask", "Model", "ModelConfig", "NoPositions", "ParamSpec", "Params", "Performer",
    "PositionEncoding", "Rotary", "Sinusoidal", "Softmax", "Sublayer", "T5", "TokenLoss", "abstract_params", "alibi",
    "alibi_slopes", "attention", "balance_loss", "bert", "block", "block_specs", "capacity_mlp", "causal", "combine",
    "count_choices", "count_params", "cross_entropy", "dense", "dropout", "elu_plus_one", "embed", "encoder_decoder",
    "encoder_of", "expand", "expert_choice_mlp", "expert_mlp", "favor_attention", "favor_features", "from_mapping",
    "gelu", "gelu_tanh", "gpt", "gru", "init_params", "layer_norm", "learned", "linear", "linear_attention",
    "linformer_attention", "lsh_attention", "lstm", "masked_token_loss", "masks", "mlp", "orthogonal_directions",
    "padding", "param_axes", "patterns", "prefix", "random_rotations", "relu", "rms_norm", "rotary", "rotary_angles",
    "rotary_frequencies", "rotation", "route", "score_bias", "segments", "silu", "sinusoidal", "stack", "stack_specs",
    "t5_bias", "t5_buckets", "token_loss", "unembed", "window", "z_loss",
]  # fmt: skip

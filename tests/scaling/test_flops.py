"""FLOPs against XLA's own count of the unrolled model, and parameters against published shapes.

XLA counts a loop's body once and skips what it can see to be masked, so: layers unrolled, one chunk of logits, rows no
longer than the block in which attention leaves keys out. It also counts additions, norms and softmax, under 1 % here.
"""

import jax
import jax.numpy as jnp
import pytest
from flat_config import both, model_config

from jaxformer.config import DataConfig, LossConfig
from jaxformer.models.flops import count_parameters, flops_per_token, training_flops
from jaxformer.modules import make_model
from jaxformer.specs import abstract_params
from jaxformer.types import Batch

ROWS = 2
BASE = {
    "num_layers": 2, "width": 512, "num_heads": 16, "head_width": 64, "context_length": 128, "vocab_size": 4096,
    "attention": "xla",
}  # fmt: skip
OPTIONS = [
    {},
    {"activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "use_bias": False},
    {"activation": "geglu", "mlp_width": 768},
    {"activation": "relu", "mlp_width": 1536},
    {"num_kv_heads": 2, "qk_norm": True},
    {"num_kv_heads": 1, "head_width": 32},
    {"tie_embeddings": False, "vocab_size": 8192},
    {"num_layers": 3, "context_length": 64},
    {"block": "parallel"},
    {"block": "post_norm"},
    {"positions": "alibi"},
    {"positions": "t5"},
    {"positions": "sinusoidal", "attention_soft_cap": 30.0},
    {"remat": "dots"},
    {"remat": "dots", "block": "parallel", "activation": "swiglu"},
    {"remat": "full"},
    {"remat": "full", "block": "parallel"},
    {"remat": "full", "block": "post_norm"},
    {"remat": "full", "activation": "swiglu"},
]


def xla_flops(config, execution, grad):
    """XLA's count per token of the loss, or of its gradient."""
    model = make_model(config, LossConfig(chunk_tokens=ROWS * config.context_length), execution)
    shape = (ROWS, config.context_length)
    ids, weights = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(params, batch):
        return sum(total for total, _ in model.loss(params, batch, None)[0].values())

    lowered = jax.jit(jax.grad(loss) if grad else loss).lower(
        abstract_params(model.specs), Batch(ids, ids, weights, ids, ids)
    )
    return lowered.cost_analysis()["flops"] / (ROWS * config.context_length)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain")
def test_within_two_percent_of_xla(options):
    config, execution = both(**{**BASE, **options})
    ours = flops_per_token(config, remat_policy=execution.remat)
    assert xla_flops(config, execution, grad=False) == pytest.approx(ours.forward, rel=0.02)
    assert xla_flops(config, execution, grad=True) == pytest.approx(ours.training + ours.remat, rel=0.02)


def test_the_head_counts_where_its_logits_are_needed():
    config = model_config(family="bert", vocab_size=1000, token_types=2)
    whole, part = flops_per_token(config), training_flops(config, DataConfig(objective="masked", mask_rate=0.2))
    assert whole.head == 2 * 128 * 1000 + 2 * 128 * 128
    assert part == pytest.approx(whole.training - 3 * 0.8 * whole.head)
    assert training_flops(config, DataConfig()) == whole.training


def test_a_window_limits_the_keys():
    one, other = (flops_per_token(model_config(context_length=512, window=w)) for w in (None, 128))
    assert other.attention == one.attention / 4


def test_every_convention_of_counting():
    count = count_parameters(model_config(vocab_size=1024, tie_embeddings=False))
    assert count.total - count.non_embedding == (2 * 1024 + 256) * 128
    assert count.total - count.without_positions == 256 * 128
    assert sum(count.by_group.values()) == count.total

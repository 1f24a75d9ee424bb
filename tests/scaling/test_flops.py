"""FLOPs against XLA's own count of the unrolled model, and parameters against published shapes.

XLA counts a loop's body once and skips what it can see to be masked, so: layers unrolled, one chunk of logits, rows no
longer than the block in which attention leaves keys out. It also counts additions, norms and softmax, under 1 % here.
"""

import jax
import jax.numpy as jnp
import pytest
from flat_config import both, model_config

from jaxformer.config import DataConfig, LossConfig, ModelConfig, Permutation
from jaxformer.kernels import feature_sums
from jaxformer.models import backbone
from jaxformer.models.families import family_of
from jaxformer.models.flops import count_parameters, flops_per_token, training_flops
from jaxformer.modules import make_model
from jaxformer.specs import abstract_params, only_trained, with_trained

ROWS = 2
BASE = {
    "num_layers": 1, "width": 512, "num_heads": 16, "head_width": 64, "context_length": 128, "vocab_size": 4096,
    "attention": "xla",
}  # fmt: skip
PLAIN = DataConfig()
FEW = (0, 1, 4, 6, 7, 14)  # of these, that have each kind of positions, of memory saved and of family
OPTIONS = [
    {},
    {
        "activation": "swiglu",
        "norm": "rms_norm",
        "positions": "rotary",
        "use_bias": False,
        "num_kv_heads": 2,
        "qk_norm": True,
    },
    {"activation": "geglu", "mlp_width": 768, "tie_embeddings": False, "vocab_size": 8192},
    {"activation": "relu", "mlp_width": 1536, "positions": "alibi", "block": "post_norm"},
    {"num_kv_heads": 1, "head_width": 32, "positions": "t5"},
    {"num_layers": 3, "context_length": 64, "block": "parallel"},
    {"positions": {"kind": "disentangled", "span": 8}, "remat": "dots"},
    {"positions": "sinusoidal", "attention_soft_cap": 30.0, "remat": "attention"},
    {"remat": "dots"},
    {"remat": "dots", "block": "parallel", "activation": "swiglu"},
    {"remat": "full"},
    {"remat": "full", "block": "parallel"},
    {"remat": "full", "block": "post_norm", "activation": "swiglu"},
    {"family": "encoder_decoder", "encoder": {"num_layers": 3, "source_length": 96}, "positions": "sinusoidal"},
    {
        "family": "encoder_decoder",
        "encoder": {"source_length": 64},
        "num_kv_heads": 4,
        "remat": "full",
        "head_width": 32,
    },
]


# The mixers that are not softmax attention: (more of the model, its attention).
MIXERS = [
    ({}, {"kind": "linear", "num_kv_heads": 4}),
    ({}, {"kind": "performer", "features": 128}),
    ({"context_length": 320}, {"kind": "performer", "feature_kind": "hyperbolic"}),
    ({"family": "bert", "context_length": 320}, {"kind": "linear"}),
    ({"family": "bert"}, {"kind": "linformer"}),
    ({"family": "bert"}, {"kind": "linformer", "sharing": "none", "num_kv_heads": 4}),
]


def xla_flops(config, execution, grad, data=PLAIN):
    """XLA's count per token of the loss, or of its gradient."""
    model = make_model(config, LossConfig(chunk_tokens=ROWS * config.context_length), execution)
    batch = family_of(config).batch_spec(config, data, ROWS)

    def loss(params, batch):
        return sum(total for total, _ in model.loss(params, batch, None)[0].values())

    lowered = jax.jit(jax.grad(loss) if grad else loss).lower(abstract_params(model.specs), batch)
    return lowered.cost_analysis()["flops"] / (ROWS * config.context_length)


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, marks=() if number in FEW else pytest.mark.slow) for number, each in enumerate(OPTIONS)],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_within_two_percent_of_xla(options):
    """By the gradient, whose operations are the forward pass's, two more for each of them, and what it recomputes."""
    config, execution = both(**{**BASE, **options})
    ours = flops_per_token(config, remat_policy=execution.remat)
    if not options:
        assert xla_flops(config, execution, grad=False) == pytest.approx(ours.forward, rel=0.02)
    assert xla_flops(config, execution, grad=True) == pytest.approx(ours.training + ours.remat, rel=0.02)


ALWAYS = 2 * 512 * 1024  # one projection of a token to all heads
# (model, objective, share predicted, what XLA counts on top: forward, and with the gradient)
MORE = {
    # Every batch projects the distances once, and no gradient goes to them.
    "relative": ({"positions": "relative"}, DataConfig(), 1.0, *(n * 2 * 255 / (ROWS * 128) * ALWAYS for n in (1, 2))),
    # Keys and values are made for each stream, in all layers but the last.
    "xlnet": (
        {"family": "xlnet", "positions": "rotary"}, DataConfig(objective="permutation", permutation=Permutation(4)),
        0.25, 2 * ALWAYS, 3 * 2 * ALWAYS,
    ),
    "transformer_xl": (
        {"family": "transformer_xl", "positions": "none", "memory": 64}, DataConfig(objective="segment_recurrence"),
        1.0, 0, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "xlnet" else ()) for n in MORE])
def test_relative_positions_and_two_streams_and_a_memory(name):
    options, data, share, forward, training = MORE[name]
    config, execution = both(**{**BASE, "num_layers": 2, **options})
    ours = flops_per_token(config, head_fraction=share)
    assert xla_flops(config, execution, False, data) == pytest.approx(ours.forward + forward, rel=0.02)
    assert xla_flops(config, execution, True, data) == pytest.approx(ours.training + training, rel=0.02)
    assert training_flops(config, data) == ours.training


@pytest.mark.slow
@pytest.mark.parametrize("more, attention", MIXERS, ids=str)
def test_mixers_within_two_percent_of_xla(more, attention, monkeypatch):
    """Loops over chunks are counted once by XLA, so here they are none; what their backward pass computes again is no
    work of the model, and not computed."""

    def unrolled(step, carry, xs, reverse=False):
        count, outs = jax.tree.leaves(xs)[0].shape[0], []
        for index in range(count)[:: -1 if reverse else 1]:
            carry, out = step(carry, jax.tree.map(lambda x, i=index: x[i], xs))
            outs.append(out)
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *outs[:: -1 if reverse else 1])

    monkeypatch.setattr(feature_sums.jax, "checkpoint", lambda step, **_: step)
    monkeypatch.setattr(feature_sums.jax.lax, "scan", unrolled)
    sizes = {"num_layers": 2, "width": 512, "context_length": 128, "vocab_size": 4096, "positions": "none"}
    config = ModelConfig(**{**sizes, **more}, attention={"num_heads": 16, "head_width": 64, **attention})
    ours = flops_per_token(config)
    shape, specs = (ROWS, config.context_length), family_of(config).specs(config)
    trained = only_trained(specs, specs)

    def loss(params, tokens):  # without the head: a loop of its own in a BERT
        params = with_trained(abstract_params(specs), params, specs)
        params = jax.tree.map(lambda x: jnp.ones(x.shape) if isinstance(x, jax.ShapeDtypeStruct) else x, params)
        return jnp.sum(backbone.hidden(params, tokens, config, segments=tokens))

    for count, factor in ((loss, 1), (jax.grad(loss), 3)):
        lowered = jax.jit(count).lower(abstract_params(trained), jax.ShapeDtypeStruct(shape, jnp.int32))
        found = lowered.cost_analysis()["flops"] / (ROWS * config.context_length)
        assert found == pytest.approx(factor * (ours.forward - ours.head), rel=0.02)


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

"""One layer of experts between a table and a square, small enough to compile quickly, its batches, and comparisons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import Experts, ModelConfig, Softmax
from jaxformer.functional import experts_layer
from jaxformer.functional.layer import Context
from jaxformer.masks import segments
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import is_spec
from jaxformer.training.gradients import gradients
from jaxformer.types import Batch, Model

T, V, D = 24, 32, 8
KIND = {
    "count": 4, "top_k": 2, "shared": 1, "width": 8, "activation": "swiglu", "balance": 0.5, "z_loss": 0.1,
    "bias_rate": 0.01,
}  # fmt: skip


def config_of(**kind):
    """A model of which only the feed-forward layer is used."""
    attention, of = Softmax(1), Experts(**KIND | kind)
    family = "bert" if of.expert_choice else "gpt"
    return ModelConfig(
        family=family, num_layers=1, width=D, context_length=T, vocab_size=V, attention=attention, feed_forward=of
    )


def specs_of(cfg):
    return {"mlp": experts_layer.specs(cfg)}


def params_of(cfg, dtype=np.float64):
    """A router so sure that rounding changes no choice."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(dtype), specs_of(cfg), is_leaf=is_spec)
    for name in {"load", "bias"} & params["mlp"].keys():
        params["mlp"][name] = 0 * params["mlp"][name]
    return params


def batch_of(rows=8):
    """Two documents in a row; one row ends in padding, and the last is nothing else."""
    tokens = np.random.default_rng(1).integers(0, V, (rows, T)).astype(np.int32)
    documents = np.where(np.arange(T) < T // 2, 1, 2).astype(np.int32) * np.ones((rows, 1), np.int32)
    documents[1, T // 3 :], documents[-1] = 0, 0
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
    return Batch(tokens, tokens, (documents > 0).astype(np.float32), positions, documents)


def inputs_of(batch, dtype):
    """[B, T, D]: what the layer reads."""
    table = np.random.default_rng(2).normal(size=(V, D)).astype(dtype)
    return constrain(jnp.asarray(table)[batch.tokens], "rows", None, None)


def loss(cfg, params, batch, rng=None, frozen=None):
    """(objective, metrics), as of `types.Model.loss`."""
    x = inputs_of(batch, params["mlp"]["w_up"].dtype)
    out, _, terms = experts_layer.apply(params["mlp"], x, cfg, Context(segments(batch.segments)))
    total, weight = jnp.sum(jnp.square(out) * batch.weights[..., None]), weights(batch)["loss"]
    return {name: (value, weight) for name, value in {"loss": total, **terms}.items()}, {"loss": (total, weight)}


def weights(batch):
    return dict.fromkeys(("loss", *experts_layer.TERMS), jnp.sum(batch.weights))


def step_of(cfg, micro_batches, noise_scale=False):
    """(params, batch, rng) -> what `training.gradients.gradients` returns, compiled quickly."""
    model = Model(specs_of(cfg), None, functools.partial(loss, cfg), weights, measured=experts_layer.MEASURED)
    run = functools.partial(gradients, model=model, micro_batches=micro_batches, noise_scale=noise_scale)
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # to compile


def drawn(*shapes, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def with_gradients(function, g, *arguments):
    """Its result, and the gradients of its sum with weights g."""

    def run(g, *arguments):
        out, pull = jax.vjp(function, *arguments)
        return out, pull(g)

    return quickly(run)(g, *arguments)


def close(got, wanted, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted)

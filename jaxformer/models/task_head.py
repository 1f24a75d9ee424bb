"""How the head of a task meets a family of models: it stands on the backbone's last hidden states.

The parameters of the backbone keep their names, so that a run takes them from another one (`config.init_from`); the
family's own head is left out. Every head gives some numbers for each token, and its loss is a sum over the tokens at
which something is asked, so that rows may hold several examples: attention stays inside a segment, and so does whatever
a head reads of other tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import DataConfig, Execution, LossConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.block import term_weights
from jaxformer.functional.layer import weight_init
from jaxformer.functional.layers import dropout, linear
from jaxformer.models.backbone import DEFAULT_EXECUTION, hidden_sharded
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Batch, Params, Sums

OWN_HEADS = ("head", "next_sentence", "pooler")  # groups of parameters that a family's own head has


class Outcome(NamedTuple):
    """What a head makes of a batch.

    Attributes:
      total: scalar to minimise, a sum whose weight is that of the batch.
      metrics: as of `types.Model`, sums over each row.
      predictions: arrays of [B, T], for metrics that are no means over tokens.
    """

    total: Array
    metrics: Sums
    predictions: dict[str, Array]


class TaskHead(NamedTuple):
    """The head of one task.

    Attributes:
      specs: ``cfg -> groups of ParamSpec``.
      outputs: ``(params, x, cfg, rng) -> [..., C]``: float32 numbers for each token, of hidden states [..., D].
      judge: ``(outputs [B, T, C], batch, cfg, loss_cfg) -> Outcome``.
      inputs: ``[B, T] ShapeDtypeStruct of int32 -> arrays of the batch`` that it needs beside tokens, by name.
      flops: ``cfg -> float``: operations for a token, forward.
      count: outputs that it always has; None: one for each label.
    """

    specs: Callable[[ModelConfig], dict[str, Any]]
    outputs: Callable[[Params, Array, ModelConfig, Array | None], Array]
    judge: Callable[[Array, Batch, ModelConfig, LossConfig], Outcome]
    inputs: Callable[[jax.ShapeDtypeStruct], dict[str, Any]]
    flops: Callable[[ModelConfig], float]
    count: int | None = None


def head_of(cfg: ModelConfig) -> Any:
    """`model.head`, its outputs filled in.

    Raises:
      ConfigError: nobody said how many outputs it has.
    """
    assert cfg.head is not None
    if cfg.head.outputs is None:
        raise ConfigError(
            f"config.model.head.outputs: None; the training examples of data.objective={cfg.head.task} say how many"
        )
    return cfg.head


def output_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Weights from the width to the outputs of a head, and its bias if it has one."""
    d, count = cfg.width, head_of(cfg).outputs
    bias = {"b": ParamSpec((count,), (None,), zeros, "bias")} if head_of(cfg).use_bias else {}
    return {"w": ParamSpec((d, count), ("embed", None), weight_init(cfg, d, count), "output"), **bias}


def dense_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Weights and bias from the width to the width, as BERT's pooler has them."""
    d = cfg.width
    return {
        "w": ParamSpec((d, d), ("embed", None), weight_init(cfg, d, d), "hidden"),
        "b": ParamSpec((d,), ("norm",), zeros, "bias"),
    }


def project(params: Params, x: Array, cfg: ModelConfig, rng: Array | None) -> Array:
    """The outputs of a head, [..., C] float32 or wider, from hidden states [..., D], with its dropout."""
    x = dropout(x, head_of(cfg).dropout, rng)
    return linear(x.astype(jnp.promote_types(x.dtype, jnp.float32)), params["w"], params.get("b"))


def last_of_segment(segments: Array) -> Array:
    """[B, T] int: for each token the place of the last token of its segment, the tokens of which follow each other.

    >>> last_of_segment(jnp.array([[1, 1, 2, 0, 0]])).tolist()
    [[1, 1, 2, 4, 4]]
    """
    length = segments.shape[1]
    ends = jnp.concatenate([segments[:, 1:] != segments[:, :-1], jnp.ones_like(segments[:, :1], bool)], axis=1)
    places = jnp.where(ends, jnp.arange(length)[None], length)
    return jax.lax.cummin(places, axis=1, reverse=True)


def at_places(values: Array, places: Array) -> Array:
    """values[b, places[b, t]], of [B, T, C] and [B, T]."""
    return jnp.take_along_axis(values, places[..., None], axis=1)


def with_head(family: Any, head: TaskHead) -> Any:
    """A `Family` with a task's head in place of its own.

    Args:
      family: whose models are one stack, `backbone.hidden_sharded`.
      head: of the task.
    """

    def specs(cfg: ModelConfig) -> dict[str, Any]:
        tree = family.specs(cfg)
        return {name: tree[name] for name in tree if name not in OWN_HEADS} | head.specs(cfg)

    def run(
        params: Params,
        tokens: Array,
        cfg: ModelConfig,
        *,
        rng: Array | None = None,
        execution: Execution = DEFAULT_EXECUTION,
        **fields: Any,
    ) -> tuple[Array, Any]:
        rngs = (None, None) if rng is None else jax.random.split(rng)
        x, sharding, terms = hidden_sharded(params, tokens, cfg, rng=rngs[0], execution=execution, **fields)
        return sharding.unshard(head.outputs(params, x, cfg, rngs[1])), terms

    def judge(
        params: Params,
        batch: Batch,
        cfg: ModelConfig,
        loss_cfg: LossConfig,
        rng: Array | None = None,
        execution: Execution = DEFAULT_EXECUTION,
        frozen: Any = None,
    ) -> tuple[Sums, Outcome]:
        fields = {"positions": batch.positions, "segments": batch.segments}
        types = (batch.inputs or {}).get("token_types")
        fields |= {} if types is None else {"token_types": types}
        outputs, terms = run(params, batch.tokens, cfg, rng=rng, execution=execution, **fields)
        found, of = head.judge(outputs, batch, cfg, loss_cfg), term_weights(cfg, batch.segments)
        objective = {name: (total, of[name]) for name, total in terms.items()}
        return {"loss": (found.total, jnp.sum(batch.weights))} | objective, found

    def loss(*args: Any) -> tuple[Sums, Sums]:
        objective, found = judge(*args)
        return objective, found.metrics

    def predict(*args: Any) -> tuple[Sums, dict[str, Array]]:
        found = judge(*args)[1]
        return found.metrics, found.predictions

    def weights(batch: Batch, cfg: ModelConfig) -> dict[str, Array]:
        return {"loss": jnp.sum(batch.weights), **term_weights(cfg, batch.segments)}

    def batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
        ids = jax.ShapeDtypeStruct((rows, cfg.context_length), jnp.int32)
        inputs = {"examples": ids, **head.inputs(ids)}
        if data.labelled is not None and data.labelled.opening == "cls":
            inputs["token_types"] = ids
        return Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32), ids, ids, inputs)

    return family._replace(
        specs=specs,
        apply=lambda params, tokens, cfg, **fields: run(params, tokens, cfg, **fields)[0],
        loss=loss,
        weights=weights,
        batch_spec=batch_spec,
        head_flops=head.flops,
        tasks=("predict",),
        predict=predict,
    )

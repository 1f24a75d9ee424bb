"""A mixture of experts as a sublayer: router, experts, shared experts, and the terms that it adds to the objective.

The terms are sums over tokens, of all layers and micro-batches and devices, so that they add up:

  expert_balance   `router.balance_loss`. The share of the choices that each expert has is that of the whole batch:
                   where this is all of it, they are counted here; where it comes in micro-batches,
                   `training.gradients` has all of them counted first, by the gradient of the parameter `load`, and
                   gives the counts as its value
  router_z         `router.z_loss`
  expert_bias      `router.bias_term`, for the optimizer's update of the bias

Two more are recorded and not minimised:

  expert_load      the choices of the busiest expert, as a multiple of their mean over experts: 1 if all are equally
                   busy, E / k if all tokens choose the same k. Of the whole batch with a balance loss, as above; else
                   the mean over micro-batches, and over the devices of the data axis where these work apart
  expert_dropped   the share of the choices that found their expert full
"""

import functools
import logging
import math

import jax
import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import experts, router
from jaxformer.functional.expert_sharding import Here, Layer, Weights, over_mesh
from jaxformer.functional.grouped_choice import ANY, GROUPED, choose, part_of
from jaxformer.functional.layer import Context, Cost, Sublayer, shard_residual, weight_init
from jaxformer.functional.layers import mlp
from jaxformer.parallel.constraints import constrain, mesh_axes
from jaxformer.specs import ParamSpec, normal, zeros
from jaxformer.types import Array, Params

LOG = logging.getLogger(__name__)  # says which products a layer takes; `--log` of the programs shows it
WEIGHTS = ("w_up", "w_gate", "w_down")
MEASURED = ("expert_load", "expert_dropped")
TERMS = ("expert_balance", "router_z", "expert_bias", *MEASURED)


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """The router's matrix, the weights of all experts, of those that are shared as one, and what the losses need.

    There are no biases in any of them, whatever `model.use_bias` says, as in published models.
    """
    kind, d = cfg.feed_forward, cfg.width
    f, active = kind.hidden_width(d), 1.0 if kind.expert_choice else kind.top_k / kind.count
    up, down = weight_init(cfg, d, f), weight_init(cfg, f, d, residual=True)
    into, out_of = ("embed", "mlp"), ("mlp", "embed")
    # Never zero: all tokens would go to the first experts.
    tree = {"w_router": ParamSpec((d, kind.count), ("embed", None), normal(0.02), "output")}
    names = WEIGHTS if kind.gated else ("w_up", "w_down")
    for name in names:
        shape, axes, init = ((f, d), out_of, down) if name == "w_down" else ((d, f), into, up)
        tree[name] = ParamSpec((kind.count, *shape), ("experts", *axes), init, "hidden", active=active)
        if kind.shared:
            at = axes.index("mlp")
            wide = (*shape[:at], kind.shared * shape[at], *shape[at + 1 :])
            tree[f"shared_{name}"] = ParamSpec(wide, axes, init, "hidden")
    if kind.bias_rate:
        tree["bias"] = ParamSpec((kind.count,), (None,), zeros, "counter_bias", rate=kind.bias_rate)
    if kind.balance_weight:
        tree["load"] = ParamSpec((kind.count,), (None,), zeros, "statistic", trained=False)
    return tree


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`. Padding (segment 0) goes to no expert and counts nowhere."""
    if x.ndim == 2:
        out, cache, terms = apply(params, x[None], cfg, context)
        return out[0], cache, terms
    kind = cfg.feed_forward
    valid = not_padding(x, context)
    logits = _router_logits(x, params["w_router"])
    weights = {name: params[name] for name in WEIGHTS if name in params}
    axes = {name: spec.axes for name, spec in specs(cfg).items() if name in weights}
    exchange, slots = context.execution.expert_exchange, kind.slots(x.shape[1])
    if kind.expert_choice:
        taken = jnp.ones(x.shape[:2], bool) if valid is None else valid
        out = over_mesh(_expert_choice(cfg, x), x, logits, taken[..., None], weights, axes, exchange, slots)
        chosen = None
    else:
        gates, chosen = router.route(logits, kind.top_k, params.get("bias"), kind.normalized)
        chosen = chosen if valid is None else jnp.where(valid[..., None], chosen, kind.count)
        slots, choices = (None, None) if context.progress is not None else (slots, kind.top_k)
        out = over_mesh(_layer(cfg, x, context), x, gates, chosen, weights, axes, exchange, slots, choices)
    if kind.shared:
        shared = {name.removeprefix("shared_"): w for name, w in params.items() if name.startswith("shared_")}
        out = out + mlp(x, **shared, activation=kind.activation)
    return shard_residual(out), None, _terms(params, logits, chosen, valid, cfg)


def _router_logits(x: Array, w: Array) -> Array:
    """[B, T, E] in float32 or wider, whatever the compute dtype: rounding must not choose between near-equal ones."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST
    return constrain(jnp.einsum("BTD,DE->BTE", x.astype(wide), w.astype(wide), precision=precision), "rows", None, None)


def not_padding(x: Array, context: Context) -> Array | None:
    """[B, T] bool, False for padding; None: nothing is known of any."""
    mask = context.mask
    if mask is None or mask.query_segments is None:
        return None
    segments = jnp.broadcast_to(mask.query_segments, (x.shape[0] // mask.parts, x.shape[1] * mask.parts))
    shards = jnp.swapaxes(segments.reshape(segments.shape[0], mask.parts, -1), 0, 1)
    return shards.reshape(x.shape[:2]) != 0


def _expert_choice(cfg: ModelConfig, x: Array) -> Layer:
    """The experts that choose, as `expert_sharding.over_mesh` takes them."""
    kind = cfg.feed_forward
    how = functools.partial(experts.expert_choice_mlp, capacity=kind.capacity(x.shape[1]), activation=kind.activation)

    def choosing(x: Array, logits: Array, valid: Array, weights: Weights, here: Here) -> Array:
        return how(x, logits, **here.whole(weights), valid=valid[..., 0], first_expert=here.first, over=here.over)

    return choosing


def _layer(cfg: ModelConfig, x: Array, context: Context) -> Layer:
    """The experts, as `expert_sharding.over_mesh` takes them. Decoding drops nothing: its tokens come one by one."""
    kind = cfg.feed_forward
    if kind.dispatch == "capacity" and context.progress is None:
        capacity = kind.capacity(x.shape[1])

        how = functools.partial(experts.capacity_mlp, activation=kind.activation)

        def bounded(x: Array, gates: Array, chosen: Array, weights: Weights, here: Here) -> Array:
            own, weights = _own(chosen, weights, here), here.whole(weights)
            return how(x, gates, own, capacity, **weights, over=here.over, ragged=here.ragged)

        return bounded
    name = context.execution.experts
    hidden = part_of(kind.hidden_width(cfg.width), mesh_axes().get("tensor", 1))
    why = GROUPED[name].unsupported(cfg.width, hidden, cfg.dtype) if name in GROUPED else None
    if why is not None:
        raise ConfigError(f"config.execution.experts: {name} cannot do {why}; accepted: {ANY}")
    if name == "auto":
        LOG.info(f"experts: {choose(cfg.width, hidden, cfg.dtype)} multiplies with their weights")
    layer = functools.partial(experts.expert_mlp, activation=kind.activation, implementation=name)

    def dropless(x: Array, gates: Array, chosen: Array, weights: Weights, here: Here) -> Array:
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, gates, _own(chosen, weights, here)))
        return layer(*flat, **weights, over=here.over, whole=here.whole).reshape(x.shape)

    return dropless


def _own(chosen: Array, weights: Weights, here: Here) -> Array:
    """Choices as numbers of the experts that get them from here."""
    return chosen if here.over else router.among(chosen, here.first, len(weights["w_up"]))


def _terms(
    params: Params, logits: Array, chosen: Array | None, valid: Array | None, cfg: ModelConfig
) -> dict[str, Array]:
    """Terms of the objective, and what is measured; see the top of the file. `chosen`: None where experts choose."""
    kind, terms = cfg.feed_forward, dict.fromkeys(TERMS, jnp.zeros((), jnp.float32))
    if kind.z_loss:
        terms["router_z"] = kind.z_loss * router.z_loss(logits, valid).astype(jnp.float32)
    if chosen is None:  # all experts are as busy
        tokens = math.prod(logits.shape[:2]) if valid is None else jnp.sum(valid)
        return terms | {"expert_load": jnp.asarray(tokens, jnp.float32)}
    counts = of_batch = router.count_choices(chosen, kind.count)
    if kind.bias_rate:
        terms["expert_bias"] = router.bias_term(counts, params["bias"])
    if kind.balance_weight:
        load = jax.lax.stop_gradient(params["load"])
        of_batch = jnp.where(jnp.sum(load) > 0, load, counts)
        loss = kind.balance_weight * router.balance_loss(logits, of_batch, valid).astype(jnp.float32)
        terms["expert_balance"] = loss + jnp.sum(counts * (params["load"] - load))
    busiest = jnp.max(of_batch) / jnp.maximum(jnp.sum(of_batch), 1e-30) * kind.count
    terms["expert_load"] = busiest * jnp.sum(counts) / kind.top_k
    if kind.dispatch == "capacity":
        of_rows = jax.vmap(functools.partial(router.count_choices, experts=kind.count))(chosen)
        over = jnp.maximum(of_rows - kind.capacity(logits.shape[1]), 0)
        terms["expert_dropped"] = jnp.sum(over) / kind.top_k
    return terms


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`: of the experts that a token goes through."""
    kind, d, f = cfg.feed_forward, cfg.width, cfg.feed_forward.hidden_width(cfg.width)
    per_token = kind.top_k
    if kind.dispatch == "expert_choice":
        per_token = kind.capacity(length) * kind.count / length
    matrices, of_token = 3 if kind.gated else 2, per_token + kind.shared
    return Cost(
        products=2 * d * f * matrices * of_token + 2 * d * kind.count,
        last=2 * d * f * of_token,
        saved=f * (matrices - 1) * of_token,
    )


EXPERTS = Sublayer(specs, apply, cost, terms=TERMS, terms_of_padding=False, measured=MEASURED)

"""Mixture of experts as plain functions of tokens and what `functional.router` chose for them.

>>> from jaxformer.functional.router import route
>>> keys = jax.random.split(jax.random.key(0), 3)
>>> x, w_up = jax.random.normal(keys[0], (6, 4)), jax.random.normal(keys[1], (3, 4, 8))
>>> w_down, logits = jnp.swapaxes(w_up, 1, 2), jax.random.normal(keys[2], (6, 3))
>>> gates, chosen = jax.jit(route, static_argnums=1)(logits, 2)
>>> jax.jit(expert_mlp)(x, gates, chosen, w_up, w_down).shape
(6, 4)

Letters beside those of `types`: E expert, k choice, M row of the sorted tokens.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.functional.expert_exchange import EqualGroups, slots_exchange, sorted_exchange
from jaxformer.functional.expert_rows import Exchange, Rounds, in_rounds, through
from jaxformer.functional.grouped_choice import GROUPED, choose
from jaxformer.functional.layers import ACTIVATIONS
from jaxformer.functional.router import room_for, sort_by_expert, within_capacity
from jaxformer.kernels.grouped.in_two import in_two
from jaxformer.kernels.matmul import rounded_einsum
from jaxformer.kernels.rematerialize import PRODUCT
from jaxformer.types import Array

Arrays = tuple[Array, ...]
ROOM = 2  # a device's buffer in a ragged exchange, in multiples of its fair share of rows


def expert_mlp(
    x: Array,
    gates: Array,
    chosen: Array,
    w_up: Array,
    w_down: Array,
    w_gate: Array | None = None,
    *,
    activation: str = "gelu",
    implementation: str = "auto",
    over: tuple[str, ...] = (),
    whole: Callable[[Mapping[str, Array]], Mapping[str, Array]] = dict,
) -> Array:
    """The outputs of each token's experts, multiplied by its gates and summed. No token is dropped.

    Tokens are sorted by expert, so the work is about that of k feed-forward layers, whatever the number of experts and
    however many tokens each has; E times as much with "ragged" on CPU and GPU, where it is a product of all with all.

    Args:
      x: [N, D].
      gates: [N, k] float.
      chosen: [N, k] int32 in [0, E]; E: nobody, so nothing is added.
      w_up: [E, D, F]; w_down: [E, F, D]; w_gate: [E, D, F], for the gated activations only.
      activation: as of `layers.mlp`.
      implementation: of the products, "auto" or one of `grouped_choice.GROUPED`. JAX has a `vmap` of "ragged" only
        over tokens, choices and weights together, and no `jacfwd` by a weight: pass tokens as one [N, D], or take
        "blocks", which under `jit` has no `grad` of a `grad` but a `jvp` of one.
      over: inside shard_map, the mesh axes over whose devices the experts are split, each with its part of the weights
        and tokens of its own: tokens go to the devices of their experts and come back (a ragged all-to-all). E is then
        the number of all experts.
      whole: gathers weights, by name, of which each device has parts. Called again in later rounds
        (`expert_rows.in_rounds`) rather than kept, as those seldom run.

    Returns:
      [N, D] in the dtype of x.

    Raises:
      ValueError: other shapes, unknown activation or implementation, or a gate weight where none belongs.

    Source: Shazeer et al. 2017, section 2; Gale et al. 2022 (no dropped tokens).
    """
    given = {"w_up": w_up, "w_down": w_down} | ({} if w_gate is None else {"w_gate": w_gate})
    weights = whole(given)
    experts, width, hidden = weights["w_up"].shape
    devices = jax.lax.axis_size(over) if over else 1
    if x.ndim != 2 or x.shape[1] != width or chosen.shape != gates.shape or chosen.shape[:-1] != x.shape[:1]:
        raise ValueError(
            f"expert_mlp: x {x.shape}, gates {gates.shape}, chosen {chosen.shape}; accepted for w_up [E, "
            f"{width}, {hidden}]: [N, {width}], and [N, k] of both"
        )
    (tokens, per_token), dtype = chosen.shape, str(x.dtype)
    name = choose(width, hidden, dtype) if implementation == "auto" else implementation
    if name not in GROUPED:
        raise ValueError(f"expert_mlp: implementation {name!r}; accepted: auto, {', '.join(GROUPED)}")
    why = GROUPED[name].unsupported(width, hidden, dtype)
    if why is not None:
        raise ValueError(f"expert_mlp: {name} cannot do {why}; accepted: auto")
    if not tokens:
        return x
    align = GROUPED[name].alignment(tokens * per_token, experts)
    mlp = functools.partial(_grouped_mlp, name, align, activation)
    place, groups, rows = sort_by_expert(chosen.reshape(-1), devices * experts, 1 if over else align)
    place = place.reshape(chosen.shape)
    if not over:
        return through(x, gates, place, rows, lambda rows: mlp(rows, groups, weights))
    exchange, groups = sorted_exchange(groups, over, rows, align)
    rounds = Rounds(mlp, whole, room_for(ROOM * tokens * per_token, experts, align))
    return in_rounds(x, gates, place, given, groups, exchange, rounds)


def _grouped_mlp(name: str, align: int, activation: str, x: Array, sizes: Array, weights: Mapping[str, Array]) -> Array:
    """[M, D] -> [M, D], rows sorted by expert, so many of each."""

    def mlp_of(function: Callable[..., Array], x: Array, first: Arrays, last: Array) -> Array:
        return GROUPED[name].mlp_of(function, x, first, last, sizes, align)

    return _mlp_of(mlp_of, x, (weights["w_up"], weights.get("w_gate"), weights["w_down"]), activation)


def capacity_mlp(
    x: Array,
    gates: Array,
    chosen: Array,
    capacity: int,
    w_up: Array,
    w_down: Array,
    w_gate: Array | None = None,
    *,
    activation: str = "gelu",
    over: tuple[str, ...] = (),
    ragged: bool = False,
) -> Array:
    """`expert_mlp` where each expert takes `capacity` tokens of every row, see `within_capacity`; others get zeros.

    Args:
      x: [B, T, D].
      gates, chosen: [B, T, k].
      capacity: tokens of a row that one expert takes.
      w_up, w_down, w_gate, activation: as of `expert_mlp`.
      over: inside shard_map, the mesh axes over whose devices the experts are split, each with its part of the weights
        and rows of its own: tokens go to the devices of their experts and come back (all-to-all).
      ragged: only tokens are sent, not the places that stay empty (a ragged all-to-all).

    Returns:
      [B, T, D] in the dtype of x.

    Raises:
      ValueError: as of `expert_mlp`, or no place for any token.
    """
    if x.ndim != 3 or chosen.shape != gates.shape or chosen.shape[:-1] != x.shape[:2] or capacity < 1:
        raise ValueError(
            f"capacity_mlp: x {x.shape}, gates {gates.shape}, chosen {chosen.shape}, capacity {capacity}; accepted: "
            "[B, T, D], [B, T, k] of both, and at least 1"
        )
    devices, (batch, length, _) = jax.lax.axis_size(over) if over else 1, x.shape
    experts = len(w_up) * devices
    if not batch * length:
        return x
    chosen, rank = within_capacity(chosen, experts, capacity)
    slots = batch * capacity
    rows = experts * slots
    exchange: Exchange = EqualGroups(len(w_up), over)
    if over and ragged:
        place, sizes, rows = sort_by_expert(chosen.reshape(-1), experts)
        exchange = slots_exchange(sizes, over, rows, slots)
    else:
        row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        place = jnp.where(chosen < experts, (chosen * batch + row) * capacity + rank, rows)
    flat_x, flat_gates, flat_place = (a.reshape(batch * length, -1) for a in (x, gates, place))

    mlp = functools.partial(_mlp_of, _equal_groups, weights=(w_up, w_gate, w_down), name=activation)
    return through(flat_x, flat_gates, flat_place, rows, mlp, exchange).reshape(x.shape)


def expert_choice_mlp(
    x: Array,
    logits: Array,
    capacity: int,
    w_up: Array,
    w_down: Array,
    w_gate: Array | None = None,
    *,
    valid: Array | None = None,
    activation: str = "gelu",
    first_expert: Array | int = 0,
    over: tuple[str, ...] = (),
) -> Array:
    """Experts that choose tokens: each takes the `capacity` tokens of a row that it has the highest probability for.

    Whether a token is taken depends on all others of its row, later ones too.

    Args:
      x: [B, T, D].
      logits: [B, T, E] of the router, float32. The gates are their softmax over the experts.
      capacity: tokens of a row that one expert takes, at most T.
      w_up, w_down, w_gate, activation: as of `expert_mlp`.
      valid: [B, T] bool, False for padding, which nobody takes; None: no padding.
      first_expert: its number, if there are weights of some only.
      over: as of `capacity_mlp`.

    Returns:
      [B, T, D] in the dtype of x.

    Raises:
      ValueError: as of `capacity_mlp`, or a capacity of more than T.

    Source: Zhou et al. 2022, section 3.2.
    """
    fits = x.ndim == logits.ndim == 3 and logits.shape[:2] == x.shape[:2] and logits.shape[2] >= len(w_up)
    if not fits or not 1 <= capacity <= x.shape[1]:
        raise ValueError(
            f"expert_choice_mlp: x {x.shape}, logits {logits.shape}, {len(w_up)} experts, capacity {capacity}; "
            "accepted: [B, T, D], [B, T, E], E experts at most, and 1 to T"
        )
    experts, (batch, _, width) = len(w_up) * (jax.lax.axis_size(over) if over else 1), x.shape
    probabilities = jax.nn.softmax(logits, axis=-1)
    if valid is not None:  # padding that is taken, for want of tokens, is zeros with a gate of 0
        probabilities, x = (jnp.where(valid[..., None], each, 0) for each in (probabilities, x))
    probabilities = jax.lax.dynamic_slice_in_dim(probabilities, first_expert, experts, axis=2)
    gates, taken = jax.lax.top_k(jnp.swapaxes(probabilities, 1, 2), capacity)  # [B, E, C]
    number = jnp.arange(batch, dtype=jnp.int32)[:, None]
    taken = taken.reshape(batch, -1)
    exchange = EqualGroups(len(w_up), over)

    def sent(of_rows: Array, keep: bool = False) -> Array:  # [B, E C, F] -> [E B C, F], to the experts' devices
        parts = jnp.swapaxes(of_rows.reshape(batch, experts, capacity, -1), 0, 1)
        return exchange.to_experts(parts.reshape(experts * batch * capacity, -1), keep)

    out = _mlp_of(_equal_groups, sent(x[number, taken], keep=True), (w_up, w_gate, w_down), activation)
    out = exchange.from_experts(out * sent(gates).astype(out.dtype))
    out = jnp.swapaxes(out.reshape(experts, batch, capacity, width), 0, 1).reshape(batch, -1, width)
    return jnp.zeros_like(x).at[number, taken].add(out)


def _products_of_equal(function: Callable[..., Array], inputs: Arrays, weights: Arrays) -> Arrays:
    """`in_two.ProductsOf` of groups of equal size."""

    def products(inputs: Arrays, weights: Arrays) -> Arrays:
        groups, width, _ = weights[0].shape
        hidden = function(*inputs).reshape(groups, -1, width)

        def product(weight: Array) -> Array:
            found = rounded_einsum("END,EDF->ENF", hidden, weight.astype(hidden.dtype), hidden.dtype)
            return found.reshape(-1, weight.shape[2])

        return tuple(map(product, weights))

    return jax.checkpoint(products, prevent_cse=False)(inputs, weights)  # only the inputs are kept


_equal_groups = in_two(_products_of_equal)


def _mlp_of(mlp_of: Callable[..., Array], x: Array, weights: tuple[Array, Array | None, Array], name: str) -> Array:
    """[M, D] -> [M, D], a feed-forward layer of sorted rows."""
    w_up, w_gate, w_down = weights
    experts, width, hidden = w_up.shape
    shapes = w_down.shape, w_up.shape if w_gate is None else w_gate.shape
    if x.shape[1] != width or shapes != ((experts, hidden, width), w_up.shape):
        raise ValueError(
            f"experts: tokens {x.shape[1]} wide, w_up {w_up.shape}, w_down {w_down.shape}, w_gate "
            f"{None if w_gate is None else w_gate.shape}; accepted: D, [E, D, F], [E, F, D], and None or as w_up"
        )
    if name not in ACTIVATIONS:
        raise ValueError(f"experts: activation {name!r}; accepted: {', '.join(ACTIVATIONS)}")
    function, gated = ACTIVATIONS[name]
    if gated != (w_gate is not None):
        raise ValueError(f"experts: activation {name!r} {'needs' if gated else 'has no use for'} w_gate")
    first = (w_up,) if w_gate is None else (w_gate, w_up)
    return checkpoint_name(mlp_of(functools.partial(_applied, function), x, first, w_down), PRODUCT)


def _applied(function: Callable[[Array], Array], first: Array, hidden: Array | None = None) -> Array:
    return function(first) if hidden is None else function(first) * hidden

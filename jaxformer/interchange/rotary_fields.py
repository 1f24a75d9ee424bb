"""Rotary positions and windows as config.json of transformers has them, of version 5 and of earlier ones."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.positions import LLAMA3_TURNS
from jaxformer.interchange.foreign import Fields

SCALINGS = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
LLAMA3 = dict(zip(("low_freq_factor", "high_freq_factor"), LLAMA3_TURNS, strict=True))
ORIGINAL = "original_max_position_embeddings"
SLIDING, FULL = "sliding_attention", "full_attention"


def read_rotary(fields: Fields, base: float = 10_000.0, *, partial: float | None = None) -> dict[str, Any]:
    """Our `positions` section; transformers 5 has `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`.

    Args:
      fields: config.json.
      base: where no field says it.
      partial: the share of each head that is turned where no field says it; None: the architecture turns all of it.

    Raises:
      ConfigError: a scaling that our rotary positions do not have.
    """
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}  # the order in which transformers looks
    base = fields.get("rotary_emb_base", fields.get("rope_theta", base))
    share = fields.get("rotary_pct", fields.get("partial_rotary_factor", partial))
    return rotary_of(rope, base, fields, share if partial is not None else None)


def rotary_of(rope: Any, base: float, fields: Fields, share: float | None = None) -> dict[str, Any]:
    """Our `positions` section of one entry of `rope_parameters`; `base` and `share` of a head where it has none.

    Where it does not say which length yarn or llama3 scaling begins from, it is that of the model in `fields`; a field
    beside the entry says it before the entry does.
    """
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_parameters: {rope!r} is not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(f"config.json: rope_parameters.rope_type: {kind!r}; accepted: {', '.join(SCALINGS)}")
    found = {"kind": "rotary", "base": float(rope.get("rope_theta", base))}
    fraction = float(rope.get("partial_rotary_factor") or share or 1.0)
    if share is None and fraction != 1:
        raise ConfigError(f"config.json: rope_parameters.partial_rotary_factor: {fraction}; accepted: 1.0")
    if fraction != 1:
        found["fraction"] = fraction
    if kind == "default":
        return found
    if any(name in rope for name in ("beta_fast", "beta_slow", "mscale", "attention_factor", "truncate")):
        raise ConfigError(f"config.json: rope_parameters: {dict(rope)!r}; accepted: yarn with its published constants")
    if kind == "llama3" and any(rope.get(name) != value for name, value in LLAMA3.items()):
        raise ConfigError(f"config.json: rope_parameters: {dict(rope)!r}; accepted: llama3 with {LLAMA3}")
    original = rope.get(ORIGINAL)
    if kind != "linear":
        original = fields.get(ORIGINAL, original or fields.get("max_position_embeddings"))
    if not isinstance(rope.get("factor"), int | float):
        raise ConfigError(f"config.json: rope_parameters: {dict(rope)!r}; accepted: {kind} with a factor")
    return {**found, "scaling": SCALINGS[kind], "factor": float(rope["factor"]), "original_length": original}


def only_unscaled(positions: Mapping[str, Any]) -> None:
    """Raises ConfigError: `read_rotary` found a scaling, and the architecture has none of ours."""
    if "scaling" in positions:
        raise ConfigError(f"config.json: rope_parameters.rope_type: {positions['scaling']!r}; accepted: default")


def write_rotary(cfg: ModelConfig, *, partial: bool = False) -> dict[str, Any]:
    """`rope_parameters`, and the older fields, so that both read it; `partial`: the share that is turned as well."""
    positions, rope = cfg.positions, rope_of(cfg)
    share = {"partial_rotary_factor": positions.fraction} if partial else {}
    old = {} if positions.scaling == "none" else {"rope_scaling": rope | share}
    return {"rope_parameters": rope | share, "rope_theta": positions.base, **share, **old}


def rope_of(cfg: ModelConfig) -> dict[str, Any]:
    """One entry of `rope_parameters`."""
    positions = cfg.positions
    known = {ours: theirs for theirs, ours in SCALINGS.items()}
    if positions.scaling not in known:
        raise ConfigError(f"config.model.positions.scaling: {positions.scaling}; accepted: {', '.join(known)}")
    rope = {"rope_type": known[positions.scaling], "rope_theta": positions.base}
    if positions.scaling == "none":
        return rope
    original = positions.original_length or round(cfg.context_length / positions.factor)
    rope |= {"factor": positions.factor, ORIGINAL: original}
    return rope | (LLAMA3 if positions.scaling == "llama3" else {})


def read_layers(window: int | None, types: list[str]) -> dict[str, Any]:
    """`window` and `global_every` of our `attention` section, of `layer_types`.

    Raises:
      ConfigError: they do not repeat as ours can.
    """
    full = [number for number, kind in enumerate(types, 1) if kind == FULL]
    if window is None or len(full) == len(types):
        return {}
    every = full[0] if full else None
    if set(types) <= {SLIDING, FULL} and full == list(range(every or 1, len(types) + 1, every or 1)) * bool(full):
        return {"window": window, "global_every": every}
    raise ConfigError(
        f"config.json: layer_types: {', '.join(types)}; accepted: {FULL} in every n-th layer, {SLIDING} in the others"
    )


def write_layers(cfg: ModelConfig) -> list[str]:
    """`layer_types`."""
    period = [SLIDING if each.window is not None else FULL for each in cfg.attention.period()]
    return [period[number % len(period)] for number in range(cfg.num_layers)]

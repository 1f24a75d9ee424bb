"""Field names of earlier versions, which config files, overrides and manifests may still use, and today's names."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config.attention import IMPLEMENTATIONS, AttentionConfig
from jaxformer.config.choice import Choice
from jaxformer.config.feed_forward import FeedForwardConfig
from jaxformer.config.fields import convert, from_text, shown
from jaxformer.config.positions import PositionsConfig
from jaxformer.errors import ConfigError

# Until 0.1: old field -> new field; and a short name.
ALIASES = {
    "model.num_heads": "model.attention.num_heads",
    "model.num_kv_heads": "model.attention.num_kv_heads",
    "model.head_width": "model.attention.head_width",
    "model.window": "model.attention.window",
    "model.qk_norm": "model.attention.qk_norm",
    "model.attention_soft_cap": "model.attention.soft_cap",
    "model.attention_dropout": "model.attention.dropout",
    "model.rotary_base": "model.positions.base",
    "model.rotary_scaling": "model.positions.scaling",
    "model.rotary_factor": "model.positions.factor",
    "model.rotary_original_length": "model.positions.original_length",
    "model.mlp_width": "model.feed_forward.width",
    "model.activation": "model.feed_forward.activation",
    "model.token_types": "model.bert.token_types",
    "model.next_sentence": "model.bert.next_sentence",
    "model.source_length": "model.encoder.source_length",
    "model.remat": "execution.remat",
    "model.layers": "execution.layers",
    "train.steps_per_dispatch": "execution.steps_per_dispatch",
    "train.micro_batches": "execution.gradient_accumulation_steps",
    "train.batch_rows": "train.global_batch_size",
    "mesh.shard_norms": "mesh.sequence_parallel",
}
GROUPS: dict[str, type[Choice]] = {
    "attention": AttentionConfig, "positions": PositionsConfig, "feed_forward": FeedForwardConfig,
}  # fmt: skip
# Manifests of earlier versions have the rotary fields in every model. Without rotary positions they are dropped if they
# have these values; None: any value.
MEANT_NOTHING = {
    "rotary_base": None, "rotary_original_length": None, "rotary_scaling": "none", "rotary_factor": 1,
}  # fmt: skip
# Every model had these. In one without a section `bert` they say nothing if they have these values.
BERT = {"token_types": 0, "next_sentence": False}
BOARD = "tensorboard"  # a switch until 0.1, now the name of a tracker


def renamed(overrides: Mapping[str, str], kinds: Collection[str], tree: Mapping[str, Any]) -> dict[str, str]:
    """Overrides by the names that their fields have today.

    Args:
      overrides: dotted field -> text, as in "model.num_heads".
      kinds: fields that choose a kind, as in "model.positions.kind", which is what "model.positions" means.
      tree: what they override.

    Raises:
      ConfigError: a field is given under two names, with two values.
    """
    named: dict[str, tuple[str, str]] = {}
    if BOARD in overrides:
        overrides = _with_board(dict(overrides), tree)
    for old, text in overrides.items():
        implementation = old == "model.attention" and text in IMPLEMENTATIONS
        new = "execution.attention" if implementation else ALIASES.get(old, old)
        new = f"{new}.kind" if f"{new}.kind" in kinds else new
        before = named.setdefault(new, (old, text))
        if before[1] != text:
            raise ConfigError(_twice(*((old, text) if old != new else before), new))
    model = tree.get("model", {})
    idle = {(f"model.{name}", str(value).lower()) for name, value in BERT.items()}
    if not isinstance(model, Mapping) or model.get("bert") is not None:
        idle = set()
    return {new: text for new, (old, text) in named.items() if (old, text.lower()) not in idle}


def modernize(tree: dict[str, Any]) -> None:
    """Gives the fields of a nested mapping, changed in place, the names they have today.

    Raises:
      ConfigError: a field is given under both names.
    """
    model = tree.get("model")
    if isinstance(model, dict):
        _bert(model)
        if isinstance(model.get("attention"), str) and model["attention"] in IMPLEMENTATIONS:
            _put(tree, "model.attention", "execution.attention", model.pop("attention"))
    if BOARD in tree:
        trackers = _trackers(tree, convert(tree.pop(BOARD), bool, f"config.{BOARD}"))
        if isinstance(tree.setdefault("tracking", {}), dict):
            tree["tracking"]["trackers"] = trackers
    for old, new in ALIASES.items():
        section, _, name = old.partition(".")
        mapping = tree.get(section)
        if isinstance(mapping, dict) and name in mapping:
            value = mapping.pop(name)
            if not _means_nothing(mapping, name, value):
                _put(tree, old, new, value)


def _with_board(overrides: dict[str, str], tree: Mapping[str, Any]) -> dict[str, str]:
    """Overrides that name TensorBoard among the trackers, or leave it out, in place of the switch."""
    on = from_text(overrides.pop(BOARD), bool, f"config.{BOARD}")
    given = overrides.get("tracking.trackers")
    if given is not None:
        tree = {"tracking": {"trackers": from_text(given, tuple[str, ...], "config.tracking.trackers")}}
    return {**overrides, "tracking.trackers": ",".join(_trackers(tree, on)) or "()"}


def _trackers(tree: Mapping[str, Any], board: bool) -> tuple[str, ...]:
    """The trackers that a nested mapping names, with TensorBoard or without."""
    section = tree.get("tracking")
    found = section.get("trackers", ()) if isinstance(section, Mapping) else ()
    others = [name for name in ((found,) if isinstance(found, str) else found) if name != BOARD]
    return (BOARD, *others) if board else tuple(others)


def _bert(model: dict[str, Any]) -> None:
    """Moves token_types and next_sentence, which every model had, into the section `bert` of models that use them."""
    bert = model.get("bert") or {}
    if any(name in model for name in BERT) and isinstance(bert, dict):
        found = {name: model.pop(name, value) for name, value in BERT.items()}
        for name in BERT:
            if found[name] and bert.get(name, found[name]) != found[name]:
                raise ConfigError(_twice(f"model.{name}", found[name], f"model.bert.{name}"))
        if any(found.values()):
            model["bert"] = {**found, **bert}


def _means_nothing(model: Mapping[str, Any], name: str, value: Any) -> bool:
    """True for a rotary field of a model without rotary positions, if dropping it loses nothing."""
    rotary = PositionsConfig.spread(model.get("positions"))["kind"] == "rotary"
    return not rotary and name in MEANT_NOTHING and MEANT_NOTHING[name] in (None, value)


def _put(tree: dict[str, Any], old: str, dotted: str, value: Any) -> None:
    *sections, name = dotted.split(".")
    where = "config"
    for section in sections:
        where += f".{section}"
        if not isinstance(tree.get(section), dict | str | None):
            raise ConfigError(f"{where}: {shown(tree[section])} is not a section of fields")
        if not isinstance(tree.get(section), dict):
            tree[section] = GROUPS[section].spread(tree.get(section)) if section in GROUPS else {}
        tree = tree[section]
    if name in tree:
        raise ConfigError(_twice(old, value, dotted))
    tree[name] = value


def _twice(old: str, value: Any, new: str) -> str:
    return f"config.{old}: {shown(value)}; it is config.{new} now, which is given as well"

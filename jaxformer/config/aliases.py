"""Field names of earlier versions, which config files, overrides and manifests may still use, and today's names."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config.attention import IMPLEMENTATIONS, AttentionConfig
from jaxformer.config.choice import Choice
from jaxformer.config.feed_forward import FeedForwardConfig
from jaxformer.config.fields import shown
from jaxformer.config.positions import PositionsConfig
from jaxformer.errors import ConfigError

# Until 0.1: old field -> new field.
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


def rename(dotted: str, text: str) -> str:
    """Today's name of the field of an override, as in "model.num_heads", whose value is `text`."""
    if dotted == "model.attention" and text in IMPLEMENTATIONS:
        return "execution.attention"
    return ALIASES.get(dotted, dotted)


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
    for old, new in ALIASES.items():
        section, _, name = old.partition(".")
        mapping = tree.get(section)
        if isinstance(mapping, dict) and name in mapping:
            value = mapping.pop(name)
            if not _means_nothing(mapping, name, value):
                _put(tree, old, new, value)


def _bert(model: dict[str, Any]) -> None:
    """Moves token_types and next_sentence, which every model had, into the section `bert` of models that use them."""
    names = ("token_types", "next_sentence")
    if any(name in model for name in names):
        found = {name: model.pop(name, False if name == "next_sentence" else 0) for name in names}
        bert = model.get("bert") or {}
        for name in names:
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
    for section in sections:
        if not isinstance(tree.get(section), dict | str | None):
            raise ConfigError(f"config.{section}: {shown(tree[section])} is not a section of fields")
        if not isinstance(tree.get(section), dict):
            tree[section] = GROUPS[section].spread(tree.get(section)) if section in GROUPS else {}
        tree = tree[section]
    if name in tree:
        raise ConfigError(_twice(old, value, dotted))
    tree[name] = value


def _twice(old: str, value: Any, new: str) -> str:
    return f"config.{old}: {shown(value)}; it is config.{new} now, which is given as well"

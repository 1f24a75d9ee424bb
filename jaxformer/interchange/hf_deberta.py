"""DeBERTa v2 and v3 (He et al. 2021, 2023): BERT's layers with a table of distances and projections of it."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.interchange import hf_bert
from jaxformer.interchange.foreign import TABLE, VECTOR, Fields, Foreign, Place, place
from jaxformer.interchange.task_heads import heads

TERMS = {frozenset(("c2p", "p2c")): "both", frozenset(("c2p",)): "c2p", frozenset(("p2c",)): "p2c"}
# Field -> what its class has where it is left out, and the one value that ours can be.
FIXED = {"relative_attention": (False, True), "position_biased_input": (True, False), "conv_kernel_size": (0, 0)}
HEAD = "cls.predictions."


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section. `legacy` is not asked for: published files do not say which names their head has."""
    fields = Fields(found)
    for name, (usual, wanted) in FIXED.items():
        if (value := fields.get(name, usual)) != wanted:
            raise ConfigError(f"config.json: {name}: {value!r}; accepted: {wanted!r}")
    width = fields.number("hidden_size")
    fields.only("embedding_size", width)
    heads = fields.number("num_attention_heads")
    if heads >= 1 and width % heads == 0:
        fields.only("attention_head_size", width // heads)
    made = hf_bert.read_config({"type_vocab_size": 0, "layer_norm_eps": 1e-7, **found}, ())
    return {**made, "positions": _positions(fields)}


def _positions(fields: Fields) -> dict[str, Any]:
    found = fields.get("pos_att_type", [])
    parts = found.split("|") if isinstance(found, str) else found if isinstance(found, list) else []
    types = frozenset(str(part).strip().lower() for part in parts)
    if types not in TERMS:
        raise ConfigError(f"config.json: pos_att_type: {found!r}; accepted: c2p, p2c, or both")
    norm = fields.only("norm_rel_ebd", "none", "layer_norm")
    farthest, span = fields.number("max_relative_positions", -1), fields.number("position_buckets", -1)
    if farthest < 1:
        farthest = fields.number("max_position_embeddings")
    if span > 0 and (span % 2 or span < 4):
        raise ConfigError(f"config.json: position_buckets: {span}; accepted: even numbers from 4 on, or -1")
    return {
        "kind": "disentangled", "terms": TERMS[types], "norm": norm == "layer_norm",
        "shared_projections": bool(fields.get("share_att_key", False)),
        **({"distance": "log", "span": span, "max_distance": farthest} if span > 0 else
           {"distance": "clipped", "span": farthest}),
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    kind, log = cfg.positions, cfg.positions.distance == "log"
    return {
        **hf_bert.write_config(cfg), **{name: wanted for name, (_, wanted) in FIXED.items()},
        "pos_att_type": ["c2p", "p2c"] if kind.terms == "both" else [kind.terms],
        "norm_rel_ebd": "layer_norm" if kind.norm else "none", "share_att_key": kind.shared_projections,
        "position_buckets": kind.span if log else -1,
        "max_relative_positions": kind.max_distance if log else kind.span,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """No absolute positions; queries, keys and values have names of their own."""
    found = {
        ours: each._replace(name=_today(each.name))
        for ours, each in hf_bert.places(cfg).items()
        if ours != "embedding.positions"
    }
    encoder, kind = "deberta.encoder.", cfg.positions
    found["embedding.distances"] = place(f"{encoder}rel_embeddings.weight", TABLE)
    if kind.norm:
        found["embedding.distance_scale"] = place(f"{encoder}LayerNorm.weight", VECTOR)
        found["embedding.distance_bias"] = place(f"{encoder}LayerNorm.bias", VECTOR)
    if not kind.shared_projections:
        for name, term in (("key", "c2p"), ("query", "p2c")):
            if kind.terms in ("both", term):
                theirs, ours = f"{encoder}layer.{{layer}}.attention.self.pos_{name}_proj", "blocks.attention.positions."
                found[f"{ours}w_{name}"] = place(f"{theirs}.weight", "(h k) d -> d h k")
                found[f"{ours}b_{name}"] = place(f"{theirs}.bias", "(h k) -> h k")
    return found


def _today(name: str) -> str:
    """BERT's name of a tensor as DeBERTa's."""
    for part in ("query", "key", "value"):
        name = name.replace(f"self.{part}.", f"self.{part}_proj.")
    return name.replace("bert.", "deberta.", 1) if name.startswith("bert.") else name


DEBERTA = Foreign(
    "bert", lambda cfg: "DebertaV2ForMaskedLM", "", (), read_config, write_config, places,
    left_out=(
        "pooler.dense.weight", "pooler.dense.bias", "deberta.embeddings.position_ids",
        "deberta.embeddings.position_embeddings.weight",
        # Of v3's other objective, which detects replaced tokens.
        *(f"mask_predictions.{each}.{kind}" for each in ("dense", "LayerNorm", "classifier")
          for kind in ("weight", "bias")),
    ),
    copies={f"{HEAD}decoder.weight": "embedding.tokens", f"{HEAD}decoder.bias": "head.bias"},
    heads=heads("DebertaV2", pooler="pooler.dense", activation="pooler_hidden_act"),
    # The head of Microsoft's own files.
    old_names={
        "lm_predictions.lm_head.bias": f"{HEAD}bias",
        **{f"lm_predictions.lm_head.{each}.{kind}": f"{HEAD}transform.{each}.{kind}"
           for each in ("dense", "LayerNorm") for kind in ("weight", "bias")},
    },
)  # fmt: skip

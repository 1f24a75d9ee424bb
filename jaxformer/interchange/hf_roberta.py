"""RoBERTa and DistilBERT (Liu et al. 2019; Sanh et al. 2019): BERT's layers under other names."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange import hf_bert
from jaxformer.interchange.foreign import TABLE, TRANSPOSED, VECTOR, Fields, Foreign, Place, place
from jaxformer.interchange.task_heads import heads


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section; the table of positions begins with rows up to that of padding, which none has."""
    fields = Fields(found)
    offset = fields.number("pad_token_id", 1) + 1
    made = hf_bert.read_config(found, ())
    return {
        **made, "context_length": made["context_length"] - offset,
        "positions": {"kind": "learned", "offset": offset},
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    offset = cfg.positions.offset
    rows = cfg.context_length + offset
    return {**hf_bert.write_config(cfg), "max_position_embeddings": rows, "pad_token_id": offset - 1}


def places(cfg: ModelConfig) -> dict[str, Place]:
    """The head has names of its own."""
    found = {
        ours: each._replace(name=each.name.replace("bert.", "roberta.", 1))
        for ours, each in hf_bert.places(cfg).items()
        if not ours.startswith("head.")
    }
    return {**found, **_head("lm_head.dense", "lm_head.layer_norm", "lm_head")}


def _head(dense: str, norm: str, bias: str) -> dict[str, Place]:
    return {
        "head.w": place(f"{dense}.weight", TRANSPOSED), "head.b": place(f"{dense}.bias", VECTOR),
        "head.norm.scale": place(f"{norm}.weight", VECTOR), "head.norm.bias": place(f"{norm}.bias", VECTOR),
        "head.bias": place(f"{bias}.bias", VECTOR),
    }  # fmt: skip


def read_distilbert(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields = Fields(found)
    fields.only("tie_word_embeddings", True)
    return {
        "family": "bert", "block": "post_norm", "num_layers": fields.number("n_layers"), "width": fields.number("dim"),
        "context_length": fields.number("max_position_embeddings"), "vocab_size": fields.number("vocab_size"),
        "attention": {
            "num_heads": fields.number("n_heads"), "dropout": fields.rate("attention_dropout", 0.1),
        },
        "feed_forward": {
            "width": fields.number("hidden_dim"),
            "activation": hf_bert.ACTIVATIONS[fields.only("activation", *hf_bert.ACTIVATIONS)],
        },
        "bert": None, "norm_epsilon": 1e-12, "dropout": fields.rate("dropout", 0.1),
    }  # fmt: skip


def write_distilbert(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    known = {ours: name for name, ours in hf_bert.ACTIVATIONS.items()}
    return {
        "n_layers": cfg.num_layers, "dim": cfg.width, "max_position_embeddings": cfg.context_length,
        "vocab_size": cfg.vocab_size, "n_heads": cfg.attention.num_heads, "attention_dropout": cfg.attention.dropout,
        "hidden_dim": cfg.feed_forward.hidden_width(cfg.width), "activation": known[cfg.feed_forward.activation],
        "dropout": cfg.dropout, "sinusoidal_pos_embds": False, "tie_weights_": True, "tie_word_embeddings": True,
    }  # fmt: skip


def places_distilbert(cfg: ModelConfig) -> dict[str, Place]:
    """No types, no pooler."""
    layer, outside = "distilbert.transformer.layer.{layer}.", "distilbert.embeddings."
    found = {
        "embedding.tokens": place(f"{outside}word_embeddings.weight", TABLE),
        "embedding.positions": place(f"{outside}position_embeddings.weight", TABLE),
        "blocks.attention.w_out": place(f"{layer}attention.out_lin.weight", "d (h k) -> h k d"),
        "blocks.attention.b_out": place(f"{layer}attention.out_lin.bias", VECTOR),
        **_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    }  # fmt: skip
    for name in ("query", "key", "value"):
        found[f"blocks.attention.w_{name}"] = place(f"{layer}attention.{name[0]}_lin.weight", "(h k) d -> d h k")
        found[f"blocks.attention.b_{name}"] = place(f"{layer}attention.{name[0]}_lin.bias", "(h k) -> h k")
    for ours, theirs in (("up", "lin1"), ("down", "lin2")):
        found[f"blocks.mlp.w_{ours}"] = place(f"{layer}ffn.{theirs}.weight", TRANSPOSED)
        found[f"blocks.mlp.b_{ours}"] = place(f"{layer}ffn.{theirs}.bias", VECTOR)
    for ours, theirs in (
        ("embedding_norm", f"{outside}LayerNorm"), ("blocks.attention_norm", f"{layer}sa_layer_norm"),
        ("blocks.mlp_norm", f"{layer}output_layer_norm"),
    ):  # fmt: skip
        found |= {f"{ours}.scale": place(f"{theirs}.weight", VECTOR), f"{ours}.bias": place(f"{theirs}.bias", VECTOR)}
    return found


ROBERTA = Foreign(
    "bert", lambda cfg: "RobertaForMaskedLM", "", (), read_config, write_config, places,
    # Files of RoBERTa hold a pooler, which nothing trained: there is no next-sentence head.
    left_out=("roberta.embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
    copies={"lm_head.decoder.weight": "embedding.tokens", "lm_head.decoder.bias": "head.bias"},
    heads=heads("Roberta", pooler="classifier.dense", sequence="classifier.out_proj"),
)  # fmt: skip
DISTILBERT = Foreign(
    "bert", lambda cfg: "DistilBertForMaskedLM", "", (), read_distilbert, write_distilbert, places_distilbert,
    copies={"vocab_projector.weight": "embedding.tokens"},
    heads=heads("DistilBert", pooler="pre_classifier", activation="relu"),
)  # fmt: skip

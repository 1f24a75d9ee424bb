"""BERT (Devlin et al. 2019): transformers' names and fields, with or without the next-sentence head."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange.foreign import TABLE, TRANSPOSED, VECTOR, Fields, Foreign, Place, place
from jaxformer.interchange.task_heads import heads

ACTIVATIONS = {"gelu": "gelu"}  # the head's transform has the same, and ours is always that


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section; whether there is a next-sentence head, the tensors say."""
    fields = Fields(found)
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    fields.only("tie_word_embeddings", True)
    return {
        "family": "bert", "block": "post_norm", "num_layers": fields.number("num_hidden_layers"),
        "width": fields.number("hidden_size"), "context_length": fields.number("max_position_embeddings"),
        "vocab_size": fields.number("vocab_size"),
        "attention": {
            "num_heads": fields.number("num_attention_heads"),
            "dropout": fields.rate("attention_probs_dropout_prob", 0.1),
        },
        "feed_forward": {
            "width": fields.number("intermediate_size"),
            "activation": ACTIVATIONS[fields.only("hidden_act", *ACTIVATIONS)],
        },
        "bert": {
            "token_types": fields.number("type_vocab_size", 2),
            "next_sentence": "cls.seq_relationship.weight" in names,
        },
        "norm_epsilon": fields.number("layer_norm_eps", 1e-12),
        "dropout": fields.rate("hidden_dropout_prob", 0.1),
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    known = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "num_hidden_layers": cfg.num_layers, "hidden_size": cfg.width, "max_position_embeddings": cfg.context_length,
        "vocab_size": cfg.vocab_size, "num_attention_heads": cfg.attention.num_heads,
        "intermediate_size": cfg.feed_forward.hidden_width(cfg.width),
        "hidden_act": known[cfg.feed_forward.activation], "type_vocab_size": cfg.token_types,
        "layer_norm_eps": cfg.norm_epsilon, "attention_probs_dropout_prob": cfg.attention.dropout,
        "hidden_dropout_prob": cfg.dropout, "tie_word_embeddings": True,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Their norms are inside the modules whose output they follow."""
    layer, head = "bert.encoder.layer.{layer}.", "cls.predictions."
    found = {
        "embedding.tokens": place("bert.embeddings.word_embeddings.weight", TABLE),
        "embedding.positions": place("bert.embeddings.position_embeddings.weight", TABLE),
        "blocks.attention.w_out": place(f"{layer}attention.output.dense.weight", "d (h k) -> h k d"),
        "blocks.attention.b_out": place(f"{layer}attention.output.dense.bias", VECTOR),
        "head.bias": place(f"{head}bias", VECTOR),
    }
    if cfg.token_types:
        found["embedding.types"] = place("bert.embeddings.token_type_embeddings.weight", TABLE)
    for name in ("query", "key", "value"):
        found[f"blocks.attention.w_{name}"] = place(f"{layer}attention.self.{name}.weight", "(h k) d -> d h k")
        found[f"blocks.attention.b_{name}"] = place(f"{layer}attention.self.{name}.bias", "(h k) -> h k")
    linear = {
        "blocks.mlp.{}_up": f"{layer}intermediate.dense", "blocks.mlp.{}_down": f"{layer}output.dense",
        "head.{}": f"{head}transform.dense",
    }  # fmt: skip
    if cfg.next_sentence:
        linear |= {"pooler.{}": "bert.pooler.dense", "next_sentence.{}": "cls.seq_relationship"}
    for ours, theirs in linear.items():
        found[ours.format("w")] = place(f"{theirs}.weight", TRANSPOSED)
        found[ours.format("b")] = place(f"{theirs}.bias", VECTOR)
    norms = {
        "embedding_norm": "bert.embeddings", "blocks.attention_norm": f"{layer}attention.output",
        "blocks.mlp_norm": f"{layer}output", "head.norm": f"{head}transform",
    }  # fmt: skip
    for ours, theirs in norms.items():
        found[f"{ours}.scale"] = place(f"{theirs}.LayerNorm.weight", VECTOR)
        found[f"{ours}.bias"] = place(f"{theirs}.LayerNorm.bias", VECTOR)
    return found


BERT = Foreign(
    "bert", lambda cfg: "BertForPreTraining" if cfg.next_sentence else "BertForMaskedLM", "", (), read_config,
    write_config, places,
    # A pooler without the next-sentence head learned nothing.
    left_out=("bert.embeddings.position_ids", "bert.pooler.dense.weight", "bert.pooler.dense.bias"),
    copies={"cls.predictions.decoder.weight": "embedding.tokens", "cls.predictions.decoder.bias": "head.bias"},
    heads=heads("Bert", pooler="bert.pooler.dense"),
)  # fmt: skip

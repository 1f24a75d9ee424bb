"""GPT-NeoX (Black et al. 2022), as Pythia is: heads turned in part, attention beside feed-forward."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange.foreign import TABLE, TRANSPOSED, VECTOR, Fields, Foreign, Place, place
from jaxformer.interchange.rotary_fields import read_rotary, write_rotary

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu"}
HEAD = "embed_out.weight"


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields = Fields(found)
    fields.only("attention_bias", True)
    return {
        "family": "gpt", "num_layers": fields.number("num_hidden_layers"), "width": fields.number("hidden_size"),
        "context_length": fields.number("max_position_embeddings"), "vocab_size": fields.number("vocab_size"),
        "attention": {
            "num_heads": fields.number("num_attention_heads"), "dropout": fields.rate("attention_dropout", 0.0),
        },
        "feed_forward": {
            "width": fields.number("intermediate_size"),
            "activation": ACTIVATIONS[fields.only("hidden_act", *ACTIVATIONS)],
        },
        "positions": read_rotary(fields, partial=0.25), "norm_epsilon": fields.number("layer_norm_eps", 1e-5),
        "block": "parallel_norms" if fields.get("use_parallel_residual", True) else "pre_norm",
        "dropout": fields.rate("hidden_dropout", 0.0),
        "tie_embeddings": bool(fields.get("tie_word_embeddings", False)),
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    known = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "num_hidden_layers": cfg.num_layers, "hidden_size": cfg.width, "max_position_embeddings": cfg.context_length,
        "vocab_size": cfg.vocab_size, "num_attention_heads": cfg.attention.num_heads, "attention_bias": True,
        "intermediate_size": cfg.feed_forward.hidden_width(cfg.width), "hidden_act": known[cfg.feed_forward.activation],
        "layer_norm_eps": cfg.norm_epsilon, "use_parallel_residual": cfg.block == "parallel_norms",
        "attention_dropout": cfg.attention.dropout, "hidden_dropout": cfg.dropout,
        "tie_word_embeddings": cfg.tie_embeddings, **write_rotary(cfg, partial=True),
        "rotary_pct": cfg.positions.fraction, "rotary_emb_base": cfg.positions.base,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Queries, keys and values of each head lie together."""
    layer = "layers.{layer}."
    found = {"embedding.tokens": place("embed_in.weight", TABLE)}
    for number, name in enumerate(("query", "key", "value")):
        theirs = f"{layer}attention.query_key_value"
        found[f"blocks.attention.w_{name}"] = place(f"{theirs}.weight", f"(h {number}/3 k) d -> d h k")
        found[f"blocks.attention.b_{name}"] = place(f"{theirs}.bias", f"(h {number}/3 k) -> h k")
    for ours, theirs, pattern in (
        ("attention.{}_out", "attention.dense", "d (h k) -> h k d"),
        ("mlp.{}_up", "mlp.dense_h_to_4h", TRANSPOSED), ("mlp.{}_down", "mlp.dense_4h_to_h", TRANSPOSED),
    ):  # fmt: skip
        found[f"blocks.{ours.format('w')}"] = place(f"{layer}{theirs}.weight", pattern)
        found[f"blocks.{ours.format('b')}"] = place(f"{layer}{theirs}.bias", VECTOR)
    for ours, theirs in (
        ("blocks.attention_norm", f"{layer}input_layernorm"), ("blocks.mlp_norm", f"{layer}post_attention_layernorm"),
        ("final_norm", "final_layer_norm"),
    ):  # fmt: skip
        found |= {f"{ours}.scale": place(f"{theirs}.weight", VECTOR), f"{ours}.bias": place(f"{theirs}.bias", VECTOR)}
    return found if cfg.tie_embeddings else {**found, "head.table": place(HEAD, TABLE)}


NEOX = Foreign(
    "gpt", lambda cfg: "GPTNeoXForCausalLM", "gpt_neox.", (HEAD,), read_config, write_config, places,
    left_out=tuple(f"layers.{{layer}}.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    copies={HEAD: "embedding.tokens"},
)  # fmt: skip

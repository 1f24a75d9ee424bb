"""GPT-2 (Radford et al. 2019): transformers' names and fields."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange.foreign import TABLE, VECTOR, Fields, Foreign, Place, place
from jaxformer.interchange.task_heads import causal_heads

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_PLAIN = "i o -> i o"  # its linear layers keep inputs first, as ours do


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields = Fields(found)
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    width = fields.number("n_embd")
    return {
        "family": "gpt", "num_layers": fields.number("n_layer"), "width": width,
        "context_length": fields.number("n_positions"), "vocab_size": fields.number("vocab_size"),
        "attention": {"num_heads": fields.number("n_head"), "dropout": fields.rate("attn_pdrop", 0.1)},
        "feed_forward": {
            "width": fields.get("n_inner", 4 * width),
            "activation": ACTIVATIONS[fields.only("activation_function", *ACTIVATIONS)],
        },
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5), "dropout": fields.rate("resid_pdrop", 0.1),
        "tie_embeddings": bool(fields.get("tie_word_embeddings", True)),
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    known = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "n_layer": cfg.num_layers, "n_embd": cfg.width, "n_positions": cfg.context_length, "n_ctx": cfg.context_length,
        "vocab_size": cfg.vocab_size, "n_head": cfg.attention.num_heads,
        "n_inner": cfg.feed_forward.hidden_width(cfg.width), "activation_function": known[cfg.feed_forward.activation],
        "layer_norm_epsilon": cfg.norm_epsilon, "tie_word_embeddings": cfg.tie_embeddings,
        "attn_pdrop": cfg.attention.dropout, "resid_pdrop": cfg.dropout, "embd_pdrop": cfg.dropout,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Queries, keys and values are three parts of one matrix."""
    layer = "h.{layer}."
    found = {
        "embedding.tokens": place("wte.weight", TABLE),
        "embedding.positions": place("wpe.weight", TABLE),
        "blocks.attention.w_out": place(f"{layer}attn.c_proj.weight", "(h k) d -> h k d"),
        "blocks.attention.b_out": place(f"{layer}attn.c_proj.bias", VECTOR),
        "blocks.mlp.w_up": place(f"{layer}mlp.c_fc.weight", _PLAIN),
        "blocks.mlp.b_up": place(f"{layer}mlp.c_fc.bias", VECTOR),
        "blocks.mlp.w_down": place(f"{layer}mlp.c_proj.weight", _PLAIN),
        "blocks.mlp.b_down": place(f"{layer}mlp.c_proj.bias", VECTOR),
    }
    for number, name in enumerate(("query", "key", "value")):
        found[f"blocks.attention.w_{name}"] = place(f"{layer}attn.c_attn.weight", f"d ({number}/3 h k) -> d h k")
        found[f"blocks.attention.b_{name}"] = place(f"{layer}attn.c_attn.bias", f"({number}/3 h k) -> h k")
    for ours, theirs in (
        ("blocks.attention_norm", f"{layer}ln_1"),
        ("blocks.mlp_norm", f"{layer}ln_2"),
        ("final_norm", "ln_f"),
    ):
        found |= {f"{ours}.scale": place(f"{theirs}.weight", VECTOR), f"{ours}.bias": place(f"{theirs}.bias", VECTOR)}
    return found if cfg.tie_embeddings else {**found, "head.table": place("lm_head.weight", TABLE)}


GPT2 = Foreign(
    "gpt", lambda cfg: "GPT2LMHeadModel", "transformer.", ("lm_head.weight",), read_config, write_config, places,
    left_out=("h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"), copies={"lm_head.weight": "embedding.tokens"},
    heads=causal_heads("GPT2"),
)  # fmt: skip

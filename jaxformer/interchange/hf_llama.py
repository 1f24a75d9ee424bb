"""Llama and those that share its names: Mistral, Qwen 2 and 3 (Touvron et al. 2023; Grattafiori et al. 2024; Jiang et
al. 2023; Yang et al. 2024, 2025)."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange.foreign import TABLE, TRANSPOSED, VECTOR, Fields, Foreign, Place, place
from jaxformer.interchange.rotary_fields import FULL, SLIDING, read_layers, read_rotary, write_layers, write_rotary
from jaxformer.interchange.task_heads import causal_heads

HEAD = "lm_head.weight"
WINDOW = 4096  # of a Mistral whose file does not name one
LEFT_OUT = ("layers.{layer}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields, kind = Fields(found), found.get("model_type")
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return {
        **read_sizes(fields), "tie_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "attention": {
            **read_heads(fields, 128 if kind == "qwen3" else None), **_windows(fields, kind),
            "qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2",
        },
        "feed_forward": {"width": fields.number("intermediate_size"), "activation": _gated(fields)},
        "positions": read_rotary(fields), "norm": "rms_norm",
    }  # fmt: skip


def read_sizes(fields: Fields, epsilon: float = 1e-6) -> dict[str, Any]:
    """What all that share these fields have in common; `epsilon`: of the norms where no field says it."""
    return {
        "family": "gpt", "num_layers": fields.number("num_hidden_layers"), "width": fields.number("hidden_size"),
        "context_length": fields.number("max_position_embeddings"), "vocab_size": fields.number("vocab_size"),
        "norm_epsilon": fields.number("rms_norm_eps", epsilon), "use_bias": False,
    }  # fmt: skip


def read_heads(fields: Fields, usual_width: int | None = None) -> dict[str, Any]:
    """Of our `attention` section, the heads; `usual_width` of each where no field says it; None: that of the model."""
    heads = fields.number("num_attention_heads")
    return {
        "num_heads": heads, "num_kv_heads": fields.get("num_key_value_heads", heads),
        "head_width": fields.get("head_dim", usual_width), "dropout": fields.rate("attention_dropout", 0.0),
    }  # fmt: skip


def _windows(fields: Fields, kind: str | None) -> dict[str, Any]:
    if kind == "mistral":
        return {"window": fields.given("sliding_window", WINDOW)}
    if kind not in ("qwen2", "qwen3") or not fields.get("use_sliding_window", False):
        return {}
    first, layers = fields.get("max_window_layers", 28), fields.number("num_hidden_layers")
    types = fields.get("layer_types", [SLIDING if number >= first else FULL for number in range(layers)])
    return read_layers(fields.get("sliding_window", 4096), types)


def _gated(fields: Fields) -> str:
    fields.only("hidden_act", "silu", "swish")
    return "swiglu"


def write_sizes(cfg: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_sizes` and `read_heads`."""
    return {
        "num_hidden_layers": cfg.num_layers, "hidden_size": cfg.width, "max_position_embeddings": cfg.context_length,
        "vocab_size": cfg.vocab_size, "num_attention_heads": cfg.attention.num_heads,
        "num_key_value_heads": cfg.attention.kv_heads, "head_dim": cfg.head_size,
        "intermediate_size": cfg.feed_forward.hidden_width(cfg.width), "rms_norm_eps": cfg.norm_epsilon,
        "tie_word_embeddings": cfg.tie_embeddings, "attention_bias": False, "attention_dropout": cfg.attention.dropout,
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    window: dict[str, Any] = {}
    if cfg.attention.window is not None:
        window = {
            "sliding_window": cfg.attention.window, "use_sliding_window": True, "max_window_layers": 0,
            "layer_types": write_layers(cfg),
        }  # fmt: skip
    return {**write_sizes(cfg), "hidden_act": "silu", **write_rotary(cfg), **window}


def write_mistral(cfg: ModelConfig) -> dict[str, Any]:
    """The same, and that there is no window, which would be one of WINDOW if it were not said."""
    return {"sliding_window": None, **write_config(cfg)}


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Their matrices have outputs first."""
    layer = "layers.{layer}."
    found = {
        **outer(cfg),
        "blocks.attention_norm.scale": place(f"{layer}input_layernorm.weight", VECTOR),
        "blocks.mlp_norm.scale": place(f"{layer}post_attention_layernorm.weight", VECTOR),
    }
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        found[f"blocks.attention.w_{ours}"] = place(f"{layer}self_attn.{theirs}_proj.weight", "(h k) d -> d h k")
        if cfg.attention.qkv_bias:
            found[f"blocks.attention.b_{ours}"] = place(f"{layer}self_attn.{theirs}_proj.bias", "(h k) -> h k")
    for name in ("up", "gate"):
        found[f"blocks.mlp.w_{name}"] = place(f"{layer}mlp.{name}_proj.weight", TRANSPOSED)
    if cfg.attention.qk_norm:
        for ours, theirs in (("query", "q"), ("key", "k")):
            found[f"blocks.attention.{ours}_scale"] = place(f"{layer}self_attn.{theirs}_norm.weight", VECTOR)
    return found


def outer(cfg: ModelConfig) -> dict[str, Place]:
    """Tables, the last norm and what goes back to the residual stream."""
    found = {
        "embedding.tokens": place("embed_tokens.weight", TABLE),
        "blocks.attention.w_out": place("layers.{layer}.self_attn.o_proj.weight", "d (h k) -> h k d"),
        "blocks.mlp.w_down": place("layers.{layer}.mlp.down_proj.weight", TRANSPOSED),
        "final_norm.scale": place("norm.weight", VECTOR),
    }
    return found if cfg.tie_embeddings else {**found, "head.table": place(HEAD, TABLE)}


# Those that differ from Llama in what they read, write or where something lies name it.
like = functools.partial(
    Foreign, "gpt", prefix="model.", outside=(HEAD,), read_config=read_config, write_config=write_config,
    places=places, left_out=LEFT_OUT, copies={HEAD: "embedding.tokens"},
)  # fmt: skip
LLAMA = like(lambda cfg: "LlamaForCausalLM", heads=causal_heads("Llama"))
MISTRAL = like(lambda cfg: "MistralForCausalLM", write_config=write_mistral, heads=causal_heads("Mistral"))
QWEN2 = like(lambda cfg: "Qwen2ForCausalLM", heads=causal_heads("Qwen2"))
QWEN3 = like(lambda cfg: "Qwen3ForCausalLM", heads=causal_heads("Qwen3"))

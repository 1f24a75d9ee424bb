"""Mixtures of experts in the shape of Llama: Mixtral, Qwen3-MoE and OLMoE (Jiang et al. 2024; Yang et al. 2025;
Muennighoff et al. 2024). Their losses of balance are one for all layers together; ours has its weight from there."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange import hf_llama
from jaxformer.interchange.foreign import TRANSPOSED, Fields, Place, place
from jaxformer.interchange.rotary_fields import read_rotary, write_rotary

OF_LAYER = "layers.{layer}."
NAMES = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
MIXTRAL_NAMES = {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields, kind = Fields(found), found.get("model_type")
    fields.only("attention_bias", False)
    fields.only("hidden_act", "silu", "swish")
    fields.only("clip_qkv", None)
    fields.only("router_jitter_noise", 0.0)
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    fields.only("use_sliding_window", False)
    window = fields.get("sliding_window") if kind == "mixtral" else None
    count = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    top_k = fields.number("num_experts_per_tok", 2 if kind == "mixtral" else 8)
    return {
        **hf_llama.read_sizes(fields, 1e-6 if kind == "qwen3_moe" else 1e-5),
        "tie_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "attention": {
            **hf_llama.read_heads(fields), "window": window, "qk_norm": kind != "mixtral",
            "joint_qk_norm": kind == "olmoe",
        },
        "feed_forward": {
            "kind": "experts", "width": fields.number(width), "activation": "swiglu", "count": fields.number(count),
            "top_k": top_k, "renormalize": kind == "mixtral" or bool(fields.get("norm_topk_prob", False)),
            "balance": fields.rate("router_aux_loss_coef", 0.01 if kind == "olmoe" else 0.001), "z_loss": 0.0,
        },
        "positions": read_rotary(fields, 1e6 if kind == "mixtral" else 1e4), "norm": "rms_norm",
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json, with the fields of all three."""
    kind, hidden = cfg.feed_forward, cfg.feed_forward.hidden_width(cfg.width)
    window: dict[str, Any] = {} if cfg.attention.window is None else {"sliding_window": cfg.attention.window}
    return {
        **hf_llama.write_sizes(cfg), **write_rotary(cfg), **window, "hidden_act": "silu",
        "moe_intermediate_size": hidden, "num_experts": kind.count, "num_local_experts": kind.count,
        "num_experts_per_tok": kind.top_k, "norm_topk_prob": kind.normalized,
        "router_aux_loss_coef": kind.balance_weight, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _places(cfg: ModelConfig, inside: str, names: Mapping[str, str]) -> dict[str, Place]:
    found = hf_llama.places(cfg)
    found["blocks.mlp.w_router"] = place(f"{OF_LAYER}{inside}.gate.weight", TRANSPOSED)
    for ours, theirs in names.items():
        name = f"{OF_LAYER}{inside}.experts.{{expert}}.{theirs}.weight"
        found[f"blocks.mlp.{ours}"] = place(name, TRANSPOSED)
    if cfg.attention.joint_qk_norm:
        for ours, theirs in (("query", "q"), ("key", "k")):
            found[f"blocks.attention.{ours}_scale"] = place(f"{OF_LAYER}self_attn.{theirs}_norm.weight", "(h k) -> h k")
    return found


def places(cfg: ModelConfig) -> dict[str, Place]:
    """One matrix for each expert."""
    return _places(cfg, "mlp", NAMES)


def mixtral_places(cfg: ModelConfig) -> dict[str, Place]:
    """The same under other names."""
    return _places(cfg, "block_sparse_moe", MIXTRAL_NAMES)


MIXTRAL = hf_llama.like(
    lambda cfg: "MixtralForCausalLM", read_config=read_config, write_config=write_config, places=mixtral_places
)
QWEN3_MOE = hf_llama.like(
    lambda cfg: "Qwen3MoeForCausalLM", read_config=read_config, write_config=write_config, places=places
)
OLMOE = hf_llama.like(lambda cfg: "OlmoeForCausalLM", read_config=read_config, write_config=write_config, places=places)

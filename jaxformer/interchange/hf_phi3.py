"""Phi-3 (Abdin et al. 2024): Llama with one matrix for queries, keys and values, and one for gate and up."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange import hf_llama
from jaxformer.interchange.foreign import TRANSPOSED, Fields, Place, place
from jaxformer.interchange.rotary_fields import only_unscaled, read_rotary, write_rotary


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields = Fields(found)
    fields.only("hidden_act", "silu", "swish")
    window = fields.get("sliding_window")
    made = hf_llama.read_sizes(fields, 1e-5)
    positions = read_rotary(fields, partial=1.0)
    only_unscaled(positions)
    return {
        **made, "tie_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "attention": {**hf_llama.read_heads(fields), "window": window},
        "feed_forward": {"width": fields.number("intermediate_size"), "activation": "swiglu"},
        "positions": positions, "norm": "rms_norm",
        "dropout": fields.rate("resid_pdrop", 0.0),
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    window: dict[str, Any] = {} if cfg.attention.window is None else {"sliding_window": cfg.attention.window}
    return {
        **hf_llama.write_sizes(cfg), "hidden_act": "silu", "resid_pdrop": cfg.dropout, "embd_pdrop": cfg.dropout,
        "original_max_position_embeddings": cfg.context_length, **write_rotary(cfg, partial=True), **window,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Parts of unequal size, one below the other."""
    layer, heads = "layers.{layer}.", cfg.attention
    found = hf_llama.places(cfg)
    starts = {"query": 0, "key": heads.num_heads, "value": heads.num_heads + heads.kv_heads}
    for name, start in starts.items():
        found[f"blocks.attention.w_{name}"] = place(
            f"{layer}self_attn.qkv_proj.weight", "(h k) d -> d h k", start * cfg.head_size
        )
    hidden = cfg.feed_forward.hidden_width(cfg.width)
    for name, start in (("gate", 0), ("up", hidden)):
        found[f"blocks.mlp.w_{name}"] = place(f"{layer}mlp.gate_up_proj.weight", TRANSPOSED, start)
    return found


PHI3 = hf_llama.like(
    lambda cfg: "Phi3ForCausalLM", read_config=read_config, write_config=write_config, places=places
)  # fmt: skip

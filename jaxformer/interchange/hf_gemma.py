"""Gemma 1, 2 and 3 (Gemma team 2024, 2024, 2025; the text models): norms that multiply by 1 + w, scaled embeddings."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interchange import hf_llama
from jaxformer.interchange.foreign import VECTOR, Fields, Place, place
from jaxformer.interchange.rotary_fields import (
    FULL,
    SLIDING,
    read_layers,
    read_rotary,
    rope_of,
    rotary_of,
    write_layers,
    write_rotary,
)

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")  # the first files say gelu, and mean tanh
PATTERNS = {"gemma2": 2, "gemma3_text": 6}
BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields, kind = Fields(found), found["model_type"]
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    fields.only("hidden_activation" if fields.get("hidden_activation") else "hidden_act", *ACTIVATIONS)
    attention = {**hf_llama.read_heads(fields), "head_width": fields.get("head_dim", 256)}
    made = {
        **hf_llama.read_sizes(fields), "tie_embeddings": bool(fields.get("tie_word_embeddings", True)),
        "attention": attention, "positions": read_rotary(fields) if kind != "gemma3_text" else {},
        "feed_forward": {"width": fields.number("intermediate_size"), "activation": "geglu_tanh"},
        "norm": "rms_norm_plus_one", "scale_embeddings": True,
    }  # fmt: skip
    if kind == "gemma":
        return made
    every, scalar = fields.get("sliding_window_pattern", PATTERNS[kind]), fields.number("query_pre_attn_scalar", 256)
    usual = [SLIDING if number % every else FULL for number in range(1, made["num_layers"] + 1)]
    attention |= {
        **read_layers(fields.get("sliding_window", 4096), fields.get("layer_types", usual)),
        "scale": None if scalar == attention["head_width"] else scalar**-0.5,
        "soft_cap": fields.get("attn_logit_softcapping"), "qk_norm": kind == "gemma3_text",
    }  # fmt: skip
    if kind == "gemma3_text":
        made["positions"] = _two_bases(fields, attention)
    return {**made, "block": "sandwich", "logit_soft_cap": fields.get("final_logit_softcapping")}


def _two_bases(fields: Fields, attention: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have a base of their own, and no scaling."""
    rope = fields.get("rope_parameters", {})
    rope = rope if rope.keys() & {FULL, SLIDING} else {FULL: rope or fields.get("rope_scaling", {})}
    bases = {FULL: fields.get("rope_theta", BASES[FULL]), SLIDING: fields.get("rope_local_base_freq", BASES[SLIDING])}
    whole, local = (rotary_of(rope.get(kind) or {}, bases[kind]) for kind in (FULL, SLIDING))
    if attention.get("window") is None:
        return whole
    return local if attention.get("global_every") is None else {**whole, "local_base": local["base"]}


def write_config(cfg: ModelConfig, kind: str) -> dict[str, Any]:
    """config.json."""
    common = {**hf_llama.write_sizes(cfg), "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
    if kind == "gemma":
        return {**common, **write_rotary(cfg)}
    scale = cfg.attention.scale
    common |= {
        "query_pre_attn_scalar": cfg.head_size if scale is None else round(scale**-2),
        "sliding_window": cfg.attention.window, "layer_types": write_layers(cfg),
        "attn_logit_softcapping": cfg.attention.soft_cap, "final_logit_softcapping": cfg.logit_soft_cap,
    }  # fmt: skip
    if kind == "gemma2":
        return {**common, **write_rotary(cfg)}
    positions = cfg.positions
    local = {"rope_type": "default", "rope_theta": positions.local_base or positions.base}
    return {
        **common, "rope_parameters": {FULL: rope_of(cfg), SLIDING: local}, "rope_theta": positions.base,
        "rope_local_base_freq": local["rope_theta"],
        **({} if positions.scaling == "none" else {"rope_scaling": rope_of(cfg)}),
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """As Llama's; with a norm before and after each sublayer from Gemma 2 on."""
    found = hf_llama.places(cfg)
    if cfg.block == "sandwich":
        for ours, theirs in (
            ("attention_norm", "input"), ("attention_out_norm", "post_attention"), ("mlp_norm", "pre_feedforward"),
            ("mlp_out_norm", "post_feedforward"),
        ):  # fmt: skip
            found[f"blocks.{ours}.scale"] = place(f"layers.{{layer}}.{theirs}_layernorm.weight", VECTOR)
    return found


def _like(architecture: str, kind: str) -> Any:
    return hf_llama.like(
        lambda cfg: architecture, read_config=read_config, write_config=functools.partial(write_config, kind=kind),
        places=places,
    )  # fmt: skip


GEMMA = _like("GemmaForCausalLM", "gemma")
GEMMA2 = _like("Gemma2ForCausalLM", "gemma2")
GEMMA3 = _like("Gemma3ForCausalLM", "gemma3_text")

"""Gemma 1, 2 and 3 (Gemma team 2024, 2024, 2025; the text models): norms that multiply by 1 + w, scaled embeddings."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
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

TANH = "gelu_pytorch_tanh"
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # of a Gemma 2 whose file does not name them
PATTERNS = {"gemma2": 2, "gemma3_text": 6}
BASES = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields, kind = Fields(found), found["model_type"]
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    if fields.get("hidden_activation"):
        fields.only("hidden_activation", TANH)
    if kind == "gemma" or not fields.get("hidden_activation"):
        fields.only("hidden_act", TANH, "gelu")  # the first files say gelu, and mean tanh
    attention = {**hf_llama.read_heads(fields), "head_width": fields.get("head_dim", 256)}
    made = {
        **hf_llama.read_sizes(fields), "tie_embeddings": bool(fields.get("tie_word_embeddings", True)),
        "attention": attention, "positions": read_rotary(fields) if kind != "gemma3_text" else {},
        "feed_forward": {"width": fields.number("intermediate_size"), "activation": "geglu_tanh"},
        "norm": "rms_norm_plus_one", "scale_embeddings": True,
    }  # fmt: skip
    if kind == "gemma":
        return made
    if kind == "gemma3_text":
        fields.only("attn_logit_softcapping", None)  # transformers reads it, and caps nothing
    caps = {name: fields.given(name, CAPS[name] if kind == "gemma2" else None) for name in CAPS}
    every, scalar = PATTERNS[kind], fields.number("query_pre_attn_scalar", 256)
    if kind == "gemma3_text":
        every = fields.number("sliding_window_pattern", every)
    if every < 1 or scalar <= 0:
        name, value = ("sliding_window_pattern", every) if every < 1 else ("query_pre_attn_scalar", scalar)
        raise ConfigError(f"config.json: {name}: {value}; accepted: above 0")
    usual = [SLIDING if number % every else FULL for number in range(1, made["num_layers"] + 1)]
    attention |= {
        **read_layers(fields.get("sliding_window", 4096), fields.get("layer_types", usual)),
        "scale": None if scalar == attention["head_width"] else scalar**-0.5,
        "soft_cap": caps["attn_logit_softcapping"], "qk_norm": kind == "gemma3_text",
    }  # fmt: skip
    if kind == "gemma3_text":
        made["positions"] = _two_bases(fields, attention)
    return {**made, "block": "sandwich", "logit_soft_cap": caps["final_logit_softcapping"]}


def _two_bases(fields: Fields, attention: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have a base of their own, and no scaling."""
    rope = fields.get("rope_parameters", {})
    if not isinstance(rope, Mapping) or (rope and not rope.keys() & {FULL, SLIDING}):
        raise ConfigError(f"config.json: rope_parameters: {rope!r}; accepted: one object for {FULL}, one for {SLIDING}")
    rope = {**rope, FULL: {**(rope.get(FULL) or {}), **(fields.get("rope_scaling") or {})}}
    bases = {FULL: fields.get("rope_theta", BASES[FULL]), SLIDING: fields.get("rope_local_base_freq", BASES[SLIDING])}
    whole, local = (rotary_of(rope.get(kind) or {}, bases[kind], fields) for kind in (FULL, SLIDING))
    if attention.get("window") is None:
        return whole
    if attention.get("global_every") is None:
        return local
    if "scaling" in local:
        raise ConfigError(f"config.json: rope_parameters.{SLIDING}: {rope[SLIDING]!r}; accepted: rope_type default")
    return {**whole, "local_base": local["base"]}


def write_config(cfg: ModelConfig, kind: str) -> dict[str, Any]:
    """config.json."""
    common = {**hf_llama.write_sizes(cfg), "hidden_activation": TANH, "hidden_act": TANH}
    if kind == "gemma":
        return {**common, **write_rotary(cfg)}
    scale = cfg.attention.scale
    common |= {
        "query_pre_attn_scalar": cfg.head_size if scale is None else round(scale**-2),
        # transformers opens none of them without a window, even if no layer has it.
        "sliding_window": cfg.attention.window or cfg.context_length, "layer_types": write_layers(cfg),
        "attn_logit_softcapping": cfg.attention.soft_cap if kind == "gemma2" else None,
        "final_logit_softcapping": cfg.logit_soft_cap,
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

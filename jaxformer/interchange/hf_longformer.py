"""Longformer (Beltagy et al. 2020): RoBERTa with a window, and projections of their own for global tokens.

Which tokens are global, callers say there (`global_attention_mask`); here the first of each document is, [CLS].
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.longformer import GLOBAL
from jaxformer.interchange import hf_roberta
from jaxformer.interchange.foreign import Fields, Foreign, Place, place
from jaxformer.interchange.task_heads import heads


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section; a list of windows has to name one for all layers."""
    window = Fields(found).get("attention_window", 512)
    if isinstance(window, list):
        layers = Fields(found).number("num_hidden_layers")
        if len(window) != layers:
            raise ConfigError(f"config.json: attention_window: {window}; accepted: one for each of {layers} layers")
        if len(set(map(str, window))) != 1:
            raise ConfigError(f"config.json: attention_window: {window}; accepted: the same in all layers")
        window = window[0]
    made = hf_roberta.read_config(found, names)
    about = {"kind": "longformer", "attention_window": window, "global_tokens": 1}
    return {**made, "attention": {**made["attention"], **about}}


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    return {
        **hf_roberta.write_config(cfg), "attention_window": [cfg.fitted_attention.attention_window] * cfg.num_layers,
        "sep_token_id": 2,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """RoBERTa's, and the projections of global tokens."""
    found = {
        ours: each._replace(name=each.name.replace("roberta.", "longformer.", 1))
        for ours, each in hf_roberta.places(cfg).items()
    }
    for name in ("query", "key", "value"):
        theirs = f"longformer.encoder.layer.{{layer}}.attention.self.{name}_global"
        found[f"blocks.attention.{GLOBAL}w_{name}"] = place(f"{theirs}.weight", "(h k) d -> d h k")
        found[f"blocks.attention.{GLOBAL}b_{name}"] = place(f"{theirs}.bias", "(h k) -> h k")
    return found


LONGFORMER = Foreign(
    "bert", lambda cfg: "LongformerForMaskedLM", "", (), read_config, write_config, places,
    left_out=tuple(name.replace("roberta.", "longformer.") for name in hf_roberta.ROBERTA.left_out),
    copies=hf_roberta.ROBERTA.copies,
    heads=heads("Longformer", pooler="classifier.dense", sequence="classifier.out_proj"),
)  # fmt: skip

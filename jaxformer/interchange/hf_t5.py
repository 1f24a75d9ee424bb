"""T5 v1.0 and v1.1 (Raffel et al. 2020; Shazeer 2020): two stacks, each with one table of biases by distance."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.functional.position_encodings import T5_BUCKETS
from jaxformer.interchange.foreign import TABLE, TRANSPOSED, VECTOR, Fields, Foreign, Place, place

ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"}
HEAD = "lm_head.weight"
LENGTH = 512  # of the texts that it was trained on; its positions have no end


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section. v1.0 has one table, and scales what goes to it; v1.1 mostly has two."""
    fields = Fields(found)
    fields.only("relative_attention_num_buckets", T5_BUCKETS)
    fields.only("relative_attention_max_distance", 128)
    inside = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}.get(
        fields.get("feed_forward_proj", "relu")
    )
    fields.only("dense_act_fn", inside)
    scaled = bool(fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True)))
    length = fields.get("n_positions", LENGTH)
    layers, dropout = fields.number("num_layers"), fields.rate("dropout_rate", 0.1)
    return {
        "family": "encoder_decoder", "num_layers": fields.get("num_decoder_layers", layers),
        "width": fields.number("d_model"), "vocab_size": fields.number("vocab_size"),
        "context_length": length,
        "encoder": {"num_layers": layers, "source_length": fields.get("source_length", length)},
        "attention": {
            "num_heads": fields.number("num_heads"), "head_width": fields.number("d_kv"), "scale": 1.0,
            "dropout": dropout,
        },
        "feed_forward": {
            "width": fields.number("d_ff"), "activation": ACTIVATIONS[fields.only("feed_forward_proj", *ACTIVATIONS)],
        },
        "positions": "t5", "norm": "rms_norm", "norm_epsilon": fields.number("layer_norm_epsilon", 1e-6),
        "use_bias": False, "dropout": dropout, "scale_output": scaled, "initializer": "t5",
        "tie_embeddings": scaled or HEAD not in names,
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    assert cfg.encoder is not None
    known = {ours: name for name, ours in ACTIVATIONS.items()}
    layers = cfg.num_layers if cfg.encoder.num_layers is None else cfg.encoder.num_layers
    return {
        "is_encoder_decoder": True, "num_layers": layers, "num_decoder_layers": cfg.num_layers, "d_model": cfg.width,
        "vocab_size": cfg.vocab_size, "n_positions": cfg.context_length, "source_length": cfg.encoder.source_length,
        "num_heads": cfg.attention.num_heads, "d_kv": cfg.head_size, "dropout_rate": cfg.dropout,
        "d_ff": cfg.feed_forward.hidden_width(cfg.width), "feed_forward_proj": known[cfg.feed_forward.activation],
        "layer_norm_epsilon": cfg.norm_epsilon, "relative_attention_num_buckets": T5_BUCKETS,
        "relative_attention_max_distance": 128, "tie_word_embeddings": cfg.tie_embeddings,
        "scale_decoder_outputs": cfg.scale_output,
    }  # fmt: skip


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Sublayers are numbered."""
    found = {"embedding.tokens": place("shared.weight", TABLE)}
    for ours, theirs in (("", "decoder"), ("encoder.", "encoder")):
        layer = f"{theirs}.block.{{layer}}.layer."
        table = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{ours}embedding.t5"] = place(table, "b h -> b h")
        found[f"{ours}final_norm.scale"] = place(f"{theirs}.final_layer_norm.weight", VECTOR)
        names = {"attention": "0.SelfAttention", "cross": "1.EncDecAttention"}
        names = names if theirs == "decoder" else {"attention": "0.SelfAttention"}
        for kind, name in names.items():
            for which in ("query", "key", "value"):
                found[f"{ours}blocks.{kind}.w_{which}"] = place(f"{layer}{name}.{which[0]}.weight", "(h k) d -> d h k")
            found[f"{ours}blocks.{kind}.w_out"] = place(f"{layer}{name}.o.weight", "d (h k) -> h k d")
            found[f"{ours}blocks.{kind}_norm.scale"] = place(f"{layer}{name[0]}.layer_norm.weight", VECTOR)
        last = f"{layer}{len(names)}."
        gated = cfg.feed_forward.gated
        into = {"w_gate": "wi_0", "w_up": "wi_1"} if gated else {"w_up": "wi"}
        for which, name in {**into, "w_down": "wo"}.items():
            found[f"{ours}blocks.mlp.{which}"] = place(f"{last}DenseReluDense.{name}.weight", TRANSPOSED)
        found[f"{ours}blocks.mlp_norm.scale"] = place(f"{last}layer_norm.weight", VECTOR)
    return found if cfg.tie_embeddings else {**found, "head.table": place(HEAD, TABLE)}


T5 = Foreign(
    "encoder_decoder", lambda cfg: "T5ForConditionalGeneration", "", (), read_config, write_config, places,
    left_out=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    copies={name: "embedding.tokens" for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)},
)  # fmt: skip

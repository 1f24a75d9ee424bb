"""BART (Lewis et al. 2020): transformers' names and fields."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.interchange.foreign import TABLE, TRANSPOSED, VECTOR, Fields, Foreign, Place, place

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
OFFSET = 2  # rows of the tables of positions that none has
HEAD, BIAS = "lm_head.weight", "final_logits_bias"


def read_config(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Our `model` section."""
    fields = Fields(found)
    fields.only("tie_word_embeddings", True)
    sizes = {}
    for name in ("attention_heads", "ffn_dim"):
        sizes[name], of_encoder = fields.number(f"decoder_{name}"), fields.number(f"encoder_{name}")
        if of_encoder != sizes[name]:
            raise ConfigError(f"config.json: encoder_{name}: {of_encoder}; accepted: as decoder_{name}, {sizes[name]}")
    length = fields.number("max_position_embeddings")
    return {
        "family": "encoder_decoder", "num_layers": fields.number("decoder_layers"), "width": fields.number("d_model"),
        "vocab_size": fields.number("vocab_size"), "context_length": length, "block": "post_norm",
        "encoder": {"num_layers": fields.number("encoder_layers"), "source_length": length},
        "attention": {
            "num_heads": sizes["attention_heads"], "dropout": fields.rate("attention_dropout", 0.0),
        },
        "feed_forward": {
            "width": sizes["ffn_dim"], "activation": ACTIVATIONS[fields.only("activation_function", *ACTIVATIONS)],
        },
        "positions": {"kind": "learned", "offset": OFFSET}, "embedding_norm": True,
        "scale_embeddings": bool(fields.get("scale_embedding", False)), "dropout": fields.rate("dropout", 0.1),
    }  # fmt: skip


def write_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json."""
    assert cfg.encoder is not None
    known = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    layers = cfg.num_layers if cfg.encoder.num_layers is None else cfg.encoder.num_layers
    made = {
        "is_encoder_decoder": True, "d_model": cfg.width, "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.context_length, "activation_function": known[cfg.feed_forward.activation],
        "scale_embedding": cfg.scale_embeddings, "dropout": cfg.dropout, "attention_dropout": cfg.attention.dropout,
        "tie_word_embeddings": True,
    }  # fmt: skip
    for side, count in (("encoder", layers), ("decoder", cfg.num_layers)):
        made |= {
            f"{side}_layers": count, f"{side}_attention_heads": cfg.attention.num_heads,
            f"{side}_ffn_dim": cfg.feed_forward.hidden_width(cfg.width),
        }  # fmt: skip
    return made


def places(cfg: ModelConfig) -> dict[str, Place]:
    """Norms follow the sublayers."""
    found = {"embedding.tokens": place("shared.weight", TABLE)}

    def linear(ours: str, theirs: str, pattern: str = TRANSPOSED) -> None:
        found[ours.format("w")] = place(f"{theirs}.weight", pattern)
        found[ours.format("b")] = place(f"{theirs}.bias", VECTOR)

    def norm(ours: str, theirs: str) -> None:
        found[f"{ours}.scale"] = place(f"{theirs}.weight", VECTOR)
        found[f"{ours}.bias"] = place(f"{theirs}.bias", VECTOR)

    for ours, side in (("", "decoder"), ("encoder.", "encoder")):
        layer, blocks = f"{side}.layers.{{layer}}.", f"{ours}blocks."
        found[f"{ours}embedding.positions"] = place(f"{side}.embed_positions.weight", TABLE)
        norm(f"{ours}embedding_norm", f"{side}.layernorm_embedding")
        kinds = {"attention": "self_attn", **({"cross": "encoder_attn"} if side == "decoder" else {})}
        for kind, name in kinds.items():
            for which in ("query", "key", "value"):
                theirs = f"{layer}{name}.{which[0]}_proj"
                found[f"{blocks}{kind}.w_{which}"] = place(f"{theirs}.weight", "(h k) d -> d h k")
                found[f"{blocks}{kind}.b_{which}"] = place(f"{theirs}.bias", "(h k) -> h k")
            linear(f"{blocks}{kind}.{{}}_out", f"{layer}{name}.out_proj", "d (h k) -> h k d")
            norm(f"{blocks}{kind}_norm", f"{layer}{name}_layer_norm")
        linear(f"{blocks}mlp.{{}}_up", f"{layer}fc1")
        linear(f"{blocks}mlp.{{}}_down", f"{layer}fc2")
        norm(f"{blocks}mlp_norm", f"{layer}final_layer_norm")
    return found


BART = Foreign(
    "encoder_decoder", lambda cfg: "BartForConditionalGeneration", "model.", (HEAD, BIAS), read_config, write_config,
    places,
    copies={name: "embedding.tokens" for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)},
    zeros=lambda cfg: {BIAS: (1, cfg.vocab_size or 0)},
)  # fmt: skip

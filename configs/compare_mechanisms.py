"""What other mixers, a memory and experts are worth beside dense attention, on text files: five hours on 2 cores.

jaxformer compare compare_mechanisms --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from jaxformer.config import load

# A causal token sees 128 tokens of a row of 256 on average; a pattern shows it about a quarter of them, or fewer.
MIXERS = {
    "window": {"window": 32},
    "dilated": {"kind": "dilated", "size": 16, "step": 4},
    "strided": {"kind": "strided", "stride": 16},
    "fixed": {"kind": "fixed", "block": 32, "last": 2},
    "longformer": {"kind": "longformer", "attention_window": 64, "global_tokens": 1},
    "bigbird": {"kind": "bigbird", "block": 16, "random_blocks": 1},
    "lsh": {"kind": "lsh", "chunk": 16, "rounds": 2},
    "linear": {"kind": "linear"},
    "performer": {"kind": "performer"},
    "lstm": {"kind": "lstm"},
    "gru": {"kind": "gru"},
}
POSITIONS = {"lsh": "sinusoidal", "linear": "sinusoidal", "performer": "sinusoidal", "lstm": "none", "gru": "none"}
XL = {
    "model.family": "transformer_xl",
    "model.positions": "relative",
    "model.memory": 64,
    "data.objective": "segment_recurrence",
}
EXPERTS = {"kind": "experts", "count": 8, "top_k": 2, "activation": "gelu_tanh"}


def get_config():
    """The ladder of `compare_ablations` on rows of 256 tokens, with rotary positions; each variant another mechanism.

    `sinusoidal` tells the positions apart from those mixers that need them.
    """
    config = load("compare_ablations")
    config["model"] |= {"context_length": 256, "positions": {"kind": "rotary"}}
    config["train"] |= {"global_batch_size": 2, "eval_rows": 1024}
    config["variants"] = {
        name: {
            **{f"model.attention.{field}": value for field, value in fields.items()},
            **({"model.positions": POSITIONS[name]} if name in POSITIONS else {}),
        }
        for name, fields in MIXERS.items()
    } | {
        "sinusoidal": {"model.positions": "sinusoidal"},
        "transformer_xl": XL,
        "experts": {f"model.feed_forward.{field}": value for field, value in EXPERTS.items()},
    }
    return config

"""A small encoder-decoder, or a GPT of as many parameters, pretrained by any of five objectives.

jaxformer pretrain pretraining_objectives:span_corruption
jaxformer pretrain pretraining_objectives:next_token --config.data.files='books/*.txt'

Afterwards `pairs` or `instructions` tune it on one and the same task, `--config.data.files` of pairs of texts.
`experiments/objectives.py` compares them.
"""

from ml_collections import ConfigDict

# objective -> tokens of a source (None: a GPT, which has none), of a target, and what else changes in `data`. Texts
# have 191 or 192 tokens; those of the two that tune, a source of up to 192 and a target of up to 96.
KINDS = {
    "next_token": (None, 192, {}),
    "prefix_lm": (None, 192, {}),
    "span_corruption": (174, 40, {}),
    "denoising": (192, 192, {}),
    "mixture": (192, 140, {}),
    "pairs": (192, 96, {}),
    "instructions": (None, 288, {"labelled": {"template": "{content}"}}),
}


def get_config(kind="next_token"):
    """An encoder and a decoder of two layers each, or a GPT of four: nearly as many parameters."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r}; accepted: {', '.join(KINDS)}")
    source, target, changes = KINDS[kind]
    return ConfigDict({
        "workdir": f"runs/pretraining_objectives_{kind}",
        "model": {
            "family": "gpt" if source is None else "encoder_decoder",
            "num_layers": 4 if source is None else 2,
            "width": 96,
            "attention": {"num_heads": 3},
            "context_length": target,
            "vocab_size": 1152,  # sentinels and modes included, so that all have the same
            "encoder": None if source is None else {"source_length": source},
            "norm": "rms_norm",
            "feed_forward": {"activation": "swiglu"},
            "positions": "rotary",
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 20},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 1024, "objective": kind, **changes},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 1000, "global_batch_size": 16, "eval_every_steps": 500, "eval_rows": 320},
    })  # fmt: skip

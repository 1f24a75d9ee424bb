"""Objectives that hide text, on a Markov language: beside its loss a run prints the least that any model can have.

jaxformer pretrain denoising_entropy:span_corruption
jaxformer pretrain denoising_entropy:last_span
jaxformer pretrain denoising_entropy:mixture
jaxformer pretrain denoising_entropy:prefix_lm
"""

from ml_collections import ConfigDict

# objective, tokens of a source and of a target; no span but the last one: how long it is then is known.
KINDS = {
    "span_corruption": ("span_corruption", 64, 14),
    "last_span": ("mixture", 64, 23),
    "mixture": ("mixture", 64, 48),
    "prefix_lm": ("prefix_lm", None, 64),
}


def get_config(kind="span_corruption"):
    """An encoder-decoder, or a GPT ("prefix_lm"), of two layers; each symbol depends on the one before it."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r}; accepted: {', '.join(KINDS)}")
    objective, source, target = KINDS[kind]
    config = ConfigDict({
        "workdir": f"runs/denoising_entropy_{kind}",
        "model": {
            "family": "encoder_decoder",
            "num_layers": 2,
            "width": 128,
            "attention": {"num_heads": 4},
            "context_length": target,
            "encoder": {"source_length": source},
            "positions": "learned",
            "norm": "rms_norm",
            "feed_forward": {"activation": "swiglu"},
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 20},
        "data": {"source": "markov", "language_symbols": 8, "language_order": 1, "language_tokens": 5_000_000,
                 "validation_fraction": 0.04, "objective": objective},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02,
                      "weight_decay": 0.01},
        "train": {"steps": 2000, "global_batch_size": 64, "eval_every_steps": 500},
    })  # fmt: skip
    if kind == "last_span":
        config.data.ul2 = {"regular": 0.0, "extreme": 0.0}
    if kind == "prefix_lm":
        config.model.family, config.model.encoder = "gpt", None
    return config

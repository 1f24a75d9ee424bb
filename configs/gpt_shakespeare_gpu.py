"""nanoGPT's documented GPU run on characters: 6 layers, 6 heads, width 384, context 256, batch 64, 5000 steps.

    jaxformer pretrain gpt_shakespeare_gpu --config.data.files=tinyshakespeare.txt
    jaxformer pretrain gpt_shakespeare_gpu:ours --config.data.files=tinyshakespeare.txt

The held-out tenth is the end of the file, as nanoGPT has it, whose best loss is 1.4697 by its readme. All of
that tenth is evaluated every 250 steps.
"""

from ml_collections import ConfigDict


def get_config(settings="nanogpt"):
    """settings: nanogpt: its own; ours: rotary positions, SwiGLU, RMS norm, more dropout and averaged weights."""
    config = ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 6,
            "width": 384,
            "attention": {"num_heads": 6, "dropout": 0.2},
            "context_length": 256,
            "use_bias": False,
            "dropout": 0.2,
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 50},
        "data": {"source": "files", "files": ("tinyshakespeare.txt",), "tokenizer": "chars"},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 100, "beta2": 0.99, "weight_decay": 0.1},
        "train": {"steps": 5000, "global_batch_size": 64, "eval_every_steps": 250, "log_every_steps": 50},
    })  # fmt: skip
    if settings not in ("nanogpt", "ours"):
        raise ValueError(f"{settings!r}; accepted: nanogpt, ours")
    if settings == "nanogpt":
        return config
    config.model.update({"positions": {"kind": "rotary"}, "norm": "rms_norm", "dropout": 0.35,
                         "feed_forward": {"activation": "swiglu"}})  # fmt: skip
    config.optimizer.update({"ema_decay": 0.998})
    return config

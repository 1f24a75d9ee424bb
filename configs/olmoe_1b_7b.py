"""OLMoE-1B-7B: 6.9 billion parameters, of which a token uses 1.3 (Muennighoff et al. 2024, section 2).

jaxformer pretrain olmoe_1b_7b --config.data.files='/data/*.jsonl.zst'
"""

from ml_collections import ConfigDict


def get_config():
    """16 layers of 64 experts 1024 wide, 8 for a token, dropless; 4M tokens a step. Experts over 8 devices."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 16,
            "width": 2048,
            "attention": {"num_heads": 16, "qk_norm": True, "joint_qk_norm": True},
            "feed_forward": {
                "kind": "experts", "count": 64, "top_k": 8, "width": 1024, "activation": "swiglu",
                "renormalize": False, "balance": 0.01, "z_loss": 0.001,
            },
            "context_length": 4096,
            "vocab_size": 50304,
            "norm": "rms_norm",
            "positions": "rotary",
            "use_bias": False,
            "tie_embeddings": False,
            "initializer": "scaled",
            "dtype": "bfloat16",
        },
        "execution": {"remat": "full", "layers": "scan", "steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.jsonl",), "tokenizer_vocab": 50280},
        "optimizer": {"learning_rate": 4e-4, "warmup_steps": 2500},
        "mesh": {"data": 1, "fsdp": None, "expert": 8},
        "train": {"steps": 1_200_000, "global_batch_size": 1024, "eval_every_steps": 1000,
                  "eval_rows": 2048, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 10_000},
    })  # fmt: skip

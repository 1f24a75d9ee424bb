"""The shape of DeBERTa base, v3 (He et al. 2023) or v1 (He et al. 2021), trained to restore masked tokens, on your
files or TFDS.

jaxformer pretrain deberta_base --config.data.files='/data/wiki/*.jsonl.gz'
jaxformer pretrain deberta_base:v1 --config.data.files='/data/wiki/*.jsonl.gz'
"""

from jaxformer.config import load

# version -> positions, and the entries of the tokenizer and of the table.
VERSIONS = {
    "v1": (
        {"kind": "disentangled", "distance": "clipped", "span": 512, "shared_projections": False, "norm": False},
        (50_265, 50_304),
    ),
    "v3": ({"kind": "disentangled", "distance": "log", "span": 256, "max_distance": 512}, (128_100, 128_128)),
}


def get_config(version="v3"):
    """The argument is the version. v3's own objective, replaced-token detection, is not this one; nor are v1's masks
    over spans of up to three words."""
    if version not in VERSIONS:
        raise ValueError(f"version {version}; accepted: v1, v3")
    positions, (tokens, vocab_size) = VERSIONS[version]
    config = load("bert_base:512")
    config["model"] |= {
        "positions": positions, "bert": {"token_types": 0, "mask_decoder": "enhanced"}, "norm_epsilon": 1e-7,
        "vocab_size": vocab_size,
    }  # fmt: skip
    config["data"] |= {"pairs": False, "whole_word": True, "tokenizer_vocab": tokens}
    config["optimizer"]["learning_rate"] = 2e-4
    config["train"]["global_batch_size"] = 2048
    return config

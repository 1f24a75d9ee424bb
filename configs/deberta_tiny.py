"""A small DeBERTa on the source text of Python's own standard library, no download: `bert_tiny` with disentangled
positions and the enhanced mask decoder.

jaxformer pretrain deberta_tiny
python -m experiments.fill_mask --workdir=runs/deberta_tiny --text='import [MASK]'
"""

from jaxformer.config import load


def get_config():
    """Distances are exact up to 16 tokens; positions in the document enter in the mask decoder only."""
    config = load("bert_tiny")
    config["model"] |= {
        "positions": {"kind": "disentangled", "span": 32, "max_distance": 128},
        "bert": {"token_types": 0, "mask_decoder": "enhanced"},
    }
    return config

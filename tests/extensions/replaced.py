"""A config file that brings an objective and a source: restore tokens that others replaced, in counting text."""

import numpy as np

from jaxformer.config.registry import ObjectiveTraits
from jaxformer.data import objectives, shuffle
from jaxformer.data.objectives import OBJECTIVES, Objective
from jaxformer.data.sources import SOURCES, Source

RATE = 0.2


def prepare(tokenizer, data):
    def ask(windows, bits):
        tokens = windows.astype(np.int32)
        segments, positions = objectives.documents(tokens, tokenizer.separator_id)
        chosen = (shuffle.fractions(bits[:, : tokens.shape[1]]) < RATE) & (tokens != tokenizer.separator_id)
        others = shuffle.below(tokenizer.vocab_size, bits[:, tokens.shape[1] :]).astype(np.int32)
        weights = chosen.astype(np.float32)
        return objectives.HostBatch(np.where(chosen, others, tokens), tokens, weights, positions, segments)

    return ask


def documents(data, split, faults, open_file):
    for first in range(0, 3000, 100) if split == "train" else range(3000, 3500, 100):
        yield " ".join(map(str, range(first, first + 100)))


OBJECTIVES["replaced"] = Objective(prepare, words=2, traits=ObjectiveTraits(lambda data: RATE, ("bert",)))
SOURCES["counting"] = Source(documents)


def get_config():
    return {
        "model": {"family": "bert", "block": "post_norm"},
        "data": {"objective": "replaced", "source": "counting", "tokenizer": "chars"},
    }

"""Splits made in memory, and a vocabulary in which every token of a corpus is another one."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxformer.data.corpus import Split

SEPARATOR, PAD, CLS, SEP, MASK, UNK = range(6)


@pytest.fixture
def make_split():
    """`make_split(lengths)`: documents of so many tokens; every token but the separators is its own number + 6."""

    def make(lengths):
        parts, starts, n = [], [], 0
        for length in lengths:
            starts.append(n)
            parts.append([SEPARATOR, *range(n + 7, n + 7 + length)])
            n += 1 + length
        return Split(np.concatenate(parts).astype(np.uint32), np.array(starts, np.int64), sum(lengths), 0, {})

    return make


@pytest.fixture
def vocabulary():
    """What batches need of a tokenizer, for the tokens of `make_split`: ids from 6 on; three make a word."""
    size = 6 + 50_000
    ids = np.arange(size)
    return SimpleNamespace(
        vocab_size=size,
        separator_id=SEPARATOR,
        pad_id=PAD,
        cls_id=CLS,
        sep_id=SEP,
        mask_id=MASK,
        unk_id=UNK,
        special_ids=np.arange(6, dtype=np.int32),
        word_starts=(ids >= 6) & (ids % 3 == 0),
        word_ends=np.zeros(size, bool),
        has=lambda role: True,
    )

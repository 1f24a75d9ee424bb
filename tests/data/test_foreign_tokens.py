"""Token files of other projects, written here by their published layouts: Megatron's, nanoGPT's, llm.c's."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from token_folders import texts

from jaxformer.config import DataConfig
from jaxformer.data import tokenizers
from jaxformer.data.batches import Batches
from jaxformer.data.corpus import open_corpus
from jaxformer.errors import ConfigError

TOKENIZER = tokenizers.train("bytes", [], None)
END = TOKENIZER.separator_id
CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def megatron(path, documents, kind="u2"):
    """MMapIndexedDatasetBuilder's two files; `documents` are lists of sequences, as --split-sentences makes them."""
    sequences = [np.asarray(sequence, kind) for document in documents for sequence in document]
    path.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes(order="C") for sequence in sequences))
    sizes = [len(sequence) for sequence in sequences]
    pointers, address = [], 0
    for size in sizes:
        pointers.append(address)
        address += size * np.dtype(kind).itemsize
    document_indices = [0]
    for document in documents:
        document_indices.append(document_indices[-1] + len(document))
    with open(path.with_suffix(".idx"), "wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", 1))
        index.write(struct.pack("<B", CODES[kind]))
        index.write(struct.pack("<Q", len(sizes)))
        index.write(struct.pack("<Q", len(document_indices)))
        index.write(np.array(sizes, np.int32).tobytes(order="C"))
        index.write(np.array(pointers, np.int64).tobytes(order="C"))
        index.write(np.array(document_indices, np.int64).tobytes(order="C"))
    return path.with_suffix(".bin")


def nano_gpt(path, documents):
    """prepare.py's: ids, then the end of text, of every document."""
    np.concatenate([np.append(ids, END) for ids in documents]).astype(np.uint16).tofile(path)
    return path


def llm_c(path, documents, magic=20240520, version=1, kind="<u2"):
    """write_datafile's: a header of 256 int32, then documents that the end of text opens."""
    tokens = np.concatenate([np.append(END, ids) for ids in documents]).astype(kind)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


@pytest.fixture
def given(tmp_path):
    """The ids of 20 documents, and a config that reads them as text."""
    TOKENIZER.save(tmp_path)
    documents = texts(20)
    (tmp_path / "a.txt").write_text("|".join(documents[:15]))
    (tmp_path / "b.txt").write_text("|".join(documents[15:]))
    data = DataConfig(
        files=(str(tmp_path / "a.txt"),), validation_files=(str(tmp_path / "b.txt"),), separator="|",
        tokenizer_file=str(tmp_path / "tokenizer.json"), cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    return [TOKENIZER.encode(text) for text in documents], data


def sentences(ids):
    """A document in sequences."""
    return np.array_split(ids, min(3, len(ids)))


WRITERS = {
    "nanoGPT": nano_gpt,
    "llm.c": llm_c,
    "llm.c, 32 bits": lambda path, ids: llm_c(path, ids, 20240801, 7, "<u4"),
    "Megatron": lambda path, ids: megatron(path, [[np.append(each, END)] for each in ids]),
    "Megatron, int32": lambda path, ids: megatron(path, [[np.append(each, END)] for each in ids], "i4"),
    "Megatron, sentences": lambda path, ids: megatron(path, [sentences(np.append(each, END)) for each in ids]),
    "Megatron, no end of text": lambda path, ids: megatron(path, [sentences(each) for each in ids]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_they_are_read_as_the_text_is(tmp_path, given, name):
    ids, data = given
    expected = open_corpus(data, progress=False)
    write = WRITERS[name]
    files = (write(tmp_path / "train_1.bin", ids[:6]), write(tmp_path / "train_2.bin", ids[6:15]))
    held_out = write(tmp_path / "val_1.bin", ids[15:])
    where = DataConfig(
        tokens=(str(tmp_path / "*_*.bin"),), validation_tokens=(str(held_out),), tokenizer_file=data.tokenizer_file
    )
    found = open_corpus(where)
    by_name = open_corpus(replace(where, validation_tokens=()))  # val in its name
    assert by_name.fingerprint == found.fingerprint
    for split in ("train", "validation"):
        one, other = getattr(expected, split), getattr(found, split)
        np.testing.assert_array_equal(np.asarray(one.tokens), np.asarray(other.tokens))
        np.testing.assert_array_equal(np.asarray(one.starts), np.asarray(other.starts))
        assert (one.num_bytes, one.num_documents) == (other.num_bytes, other.num_documents)
    shape = {"rows": 3, "context_length": 16, "seed": 0}
    mine, theirs = (Batches(c.train, c.tokenizer, data, **shape) for c in (expected, found))
    for step in (0, 7):
        np.testing.assert_array_equal(mine[step].tokens, theirs[step].tokens)
        np.testing.assert_array_equal(mine[step].segments, theirs[step].segments)
    raw = bytearray(files[1].read_bytes())
    raw[-8 if "32" in name else -4] ^= 1  # the last token but one
    files[1].write_bytes(raw)
    assert open_corpus(where).fingerprint != found.fingerprint


def test_the_end_of_one_file_is_held_out_at_a_document(tmp_path, given):
    ids, data = given
    path = nano_gpt(tmp_path / "all.bin", ids)
    found = open_corpus(DataConfig(tokens=(str(path),), tokenizer_file=data.tokenizer_file, validation_fraction=0.3))
    assert found.validation.tokens[0] == END and found.train.tokens[0] == END
    both = np.concatenate([np.asarray(found.train.tokens), np.asarray(found.validation.tokens)])
    np.testing.assert_array_equal(both, np.concatenate([np.append(END, each) for each in ids]))
    assert 0 < 0.3 - len(found.validation.tokens) / len(both) < 0.2
    assert len(found.train.starts) + len(found.validation.starts) == len(ids)


def test_documents_of_both_kinds_are_refused(tmp_path, given):
    ids, data = given
    path = megatron(tmp_path / "a.bin", [[ids[0]], [np.append(ids[1], END)], [np.append(ids[2], END)]])
    with pytest.raises(ConfigError, match="some documents end with the separator and some do not"):
        open_corpus(DataConfig(tokens=(str(path),), tokenizer_file=data.tokenizer_file))

import gzip
import lzma
import random
import shutil
import subprocess

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import ingest, sources, tokenizers
from jaxformer.data.corpus import open_corpus


@pytest.fixture(scope="module")
def code():
    """300 KB of Python in one text."""
    text = "\n".join(sources.documents(DataConfig(max_train_bytes=300_000), "train"))
    return text, tokenizers.train("bpe", [text], 600)


@pytest.mark.parametrize("size", [120, 333, 4000])
def test_pieces_tokenise_as_the_whole(code, monkeypatch, size):
    text, tokenizer = code
    monkeypatch.setattr(ingest, "PIECE", size)
    parts = list(ingest.pieces(text))
    assert "".join(parts) == text
    assert 0.5 * len(text) / size < len(parts) <= len(text) / size
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(parts)), tokenizer.encode(text))


def test_pieces_at_lines_change_no_token(monkeypatch):
    rng = random.Random(0)
    lines = ["".join(rng.choices(" \tab1é'(\r_", k=rng.randrange(30))) for _ in range(4000)]
    text = "\n".join(lines)
    tokenizer = tokenizers.train("bpe", [text], 400)
    monkeypatch.setattr(ingest, "PIECE", 100)
    parts = list(ingest.pieces(text))
    assert "".join(parts) == text and len(parts) > 200 and max(map(len, parts)) < 400
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(parts)), tokenizer.encode(text))


def test_pieces_of_text_without_lines(monkeypatch):
    monkeypatch.setattr(ingest, "PIECE", 10)
    assert list(ingest.pieces("x" * 95)) == ["x" * 40, "x" * 40, "x" * 15]
    assert list(ingest.pieces("")) == [] and list(ingest.pieces("x" * 10)) == ["x" * 10]


def test_spread_takes_its_share_everywhere():
    rng = random.Random(0)
    texts = ["x" * rng.randrange(1, 50) for _ in range(5000)]
    total = sum(map(len, texts))
    taken = list(ingest.spread(iter(list(map(str, range(5000)))), sum(len(str(i)) for i in range(5000)), 2000))
    gaps = np.diff([int(i) for i in taken])
    assert int(taken[0]) == 0 and int(taken[-1]) > 4980 and gaps.min() > 1
    assert gaps.max() - gaps.min() <= 6
    assert abs(sum(map(len, ingest.spread(texts, total, total // 3))) - total / 3) < 50
    assert list(ingest.spread(texts, total, total)) == texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of Python with an odd separator; (texts of both splits, corpus)."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = list(sources.documents(DataConfig(max_train_bytes=400_000), "train"))
    texts[1] += "unicode: é漢🙂\r\n"
    (folder / "a.txt").write_text("\f\f".join(texts), encoding="utf-8", newline="")
    data = DataConfig(
        source="files", files=(str(folder / "a.txt"),), separator="\f\f", tokenizer_vocab=500,
        validation_fraction=0.3, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    held = round(len(texts) * 0.3)
    return {"train": texts[:-held], "validation": texts[-held:]}, open_corpus(data, progress=False)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_document_is_a_separator_and_its_tokens(corpus, split):
    texts, made = corpus[0][split], getattr(corpus[1], split)
    assert made.num_documents == len(texts) and made.starts[0] == 0
    ends = [*made.starts[1:], made.num_tokens]
    for text, start, end in zip(texts, made.starts, ends, strict=True):
        assert made.tokens[start] == corpus[1].tokenizer.separator_id
        np.testing.assert_array_equal(made.tokens[start + 1 : end], corpus[1].tokenizer.encode(text))
        assert corpus[1].tokenizer.decode(made.tokens[start:end]) == text
    np.testing.assert_array_equal(np.flatnonzero(made.tokens == corpus[1].tokenizer.separator_id), made.starts)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_tokens_stand_for_all_bytes(corpus, split):
    made = getattr(corpus[1], split)
    size = sum(len(text.encode()) for text in corpus[0][split])
    assert made.num_bytes == size == corpus[1].tokenizer.token_bytes[made.tokens].sum()
    assert made.num_unknown == 0 and made.tokens.dtype == np.uint16 and made.starts.dtype == np.int64


def test_compressed_sizes_are_those_of_the_programs(corpus):
    held_out = "".join(corpus[0]["validation"]).encode()
    sizes = corpus[1].validation.compressed
    assert corpus[1].train.compressed == {}
    assert sizes["xz -9"] == len(lzma.compress(held_out, preset=9))
    assert sizes["gzip -9"] == pytest.approx(len(gzip.compress(held_out, 9)), rel=0.005)  # the module saves on memory
    for program, name in (("gzip", "gzip -9"), ("xz", "xz -9")):
        if shutil.which(program):  # from standard input, so that no file name is kept
            out = subprocess.run([program, "-9", "-c"], input=held_out, capture_output=True, check=True).stdout
            # The gzip program has a deflate of its own, which is zlib's but for some 0.1 %.
            assert sizes[name] == pytest.approx(len(out), rel=0.004 if name == "gzip -9" else 0.0, abs=64)


def test_long_held_out_text_is_not_compressed(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("word " * 200)
    monkeypatch.setattr(ingest, "COMPRESS_BYTES", 99)
    data = DataConfig(
        source="files", files=(str(tmp_path / "a.txt"),), tokenizer="bytes", cache_dir=str(tmp_path / "c")
    )
    assert open_corpus(data, progress=False).validation.compressed == {}


@pytest.mark.slow
def test_a_vocabulary_above_uint16(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, [*range(0x100, 0xD800), *range(0xE000, 0x1F000)])) + "abc" * 9999)
    data = DataConfig(
        source="files", files=(str(tmp_path / "a.txt"),), tokenizer="chars", cache_dir=str(tmp_path / "c")
    )
    corpus = open_corpus(data, progress=False)
    assert corpus.tokenizer.vocab_size > 1 << 16 and corpus.train.tokens.dtype == np.uint32
    assert corpus.tokenizer.token_bytes[corpus.train.tokens].sum() == corpus.train.num_bytes


def test_unknown_characters_of_the_held_out_text_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 45 + "abcccbabab", encoding="utf-8")
    data = DataConfig(
        source="files", files=(str(tmp_path / "a.txt"),), tokenizer="chars", cache_dir=str(tmp_path / "c")
    )
    corpus = open_corpus(data, progress=False)
    assert (corpus.train.num_unknown, corpus.validation.num_unknown) == (0, 3)
    assert corpus.validation.num_bytes == 10

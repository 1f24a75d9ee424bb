"""Files as one held-out text: the tokens that a corpus has for the same files held out."""

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import whole_text
from jaxformer.data.corpus import open_corpus
from jaxformer.errors import ConfigError


@pytest.mark.parametrize("tokenizer", ["bpe", "chars"])
def test_the_tokens_are_those_of_a_corpus_that_holds_the_files_out(tmp_path, tokenizer):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"one|two {number}|three and ünicode {'§' * number}|" * 30)
    held_out = (f"{tmp_path}/2.txt", f"{tmp_path}/3.txt")
    data = DataConfig(
        files=(f"{tmp_path}/0.txt", f"{tmp_path}/1.txt"), validation_files=held_out, separator="|",
        tokenizer=tokenizer, tokenizer_vocab=300, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    corpus = open_corpus(data, progress=False)
    (tmp_path / "work").mkdir()
    other = DataConfig(files=held_out, separator="|")
    split, files = whole_text.read(other, corpus.tokenizer, tmp_path / "work", progress=False)
    assert [path.name for path in files] == ["2.txt", "3.txt"]
    for name in ("tokens", "starts"):
        np.testing.assert_array_equal(getattr(split, name), getattr(corpus.validation, name))
    for name in ("num_bytes", "num_unknown", "compressed", "num_documents"):
        assert getattr(split, name) == getattr(corpus.validation, name), name
    # "2" and "3" stand in no training text: bits per byte would not be those of a code.
    assert bool(split.unknown()) == (tokenizer == "chars")


def test_text_that_changes_while_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one two three")
    tokenizer = open_corpus(
        DataConfig(files=(f"{tmp_path}/a.txt",), tokenizer="bytes", cache_dir=str(tmp_path / "cache")), progress=False
    ).tokenizer
    write = whole_text.ingest.write_split

    def longer(texts, *rest):
        (tmp_path / "a.txt").write_text("one two three four")
        return write(texts, *rest)

    monkeypatch.setattr(whole_text.ingest, "write_split", longer)
    with pytest.raises(ConfigError, match="changed while it was read"):
        whole_text.read(DataConfig(files=(f"{tmp_path}/a.txt",)), tokenizer, tmp_path, progress=False)

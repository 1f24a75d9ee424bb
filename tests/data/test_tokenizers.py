import json
import os

import numpy as np
import pytest
import tokenizers as hf

from jaxformer.data import tokenizers
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError

PROSE = (
    "The naïve café\u2019s owner don't know: 12345 [MASK] <|endoftext|> 漢字\u0301 🙂\r\n\tx\u00a0y\n\n"
    "    return self._x\n \x00"
)
TRAIN = [PROSE, "def f(self):\n    return self.value + 1\n" * 30, ""]
KINDS = ["bytes", "chars", "bpe"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return tokenizers.train(request.param, TRAIN, 400)


@pytest.fixture(scope="module")
def bpe():
    return tokenizers.train("bpe", TRAIN, 400)


def error_of(call):
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("text", [*TRAIN, "  ", "\n", "a", "self self"])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert not np.isin(ids, tokenizer.special_ids).any()
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert b"".join(tokenizer.pieces[i] for i in ids) == text.encode()


def test_bytes_of_any_text_round_trip():
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000, 7), 0x10FFFF]))
    for kind in ("bytes", "bpe"):
        tokenizer = tokenizers.train(kind, TRAIN, 300)
        ids = tokenizer.encode(everything)
        assert tokenizer.decode(ids) == everything
        assert tokenizer.token_bytes[ids].sum() == len(everything.encode())


def test_special_tokens(tokenizer):
    roles = [getattr(tokenizer, f"{role}_id") for role in ("separator", "pad", "cls", "sep", "mask", "unk")]
    assert sorted(roles) == tokenizer.special_ids.tolist() and len(set(roles)) == 6
    assert (tokenizer.token_bytes[tokenizer.special_ids] == 0).all()
    assert (np.delete(tokenizer.token_bytes, tokenizer.special_ids) > 0).all()
    ids = [tokenizer.separator_id, *tokenizer.encode("x"), tokenizer.pad_id]
    assert tokenizer.decode(ids) == "x"
    assert tokenizer.decode(ids, skip_specials=False) == "<|endoftext|>x[PAD]"
    assert len(tokenizer.token_bytes) == len(tokenizer.word_starts) == len(tokenizer.word_ends) == tokenizer.vocab_size


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    assert path == tmp_path / "tokenizer.json"
    for where in (tmp_path, path, str(path)):
        other = Tokenizer.load(where)
        assert other.fingerprint == tokenizer.fingerprint and len(other.fingerprint) == 16
        np.testing.assert_array_equal(other.encode(PROSE), tokenizer.encode(PROSE))
        np.testing.assert_array_equal(other.special_ids, tokenizer.special_ids)
        np.testing.assert_array_equal(other.token_bytes, tokenizer.token_bytes)
        assert other.vocab_size == tokenizer.vocab_size


def test_batches_are_the_texts_one_by_one(tokenizer):
    for ids, text in zip(tokenizer.encode_batch(TRAIN), TRAIN, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_vocabularies():
    assert tokenizers.train("bytes", [], None).vocab_size == 262
    assert tokenizers.train("chars", ["banana", "cab"], None).vocab_size == 6 + 4
    assert tokenizers.train("bpe", TRAIN, 300).vocab_size == 300
    assert tokenizers.train("bpe", ["ab"], 5000).vocab_size == 6 + 256 + 1
    assert (tokenizers.train("bytes", [], None).encode("\x00é") == [6, 6 + 0xC3, 6 + 0xA9]).all()


def test_training_is_deterministic():
    one, two = (tokenizers.train("bpe", TRAIN, 350) for _ in range(2))
    assert one.fingerprint == two.fingerprint != tokenizers.train("bpe", TRAIN, 300).fingerprint


def test_what_bpe_takes_for_words(bpe):
    """No token joins what is on two sides of a bar."""
    text = "def| f|(|self|):|\n    |return| self|.|value| +| 1| x|  \r\n\t|naïve| 123|45| don|'t| '|tis|'"
    parts = text.split("|")
    text = "".join(parts)
    edges = set(np.cumsum([len(part.encode()) for part in parts]).tolist())
    assert edges <= set(np.cumsum(bpe.token_bytes[bpe.encode(text)]).tolist())
    assert bpe.decode([bpe.encode("\n    return")[0]]) == "\n    "
    assert [bpe.decode([i]) for i in bpe.encode("'self'")] == ["'", "self", "'"]


def test_word_starts_and_ends(bpe):
    wanted = {
        "\n    ": (True, True),
        "self": (False, False),
        " self": (True, False),
        "(": (True, True),
        ".": (True, True),
    }
    for token, (starts, ends) in wanted.items():
        (index,) = bpe.encode(token)
        assert (bool(bpe.word_starts[index]), bool(bpe.word_ends[index])) == (starts, ends), token
    byte = tokenizers.train("bytes", [], None)
    assert not byte.word_starts[byte.encode("é")].any() and byte.word_starts[byte.encode("_ -\n")].all()
    chars = tokenizers.train("chars", [PROSE], None)
    assert (
        not chars.word_starts[chars.encode("é漢\u0301Z"[:3])].any() and chars.word_starts[chars.encode("\u2019")].all()
    )
    for tokenizer in (bpe, byte, chars):
        assert not tokenizer.word_starts[tokenizer.special_ids].any()


def test_characters_never_seen():
    tokenizer = tokenizers.train("chars", ["abc"], None)
    ids = tokenizer.encode("axxb")
    assert (ids[1:3] == tokenizer.unk_id).all() and len(ids) == 4
    assert error_of(lambda: tokenizer.encode("axéxb", strict=True)) == (
        "text: 'x', 'é' not in the vocabulary of this tokenizer"
    )
    assert len(tokenizer.encode("abc", strict=True)) == 3


def test_text_without_utf8(tokenizer):
    for call in (lambda: tokenizer.encode("ab\ud800"), lambda: tokenizer.encode_batch(["x", "ab\ud800"])):
        assert error_of(call) == "text: character 2, '\\ud800', has no UTF-8 form"


def test_names_of_special_tokens_are_read_on_request(tokenizer, bpe):
    assert tokenizer.mask_id not in tokenizer.encode("a[MASK][SEP]b")
    ids = tokenizer.encode("a[MASK][SEP]b", specials=True)
    assert ids.tolist() == [*tokenizer.encode("a"), tokenizer.mask_id, tokenizer.sep_id, *tokenizer.encode("b")]
    # A token of this vocabulary carries the space before it, so the hidden one does too.
    assert bpe.encode("return [MASK]:", specials=True).tolist() == [
        *bpe.encode("return"), bpe.mask_id, *bpe.encode(":")
    ]  # fmt: skip
    byte = tokenizers.train("bytes", [], None)
    assert byte.encode("r [MASK]", specials=True).tolist() == [*byte.encode("r "), byte.mask_id]


def test_a_vocabulary_with_no_room_for_the_bytes():
    assert error_of(lambda: tokenizers.train("bpe", TRAIN, 261)) == (
        "config.data.tokenizer_vocab: 261; byte-level BPE needs at least 262"
    )


def test_bad_tokenizer_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    assert error_of(lambda: Tokenizer.load(tmp_path)) == (
        f"config.data.tokenizer_file: {path}: No such file or directory"
    )
    for content in (b"{}", b"not json", b""):
        path.write_bytes(content)
        assert error_of(lambda: Tokenizer.load(path)).startswith(
            f"config.data.tokenizer_file: {path} is not a tokenizer ("
        )
    path.write_bytes(b"\xff")
    assert error_of(lambda: Tokenizer.load(path)) == f"config.data.tokenizer_file: {path}: not UTF-8 text"


def load_foreign(tmp_path, backend):
    path = tmp_path / "tokenizer.json"
    path.write_text(backend.to_str())
    return Tokenizer.load(path)


def test_a_wordpiece_tokenizer_of_another_project(tmp_path):
    vocabulary = {
        t: i for i, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "wor", "##ld", ","])
    }
    backend = hf.Tokenizer(hf.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    backend.decoder = hf.decoders.WordPiece()
    backend.post_processor = hf.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.enable_truncation(2)
    backend.enable_padding()
    tokenizer = load_foreign(tmp_path, backend)
    assert tokenizer.encode("hello, world").tolist() == [5, 8, 6, 7]
    assert [len(ids) for ids in tokenizer.encode_batch(["hello", "hello, world"])] == [1, 4]
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id) == (
        0,
        4,
        2,
        3,
        1,
    )
    assert tokenizer.separator_id == tokenizer.sep_id and tokenizer.vocab_size == len(vocabulary) == 9
    assert tokenizer.word_starts.tolist() == [False] * 5 + [True, True, False, True]


@pytest.mark.parametrize("declared", [True, False])
def test_bert_needs_no_token_beyond_its_table(tmp_path, declared):
    """[SEP], which ends its spans, stands between documents. Before, a separator was added: 114 ids became 115."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate([*names, *(f"w{i}" for i in range(109))])}
    backend = hf.Tokenizer(hf.models.WordPiece(vocabulary, unk_token="[UNK]"))
    if declared:
        backend.add_special_tokens(names)
    tokenizer = load_foreign(tmp_path, backend)
    assert tokenizer.vocab_size == 114 and tokenizer.special_ids.tolist() == [0, 1, 2, 3, 4]
    assert (tokenizer.separator_id, tokenizer.sep_id, tokenizer.cls_id, tokenizer.mask_id) == (3, 3, 2, 4)
    assert Tokenizer.load(tokenizer.save(tmp_path)).fingerprint == tokenizer.fingerprint


def test_roberta_needs_no_token_beyond_its_table(tmp_path):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>"]
    backend = hf.Tokenizer(hf.models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer = load_foreign(tmp_path, backend)
    assert tokenizer.vocab_size == 6
    assert (tokenizer.separator_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (0, 0, 2, 1)


def test_a_word_that_looks_like_a_special_token_is_none_where_others_are_declared(tmp_path):
    tokens = ["<|endoftext|>", "</s>", "<s>", "a"]
    backend = hf.Tokenizer(hf.models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = load_foreign(tmp_path, backend)
    assert tokenizer.separator_id == 0 and not {1, 2} & set(tokenizer.special_ids.tolist())


def test_a_huge_id_is_refused_before_tables_are_made(tmp_path):
    """Before, 4e9 ended the process for lack of memory."""
    tree = json.loads(tokenizers.train("chars", ["ab"], None).save(tmp_path).read_text())
    for number, fits in ((2**24 - 1, True), (2**24, False), (4_000_000_000, False), (2**32 - 1, False)):
        tree["model"]["vocab"]["b"] = number
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
        if fits:
            assert Tokenizer.load(tmp_path).vocab_size == number + 1
        else:
            with pytest.raises(ConfigError, match=rf"\(id {number}; accepted: 0 to 16777215\)"):
                Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, '{"a":' * 100_000, "null", "7", "{}", "\0", '{"version": 9}'])
def test_what_is_no_tokenizer_is_one_line(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a tokenizer") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def test_saving_replaces_a_link_and_loading_does_not_wait_for_a_pipe(tmp_path):
    tokenizer = tokenizers.train("bytes", [], None)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "victim")
    path = tokenizer.save(tmp_path)
    assert (tmp_path / "victim").read_text() == "mine" and not path.is_symlink()
    (tmp_path / "link.json").symlink_to(path)
    assert Tokenizer.load(tmp_path / "link.json").fingerprint == tokenizer.fingerprint
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not a regular file"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_tokenizer_of_another_project(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "<0xE6>", "▁", "▁he", "y", "▁hey"]
    backend = hf.Tokenizer(
        hf.models.BPE({t: i for i, t in enumerate(tokens)}, [("▁he", "y")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    backend.decoder = hf.decoders.Sequence(
        [hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse(), hf.decoders.Strip(" ", 1, 0)]
    )
    tokenizer = load_foreign(tmp_path, backend)
    assert tokenizer.pieces[3:8] == [b"\xe6", b" ", b" he", b"y", b" hey"]
    assert tokenizer.separator_id == 1 and tokenizer.unk_id == 0
    assert tokenizer.word_starts[3:8].tolist() == [False, True, True, False, True]


def test_a_tokenizer_whose_ids_have_holes(tmp_path):
    tokenizer = tokenizers.train("chars", ["ab"], None)
    tree = json.loads(tokenizer.save(tmp_path).read_text())
    tree["model"]["vocab"]["b"] = 20
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    holed = Tokenizer.load(tmp_path)
    assert holed.vocab_size == 21 and holed.token_bytes.tolist() == [0] * 6 + [1] + [0] * 13 + [1]

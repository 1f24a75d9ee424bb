"""What a finished run offers to try: text of the corpus itself, that its tokenizer reads without a doubt."""

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import sample_prompt, tokenizers
from jaxformer.data.corpus import Split, open_corpus

TEXTS = {
    "words": "The quick brown fox jumps over the lazy dog.\nAnd again.",
    "blank lines first": "\n\n   \n\tindented, then more of it",
    "no spaces": "人人生而自由在尊嚴和權利上一律平等他們賦有理性和良心並應以兄弟關係",
    "quotes": 'it\'s "so" $HOME `ls` !x \\n and so on',
    "controls": "abc\x1b[31mred and more",
    "cut characters": "é" * 600,
    "one": "x",
    "nothing": "",
    "only blanks": " \n \t\n",
}


def made(kind, text):
    text_of_training = [*TEXTS.values(), *["the quick brown fox and more of it"] * 9]
    tokenizer = tokenizers.train(kind, text_of_training, 300 if kind == "bpe" else None)
    ids = np.concatenate([[tokenizer.separator_id], tokenizer.encode(text)])
    return Split(ids.astype(np.uint32), np.array([0]), len(text.encode()), 0, {}), tokenizer


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
@pytest.mark.parametrize("name", TEXTS)
def test_of_any_text(kind, name):
    text = TEXTS[name]
    split, tokenizer = made(kind, text)
    prompt, masked = sample_prompt.prompt(split, tokenizer), sample_prompt.with_mask(split, tokenizer)
    for shown in (prompt, masked):
        assert shown.isprintable() and "\ufffd" not in shown and len(shown) <= 86
    assert prompt in text and bool(prompt) == bool(text.strip())
    tokenizer.encode(prompt, strict=True)
    ids = tokenizer.encode(masked, strict=True, specials=True)
    assert (ids == tokenizer.mask_id).sum() == 1 and len(ids) <= 12
    # The rest is what stands there, and one token was taken out.
    before, after = masked.split("[MASK]")
    begin = text.find(before.strip(" "))
    assert begin >= 0 and after in text[begin:]


def test_examples():
    split, tokenizer = made("chars", TEXTS["words"])
    assert sample_prompt.prompt(split, tokenizer) == "The quick brown"
    assert sample_prompt.with_mask(split, tokenizer) == "The qu[MASK]ck br"
    assert sample_prompt.with_mask(split, tokenizer, 1) == "[MASK]"
    split, tokenizer = made("bpe", "the quick brown fox")
    assert sample_prompt.with_mask(split, tokenizer) == "the quick [MASK] fox"  # the hidden token carries its space
    split, tokenizer = made("chars", TEXTS["no spaces"])
    assert sample_prompt.prompt(split, tokenizer) == "人人生而自由在尊"
    split, tokenizer = made("bytes", "")
    assert (sample_prompt.prompt(split, tokenizer), sample_prompt.with_mask(split, tokenizer)) == ("", "[MASK]")


@pytest.mark.parametrize("source", ["markov", "hierarchy"])
def test_of_generated_languages(source, tmp_path):
    data = DataConfig(source=source, language_symbols=12, language_tokens=2000, cache_dir=str(tmp_path))
    corpus = open_corpus(data, progress=False)
    prompt = sample_prompt.prompt(corpus.validation, corpus.tokenizer)
    np.testing.assert_array_equal(corpus.tokenizer.encode(prompt, strict=True), corpus.validation.tokens[1:9])
    masked = sample_prompt.with_mask(corpus.validation, corpus.tokenizer)
    assert corpus.tokenizer.encode(masked, strict=True, specials=True).tolist().count(corpus.tokenizer.mask_id) == 1

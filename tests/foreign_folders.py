"""Small models as the library transformers keeps them, with a tokenizer, made without it."""

import json

import jax
import numpy as np
import tokenizers as hf

from jaxformer.config import from_mapping
from jaxformer.interchange.exporting import export_model
from jaxformer.models.families import family_of
from jaxformer.specs import is_spec

WORDS = ["the", "quick", "brown", "fox"]
LLAMA = {
    "num_layers": 1, "width": 16, "context_length": 16, "positions": "rotary", "norm": "rms_norm", "use_bias": False,
    "attention": {"num_heads": 2}, "feed_forward": {"activation": "swiglu", "width": 24},
}  # fmt: skip
SPECIALS = {"gpt": ["<s>", "</s>"], "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]}


def word_tokenizer(specials):
    """One token for each word, and no special tokens but these."""
    ids = {word: number for number, word in enumerate([*specials, *WORDS])}
    made = hf.Tokenizer(hf.models.WordLevel(ids, unk_token="[UNK]" if "[UNK]" in ids else None))
    made.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    made.add_special_tokens(specials)
    return made


def folder_of(path, family="gpt", dtype="float32"):
    """A model of others, with its tokenizer, and exactly one row for each token."""
    specials = SPECIALS[family]
    sizes = {**LLAMA, "vocab_size": len(specials) + len(WORDS)}
    if family == "bert":
        sizes = {"family": "bert", "block": "post_norm", "num_layers": 1, "width": 16, "context_length": 16,
                 "vocab_size": sizes["vocab_size"], "attention": {"num_heads": 2}, "bert": {}}  # fmt: skip
    cfg = from_mapping({"model": sizes, "data": {"objective": "masked"} if family == "bert" else {}}).model
    rng = np.random.default_rng(0)

    def draw(spec):
        return rng.normal(float(spec.role == "norm"), 0.1, spec.shape).astype(np.float32)

    params = jax.tree.map(draw, family_of(cfg).specs(cfg), is_leaf=is_spec)
    export_model(cfg, params, path, dtype=dtype)
    word_tokenizer(specials).save(str(path / "tokenizer.json"), pretty=True)
    roles = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} if family == "gpt" else {"cls_token": "[CLS]"}
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}", **roles}, indent=2) + "\n")
    return path

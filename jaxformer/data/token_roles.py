"""Which special token does what: of our own tokenizers by name, of those that came with a model by a note in the file.

A model that was trained elsewhere has a row for each of its tokens and no more. Its tokenizer must not grow, so a role
that none of its tokens has falls to the separator. Two more roles exist only there: `stop` ends a document, `source`
begins a source. Which token has which role stands beside the token in
`tokenizer.json`, in a field that the `tokenizers` library skips: {"id": 1, "content": "<s>", "roles": ["separator"]}.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxformer.errors import ConfigError

# Role of each special token -> its name in our tokenizers, then its names in others. One token may have two roles:
# BERT's [SEP] ends a span and separates documents, and RoBERTa's <s> starts both a row and a document.
SPECIALS = {
    "separator": (
        "<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "</s>", "<eos>", "<|end_of_text|>", "[BOS]", "[EOS]",
        "[SEP]",
    ),
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}  # fmt: skip


def roles_in(text: str) -> dict[str, str] | None:
    """Role -> token, as noted in the text of a tokenizer.json; None: nothing is, and missing tokens may be added.

    >>> roles_in('{"added_tokens": [{"id": 0, "content": "<s>", "roles": ["separator", "cls"]}]}')
    {'separator': '<s>', 'cls': '<s>'}
    """
    if '"roles"' not in text:
        return None
    tokens = json.loads(text).get("added_tokens", [])
    found = {role: token["content"] for token in tokens for role in token.get("roles", ())}
    return found if "separator" in found else None


def with_roles(text: str, roles: Mapping[str, str]) -> str:
    """The text of a tokenizer.json, whose tokens with a role are among its added ones, with the roles noted in it."""
    whole: dict[str, Any] = json.loads(text)
    for token in whole["added_tokens"]:
        if own := [role for role, name in sorted(roles.items()) if name == token["content"]]:
            token["roles"] = own
    return json.dumps(whole, indent=2, ensure_ascii=False)


def check_mask(tokenizer: Any, objective: str) -> None:
    """Raises ConfigError: a `Tokenizer` has no token that hides others, which this objective needs."""
    if not tokenizer.has("mask"):
        raise ConfigError(
            f"config.data.objective: {objective}; the tokenizer came with a model that has no mask token; accepted: "
            "data.tokenizer_file with one that has"
        )

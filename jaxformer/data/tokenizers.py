"""Text to token ids and back: bytes, characters, or byte-level BPE. All are stored as a `tokenizer.json` in the format
of the Hugging Face `tokenizers` library, so that they share the code to encode, decode and save.

Every tokenizer has the special tokens of `SPECIALS`. Text never becomes one of them, even if it spells its name.

>>> tokenizer = train("bytes", [], vocab_size=None)
>>> tokenizer.decode(tokenizer.encode("naïve"))
'naïve'
>>> int(tokenizer.token_bytes[tokenizer.encode("naïve")].sum())
6
"""

import functools
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hf

from jaxformer.data.token_roles import SPECIALS, roles_in, with_roles
from jaxformer.errors import ConfigError
from jaxformer.storage import files
from jaxformer.storage.address import place

FILE_NAME = "tokenizer.json"
MOST_IDS = 1 << 24  # there are tables over all ids; the largest known vocabularies have a million
MOST_BYTES = 1 << 30  # of a tokenizer.json
_NAMES = [names[0] for names in SPECIALS.values()]

# A word with the space before it; up to three digits; a run of other characters; a line end with the indentation after
# it (fewer tokens in code); spaces. A line end never joins the character before it, which `ingest.pieces` relies on.
_WORDS = (
    r"(?<=\p{L})'(?:[sdmt]|ll|ve|re)(?!\p{L})"
    r"| ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s*[\r\n][ \t]*|[^\S\r\n]+(?!\S)|\s+"
)


class Tokenizer:
    """Encodes text as token ids and decodes them.

    Attributes:
      vocab_size: number of ids, special tokens included.
      separator_id: starts every document.
      mask_id, cls_id, sep_id, pad_id, unk_id: the other special tokens.
      start_id, end_id: what a decoder's rows begin with, and what ends a source and a target: cls_id and sep_id.
      stop_id: what ends a document: the separator of the next one, unless the tokenizer has a token for it.
      source_start: ids that a source begins with; mostly none.
      special_ids: [n] int32, sorted; every id that encodes no text.
    """

    def __init__(self, backend: hf.Tokenizer, roles: Mapping[str, str] | None = None):
        """Wraps a tokenizer of the `tokenizers` library, whose ids stay unchanged.

        Args:
          roles: role -> one of its tokens, of a tokenizer that may not grow, see `data.token_roles`. None: a role that
            none of its special tokens has (of all tokens, if it declares none special) gets a new token at the end.
        """
        backend.no_padding()
        backend.no_truncation()
        if roles is None:
            declared = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
            existing = declared or backend.get_vocab(with_added_tokens=True)
            names = [next((name for name in known if name in existing), known[0]) for known in SPECIALS.values()]
        else:
            names = [roles.get(role, roles["separator"]) for role in SPECIALS]
        backend.add_special_tokens([*names, *(roles or {}).values()])
        backend.encode_special_tokens = True  # read their names as ordinary text; not saved in the file
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        ids: list[int] = [vocabulary[name] for name in names]  # in the order of SPECIALS
        self.separator_id, self.pad_id, self.cls_id, self.sep_id, self.mask_id, self.unk_id = ids
        self.start_id, self.end_id = self.cls_id, self.sep_id
        self._roles = roles
        self.stop_id = vocabulary[(roles or {}).get("stop", names[0])]
        self.source_start = [vocabulary[name] for role, name in (roles or {}).items() if role == "source"]
        self._by_name = {n: i for role, n, i in zip(SPECIALS, _NAMES, ids, strict=True) if self.has(role)}
        self._tokens = {index: token for token, index in vocabulary.items()}
        self.vocab_size = max(self._tokens) + 1
        if self.vocab_size > MOST_IDS:
            raise ValueError(f"id {self.vocab_size - 1}; accepted: 0 to {MOST_IDS - 1}")
        special = [index for index, token in backend.get_added_tokens_decoder().items() if token.special]
        self.special_ids = np.array(sorted(special), np.int32)

    def has(self, role: str) -> bool:
        """False if no token of a tokenizer that may not grow has a role of `SPECIALS`; its id is the separator's."""
        return self._roles is None or role in self._roles

    def with_tokens(self, names: Sequence[Sequence[str]]) -> "Tokenizer":
        """This tokenizer with more special tokens, those that it lacks with new ids at the end. `names`: of each token,
        the names that it may have; it gets the first if it has none of them.

        >>> tokenizer = train("bytes", [], vocab_size=None)
        >>> larger = tokenizer.with_tokens([("[R]", "[NLU]"), ("[MASK]",)])
        >>> larger.vocab_size - tokenizer.vocab_size, larger.ids_of([("[R]", "[NLU]")]).tolist()
        (1, [262])
        """
        known = self._backend.get_vocab(with_added_tokens=True) if names else {}
        new = [each[0] for each in names if not any(name in known for name in each)]
        if not new:
            return self
        backend = hf.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens(new)
        return Tokenizer(backend, self._roles)

    def ids_of(self, names: Sequence[Sequence[str]]) -> np.ndarray:
        """[n] int32 ids of the special tokens of `with_tokens`; -1 for one that it lacks."""
        known = self._backend.get_vocab(with_added_tokens=True)
        return np.array([next((known[n] for n in each if n in known), -1) for each in names], np.int32)

    def encode(self, text: str, *, strict: bool = False, specials: bool = False) -> np.ndarray:
        """[n] int32 ids of one text; no special token is added.

        Args:
          text: any text.
          strict: raise for characters outside the vocabulary instead of encoding them as [UNK].
          specials: encode the names of special tokens ("[MASK]") as those tokens. A space before [MASK] then belongs
            to the masked token if this vocabulary's tokens include their leading space.

        Raises:
          ConfigError: with `strict`, a character outside the vocabulary; always, text that cannot be encoded as UTF-8.
        """
        if specials:
            if self._leading_spaces:
                text = text.replace(" [MASK]", "[MASK]")
            pieces = re.split("(" + "|".join(map(re.escape, self._by_name)) + ")", text)
            return np.concatenate([
                np.array([self._by_name[piece]], np.int32) if i % 2 else self.encode(piece, strict=strict)
                for i, piece in enumerate(pieces)
            ])  # fmt: skip
        ids = self.encode_batch([text])[0]
        if strict and (ids == self.unk_id).any():
            unknown = sorted({c for c in text if (self.encode_batch([c])[0] == self.unk_id).any()})
            raise ConfigError(f"text: {', '.join(map(repr, unknown))} not in the vocabulary of this tokenizer")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """[n] int32 ids of each text, on all cores; ConfigError for text that has no UTF-8 form, or no tokens."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                at = error.start
                raise ConfigError(f"text: character {at}, {text[at]!a}, has no UTF-8 form") from None
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # a tokenizer from elsewhere whose unknown token is none of its tokens
            raise ConfigError(f"text: has words without a token, and unknown ones have none ({error})") from None
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_specials: bool = True) -> str:
        """The text of some ids; bytes that do not form a complete character become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_specials)

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """The UTF-8 bytes that each id encodes: [V]; empty for special tokens."""
        decoder = json.dumps(json.loads(self._backend.to_str())["decoder"], ensure_ascii=False)
        special = set(self.special_ids.tolist())
        if '"ByteLevel"' in decoder:
            byte_of = {character: byte for byte, character in enumerate(_byte_characters())}

            def piece(token: str) -> bytes:
                return bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
        else:
            word_piece, metaspace = '"WordPiece"' in decoder, "▁" in decoder

            def piece(token: str) -> bytes:
                if word_piece:
                    return token[2:].encode() if token.startswith("##") else b" " + token.encode()
                if metaspace and re.fullmatch("<0x[0-9A-F]{2}>", token):
                    return bytes([int(token[3:5], 16)])
                return (token.replace("▁", " ") if metaspace else token).encode()

        text_of = {i: token for i, token in self._tokens.items() if i not in special}
        return [piece(text_of[i]) if i in text_of else b"" for i in range(self.vocab_size)]

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """[V] int32, how many UTF-8 bytes of text each id encodes; 0 for special tokens."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """[V] bool: the token begins with something that cannot continue a word (space, line end, punctuation)."""
        return np.array([_breaks(piece, 0) for piece in self.pieces], bool)

    @functools.cached_property
    def word_ends(self) -> np.ndarray:
        """[V] bool: the token ends with something that cannot continue a word, so that the next one begins one."""
        return np.array([_breaks(piece, -1) for piece in self.pieces], bool)

    @functools.cached_property
    def _leading_spaces(self) -> bool:
        return any(piece.startswith(b" ") and piece[1:2].isalpha() for piece in self.pieces)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits, equal for two tokenizers only if they behave the same."""
        about = "" if self._roles is None else json.dumps(self._roles, sort_keys=True)
        return hashlib.sha256((self._backend.to_str() + about).encode()).hexdigest()[:16]

    def content(self, *, plain: bool = False) -> bytes:
        """The bytes that `save` writes; `plain`: without what only we read, as the library itself writes them."""
        text = self._backend.to_str(pretty=True)
        return (text if plain or self._roles is None else with_roles(text, self._roles)).encode()

    def save(self, directory: str | Path) -> Path:
        """Writes `tokenizer.json` into a directory and returns its path; a link there is replaced, not followed.

        Raises:
          OSError: it cannot be written.
        """
        path = place(directory) / FILE_NAME
        files.write_atomically(path, self.content())
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer in a `tokenizer.json` or a directory that has one; those of other projects work too.

        Raises:
          ConfigError: no such file, not a tokenizer, or one with an id beyond MOST_IDS.
        """
        path = place(path).expanduser()
        path = path / FILE_NAME if path.is_dir() else path
        try:
            text = files.read_bytes(path, MOST_BYTES, follow=True).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"config.data.tokenizer_file: {path}: {reason}") from None
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> "Tokenizer":
        """The tokenizer of the text of a `tokenizer.json`; ConfigError, which names `path`, if it is not one."""
        try:
            return cls(hf.Tokenizer.from_str(text), roles_in(text))
        except BaseException as error:  # the library raises Exception, and Rust panics, which are not an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"config.data.tokenizer_file: {path} is not a tokenizer ({reason})") from None


def train(kind: str, texts: Iterable[str], vocab_size: int | None) -> Tokenizer:
    """A tokenizer trained on some texts; the same texts give the same tokenizer.

    Args:
      kind: "bytes" (the 256 bytes; reads no text), "chars" (the characters of the texts) or "bpe" (byte-level BPE).
      texts: training texts.
      vocab_size: ids of "bpe", special tokens included; short texts may give fewer. None for the other kinds.

    Raises:
      ConfigError: a vocabulary too small for the 256 bytes.
    """
    return {"bytes": _bytes, "chars": lambda: _chars(texts), "bpe": lambda: _bpe(texts, vocab_size)}[kind]()


def check_vocab_size(vocab_size: int | None) -> int:
    """`vocab_size`; ConfigError if it is too small for the 256 bytes and the special tokens."""
    least = len(_NAMES) + 256
    if vocab_size is None or vocab_size < least:
        raise ConfigError(f"config.data.tokenizer_vocab: {vocab_size}; byte-level BPE needs at least {least}")
    return vocab_size


def _bytes() -> Tokenizer:
    backend = _without_merges(_byte_characters(), None)
    backend.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = hf.decoders.ByteLevel()
    return Tokenizer(backend)


def _chars(texts: Iterable[str]) -> Tokenizer:
    backend = _without_merges(sorted(set(itertools.chain.from_iterable(texts))), SPECIALS["unk"][0])
    backend.decoder = hf.decoders.Fuse()
    return Tokenizer(backend)


def _without_merges(characters: list[str], unknown: str | None) -> hf.Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*_NAMES, *characters])}
    return hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=[], unk_token=unknown, fuse_unk=False))


def _bpe(texts: Iterable[str], vocab_size: int | None) -> Tokenizer:
    vocab_size = check_vocab_size(vocab_size)
    backend = hf.Tokenizer(hf.models.BPE())
    words: Any = hf.pre_tokenizers.Split(hf.Regex(_WORDS), "isolated")
    in_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = hf.pre_tokenizers.Sequence([words, in_bytes])
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_NAMES, initial_alphabet=_byte_characters(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)


@functools.cache
def _byte_characters() -> list[str]:
    """The character that represents each byte in a byte-level vocabulary (GPT-2's table): [256]."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


def _breaks(piece: bytes, end: int) -> bool:
    """True if the character at one end of a token (0 or -1) cannot be in a word; an incomplete character can."""
    text = piece.decode(errors="replace")
    if not text or text[end] == "\ufffd":
        return False
    return not (text[end].isalnum() or unicodedata.category(text[end]).startswith("M"))

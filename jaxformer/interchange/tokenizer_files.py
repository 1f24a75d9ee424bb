"""Tokenizers of the library transformers as ours, and ours as theirs: tokenizer.json and what stands beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from jaxformer.config import DataConfig, ModelConfig
from jaxformer.data.token_roles import SPECIALS
from jaxformer.data.tokenizers import FILE_NAME, MOST_BYTES, Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.interchange.tensor_files import read_json
from jaxformer.storage import files

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# Role -> what it is called there, in the order in which it is looked for; `start` is config.json's decoder_start.
NAMES = {
    "gpt": {"separator": ("bos", "eos", "cls", "separator"), "stop": ("eos",)},
    "bert": {"separator": ("cls", "bos", "separator"), "stop": ("sep", "eos")},
    "encoder_decoder": {
        "separator": ("bos", "cls", "eos", "separator"), "stop": ("eos", "sep"), "cls": ("start", "pad"),
        "sep": ("eos", "sep"),
    },
}  # fmt: skip
ALL = {"pad": ("pad",), "cls": ("cls", "bos"), "sep": ("sep", "eos"), "mask": ("mask",), "unk": ("unk",)}


def read_tokenizer(file: str | Path, about: Mapping[str, Any], family: str) -> Tokenizer:
    """The tokenizer of a model, which has the tokens that it has, and gets no more.

    Args:
      file: tokenizer.json; what its special tokens are for is read from tokenizer_config.json and
        special_tokens_map.json beside it, if they are there.
      about: the model's config.json, which names some by their ids.
      family: of ours.

    Raises:
      ConfigError: it is missing, or no tokenizer, or no token of it could begin a document.
    """
    path = Path(file)
    try:
        text = files.read_bytes(path, MOST_BYTES, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from None
    try:
        backend = hf.Tokenizer.from_str(text)
    except BaseException as error:  # the library raises Exception, and Rust panics, which are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{path}: is not a tokenizer ({' '.join(str(error).split())[:200]})") from None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    usual = {role: next((n for n in SPECIALS[role] if n in special), None) for role in SPECIALS}
    named = {**usual, **_by_id(about, backend), **_by_name(path.parent, backend)}
    wanted = {**ALL, **NAMES[family]}
    found = {role: [named[word] for word in words if named.get(word)] for role, words in wanted.items()}
    roles = {role: str(tokens[0]) for role, tokens in found.items() if tokens}
    if "separator" not in roles:
        raise ConfigError(
            f"{path}: has no token that begins or ends a text; accepted: one that {CONFIG} or config.json names, as "
            "bos_token or eos_token"
        )
    if family == "encoder_decoder" and about.get("model_type") == "bart" and "bos" in named:
        roles["source"] = str(named["bos"])
    return Tokenizer(backend, roles)


def _by_id(about: Mapping[str, Any], backend: hf.Tokenizer) -> dict[str, str]:
    """Special tokens that config.json names: {"bos": "<s>"}; of several the first."""
    found: dict[str, str] = {}
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    for name, field in (
        *((n, f"{n}_token_id") for n in ("bos", "eos", "pad", "sep")),
        ("start", "decoder_start_token_id"),
    ):
        value = about.get(field)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and value in (special or range(backend.get_vocab_size())):
            found[name] = str(backend.id_to_token(value))
    return found


def _by_name(folder: Path, backend: hf.Tokenizer) -> dict[str, str]:
    """Tokens that the files beside a tokenizer name: {"bos": "<s>"}."""
    found = {}
    for file in ("special_tokens_map.json", CONFIG):
        for name, value in (read_json(folder / file) if (folder / file).is_file() else {}).items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str) and backend.token_to_id(token) is not None:
                found[name.removesuffix("_token")] = token
    return found


def read_about(folder: str | Path) -> dict[str, Any] | None:
    """What tokenizer_config.json says beside a model, to be written again, with the template of conversations that may
    be in a file of its own; None: it is not there."""
    path, template = Path(folder) / CONFIG, Path(folder) / TEMPLATE
    if not path.is_file():
        return None
    about = read_json(path)
    if template.is_file():
        about.setdefault("chat_template", files.read_bytes(template, MOST_BYTES).decode(errors="replace"))
    return about


def write_tokenizer(
    directory: str | Path, tokenizer: Tokenizer, config: ModelConfig, data: DataConfig, about: Any = None
) -> None:
    """Writes a tokenizer beside a model.

    Args:
      directory: of the model.
      tokenizer: of the model.
      config: of the model.
      data: of the run; where it has labels, the tokenizer adds the special tokens that an example has.
      about: content of tokenizer_config.json; None: written from what the tokenizer has.
    """
    folder, content = Path(directory), tokenizer.content(plain=True)
    if about is None:
        ids = {role: getattr(tokenizer, f"{role}_id") for role in SPECIALS if tokenizer.has(role)}
        ids |= {"bos": ids.pop("separator"), "eos": tokenizer.stop_id}
        roles = {f"{role}_token": tokenizer.decode([each], skip_specials=False) for role, each in ids.items()}
        # Without this, sentence types go into every model, and GPT-2 adds embeddings of them.
        names = ["input_ids", "token_type_ids", "attention_mask"] if config.token_types else None
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context_length, **roles,
                 "model_input_names": names or ["input_ids", "attention_mask"]}  # fmt: skip
        if data.labelled is not None and config.head is not None:
            content = _framed(content, tokenizer, data.labelled.opening == "cls")
    files.write_atomically(folder / FILE_NAME, content)
    files.write_atomically(folder / CONFIG, json.dumps(about, indent=2) + "\n")


def _framed(content: bytes, tokenizer: Tokenizer, cls: bool) -> bytes:
    """A tokenizer.json that begins, parts and ends texts as `labelled_rows.frame_of` does."""
    made = hf.Tokenizer.from_str(content.decode())
    first, end = tokenizer.cls_id if cls else tokenizer.separator_id, tokenizer.sep_id
    names = {each: str(made.id_to_token(each)) for each in (first, end)}
    last = f" {names[end]}:0" if cls else ""
    template = hf.processors.TemplateProcessing(
        single=f"{names[first]}:0 $A:0{last}",
        pair=f"{names[first]}:0 $A:0 {names[end]}:0 $B:1" + (f" {names[end]}:1" if cls else ""),
        special_tokens=[(name, each) for each, name in names.items()],
    )
    before = made.post_processor
    keeps = before is not None and before.num_special_tokens_to_add(is_pair=False) == 0  # what frames texts goes
    made.post_processor = hf.processors.Sequence([before, template]) if keeps else template
    return made.to_str(pretty=True).encode()


def special_ids(tokenizer: Tokenizer, family: str) -> dict[str, int]:
    """Fields of config.json that name token ids."""
    found = {"bos_token_id": tokenizer.separator_id, "eos_token_id": tokenizer.stop_id}
    if tokenizer.has("pad"):
        found["pad_token_id"] = tokenizer.pad_id
    if family == "encoder_decoder":
        found |= {"eos_token_id": tokenizer.end_id, "decoder_start_token_id": tokenizer.start_id}
    return found

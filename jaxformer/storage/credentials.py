"""Masks values that look like credentials before a command line or a config is written to disk.

The name of a value decides: its last word is "token", "key", "auth", ..., or any of its words is "secret", "password",
... `data.tokenizer_file`, `model.bert.token_types` and `chunk_tokens` are not credentials.

>>> mask_command(["pretrain.py", "--hub-token=abc", "--api_key", "xyz", "--config.data.tokenizer_file=t.json"])
['pretrain.py', '--hub-token=***', '--api_key', '***', '--config.data.tokenizer_file=t.json']
>>> mask_text("s3://me:hunter2@host/text.txt?access_token=abc&part=1")
's3://***@host/text.txt?access_token=***&part=1'
>>> mask({"data": {"files": ["https://me:pw@host/a"], "hub_token": "abc", "chunk_tokens": 64}})
{'data': {'files': ['https://***@host/a'], 'hub_token': '***', 'chunk_tokens': 64}}
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
_ANYWHERE = frozenset(
    {"secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase", "credential", "credentials"}
)
_AT_THE_END = frozenset({"token", "key", "auth", "authorization", "apikey", "bearer"})
# "user:password@" in a URL: both are masked, because a token is often given as the user.
_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
# name=value anywhere in a text: flags, a URL's query, the argument of a config file.
_ASSIGNED = re.compile(r"(?<![\w.-])([\w.-]+)=([^\s&;,'\"]+)")


def is_credential(name: str) -> bool:
    """True if a flag or field of this name is likely to hold a credential.

    >>> [name for name in ("HF_TOKEN", "hub.apiKey", "--db-password", "secret_access_key") if is_credential(name)]
    ['HF_TOKEN', 'hub.apiKey', '--db-password', 'secret_access_key']
    >>> [name for name in ("tokenizer", "language_tokens", "token_types", "monkey", "num_kv_heads", "author")
    ...  if is_credential(name)]
    []
    """
    last = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.rsplit(".", 1)[-1])
    words = [word for word in re.split(r"[^a-z0-9]+", last.lower()) if word]
    return bool(words) and (words[-1] in _AT_THE_END or not _ANYWHERE.isdisjoint(words))


def mask_text(text: str) -> str:
    """Masks user and password in URLs, and the values of credentials in `name=value`."""
    text = _USER.sub(f"{MASK}@", text)
    return _ASSIGNED.sub(lambda found: f"{found[1]}={MASK}" if is_credential(found[1]) else found[0], text)


def mask_command(words: Sequence[str]) -> list[str]:
    """Masks the words of a command line: the values of credentials in `--name=value` and `--name value`."""
    out: list[str] = []
    for word in words:
        flag, assigned, _ = word.partition("=")
        before = out[-1] if out else ""
        if flag.startswith("-") and assigned and is_credential(flag):
            out.append(f"{flag}={MASK}")
        elif before.startswith("-") and "=" not in before and is_credential(before) and not word.startswith("--"):
            out.append(MASK)
        else:
            out.append(mask_text(word))
    return out


def mask_change(line: str) -> str:
    """Masks a line "field: old -> new" of `config.diff`."""
    name, colon, _ = line.partition(": ")
    return f"{name}: {MASK}" if colon and is_credential(name) else mask_text(line)


def mask(value: Any, name: str = "") -> Any:
    """Masks nested data: the values of fields that are credentials by name, and `mask_text` on all other text."""
    if isinstance(value, Mapping):
        return {key: mask(item, str(key)) for key, item in value.items()}
    if value is not None and name and is_credential(name):
        return MASK
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Masks a run's manifest, whatever version wrote it.

    >>> mask_manifest({"command": ["fit.py", "--key", "abc"], "overrides": ["hub.token: None -> 'abc'"], "seed": 0})
    {'command': ['fit.py', '--key', '***'], 'overrides': ['hub.token: ***'], 'seed': 0}
    """
    shown = mask(manifest)
    if isinstance(manifest.get("command"), list):
        shown["command"] = mask_command([str(word) for word in manifest["command"]])
    if isinstance(manifest.get("overrides"), list):
        shown["overrides"] = [mask_change(str(line)) for line in manifest["overrides"]]
    return shown

"""JSON objects with a checksum of themselves, and plain JSON files.

>>> made = add_checksum({"step": 110})
>>> verified(made), verified({**made, "step": 115}), verified({"step": 110})
({'step': 110}, None, None)
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

from jaxformer.storage import files

FIELD = "seal"  # a file format: existing files have this name
MOST_BYTES = 2**30


def add_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with a checksum of itself, which does not depend on the order of fields or on whitespace."""
    return {**body, FIELD: zlib.crc32(json.dumps(body, sort_keys=True).encode())}


def verified(value: Any) -> dict[str, Any] | None:
    """The inverse of `add_checksum`; None if the checksum is absent or does not match."""
    if not isinstance(value, dict):
        return None
    body = {name: item for name, item in value.items() if name != FIELD}
    try:
        return body if add_checksum(body) == value else None
    except RecursionError:
        return None


def read(path: str | os.PathLike) -> Any:
    """The value in a JSON file.

    Raises:
      OSError: it cannot be read, or is not a regular file; ValueError: it is not JSON, or nested too deeply.
    """
    return parse(files.read_bytes(path, MOST_BYTES, follow=True))


def read_verified(path: str | os.PathLike, most_bytes: int) -> dict[str, Any] | None:
    """The object that `add_checksum` made, from a file; None if the file is missing, a link, or holds anything else."""
    try:
        return verified(parse(files.read_bytes(path, most_bytes)))
    except (OSError, ValueError):
        return None


def digest(content: bytes) -> str:
    """Hash of a file's content, 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError: it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not of text in UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None

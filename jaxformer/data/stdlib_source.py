"""The source of Python's own standard library as text, split by a hash of the names of its files."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jaxformer.data.unpacked_files import OpenFile
from jaxformer.errors import ConfigError

# Not the library's own: installed packages, tests, programs, and what differs from build to build.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)
# One file in twenty by the hash of its name. Of the twenty residues this one holds out 550-560 KB on 3.11, 3.12 and
# 3.13 with no file over 75 KB, so that no single file decides the held-out loss.
_HELD_OUT_MODULUS, _HELD_OUT_RESIDUE = 20, 13


def stdlib_files(split: str | None = None) -> list[str]:
    """Paths of the standard library's sources relative to its root, with "/" between folders, sorted.

    Args:
      split: one split only; None: both. The split goes by a hash of the path, so it is the same on every machine.
    """
    root = stdlib_root()
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_EXCLUDED and not name.startswith("config-")]
        relative = Path(folder).relative_to(root)
        found += [
            (relative / name).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not found:
        raise ConfigError(f"config.data.source: stdlib: no Python sources under {root}; set data.files instead")
    return sorted(name for name in found if split is None or (split == "validation") == _held_out(name))


def _held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_MODULUS == _HELD_OUT_RESIDUE


def stdlib_root() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_texts(split: str, open_file: OpenFile) -> Iterator[str]:
    """The text of each file of a split."""
    root = stdlib_root()
    for name in stdlib_files(split):
        try:
            with open_file(root / name) as file:
                text = file.read().decode()
        except (UnicodeDecodeError, OSError):  # an interpreter's file is not the user's mistake
            continue
        if text and not text.isspace():
            yield text

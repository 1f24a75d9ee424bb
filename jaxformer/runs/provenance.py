"""By which code a run is made: versions of packages, a commit, and the files of kinds that a config file brought."""

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

from jaxformer.config import Config, registry
from jaxformer.storage import json_checksum

VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def version(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the checkout that this file belongs to, with "+changes" if it is not clean; None outside one.

    An installed package may lie inside a checkout of something else, whose commit says nothing of it.
    """
    options: Any = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 10, "check": True}
    commands = (
        ["git", "ls-files", "--error-unmatch", __file__],
        ["git", "rev-parse", "HEAD"],
        ["git", "status", "--porcelain", "--untracked-files=no"],
    )
    try:
        _, commit, edited = (subprocess.run(command, **options).stdout.strip() for command in commands)
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if edited else "")


def own_files(config: Config) -> dict[str, str]:
    """Name -> digest of the files in which the run's own kinds are written."""
    found = [path for path in map(Path, registry.own_files(config)) if path.is_file()]
    return {path.name: json_checksum.digest(path.read_bytes()) for path in found}

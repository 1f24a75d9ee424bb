"""What a run's directory says about it, and whether it may be gone on with.

`manifest.json` is written once, before the first step: the whole config, what the command line changed, versions,
devices, data fingerprint, git commit, seed. A directory whose manifest names another config is refused with a diff.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxformer.config import Config, ConfigError, DistributedConfig, diff, from_mapping, to_dict

FILE_NAME = "manifest.json"
FOLDERS = ("checkpoints", "runs", "figures", "tensorboard")  # that runs and studies write into
# May change between two starts of one run: they decide where and how it runs, not what it computes.
OPERATIONAL = ("workdir", "mesh", "distributed", "checkpoint", "tensorboard", "compilation_cache", "data.cache_dir")
# Which batches a config and a seed give: 2 since the random spans of data.pairs are cut as the true ones are.
BATCHES = 2
VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def describe(config: Config, overrides: list[str], source: str, fingerprint: str) -> dict[str, Any]:
    """The manifest of a run that starts now.

    Args:
      config: resolved, vocabulary size filled in.
      overrides: lines of what the command line changed.
      source: the config file.
      fingerprint: of the corpus.
    """
    devices = jax.devices()
    return {
        "config": to_dict(config),
        "config_file": source,
        "overrides": overrides,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "seed": config.seed,
        "data_fingerprint": fingerprint,
        "batches": BATCHES,
        "git_commit": _git_commit(),
        "versions": {"jaxformer": _version("jaxformer"), "python": platform.python_version()}
        | {name: _version(name) for name in VERSIONS},
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
        "processes": jax.process_count(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read(workdir: str | Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
      ConfigError: there is no run in `workdir`, or its manifest is damaged.
    """
    path = Path(workdir) / FILE_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["config"], manifest["data_fingerprint"]
    except FileNotFoundError:
        raise ConfigError(f"workdir {workdir}: holds no run (no {FILE_NAME})") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"workdir {workdir}: {FILE_NAME} cannot be read ({error})") from None
    return manifest


def read_config(workdir: str | Path) -> Config:
    """The config of the run in `workdir`, which may come from elsewhere: where this machine writes, and whom it talks
    to, is not taken from it. Raises ConfigError as `read`."""
    config: Config = from_mapping(read(workdir)["config"])
    return replace(
        config,
        workdir=str(workdir),
        data=replace(config.data, cache_dir=None),
        distributed=DistributedConfig(),
        tensorboard=False,
    )


def check_workdir(config: Config, free: Sequence[str] = ()) -> None:
    """Looks, before anything is computed, whether `config.workdir` can be written and is free or holds this run.

    Writes nothing but the empty directory.

    Args:
      config: of the run that is to start.
      free: sections and fields, beside OPERATIONAL, in which it may differ from the one found.

    Raises:
      ConfigError: not a directory, not writable, not empty and not a run, or a run of another config (with a diff).
    """
    workdir = Path(config.workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        found = [path.name for path in workdir.iterdir()]
    except OSError as error:
        raise ConfigError(f"config.workdir: {workdir} cannot be used ({error.strerror})") from None
    for name in FOLDERS:
        if (workdir / name).is_symlink():
            raise ConfigError(
                f"config.workdir: {workdir / name} is a symbolic link, and nothing is written through one inside a run"
                "; accepted: a folder (config.workdir itself may be a link)"
            )
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise ConfigError(f"config.workdir: {workdir} cannot be written to")
    if FILE_NAME in found:
        # Fields that this version has and that one had not take their defaults.
        stored = to_dict(from_mapping(read(workdir)["config"], cls=type(config)))
        new = to_dict(config)
        if config.model.vocab_size is None:  # filled in from the tokenizer later
            new["model"]["vocab_size"] = stored["model"]["vocab_size"]
        if changes := diff(_essential(stored, free), _essential(new, free)):
            raise ConfigError(
                f"config.workdir: {workdir} holds a run of another config ({'; '.join(changes)}); "
                "give this one a --config.workdir of its own"
            )
    elif foreign := [name for name in found if not name.startswith(".")]:
        raise ConfigError(
            f"config.workdir: {workdir} is not empty and holds no run of ours ({', '.join(sorted(foreign)[:3])}); "
            "accepted: a new or empty directory, or one of a run to go on with"
        )


def write_or_check(manifest: Mapping[str, Any], config: Config) -> None:
    """Writes the manifest of a new run; of one that goes on, checks that the data are still the same.

    Raises:
      ConfigError: the corpus is another one, this version would cut other batches from it, or the manifest cannot be
        written.
    """
    workdir = Path(config.workdir)
    path = workdir / FILE_NAME
    if path.exists():
        stored = read(workdir)
        if stored["data_fingerprint"] != manifest["data_fingerprint"]:
            raise ConfigError(
                f"config.workdir: {workdir} was trained on other text (corpus {stored['data_fingerprint']}, now "
                f"{manifest['data_fingerprint']}); give this run a --config.workdir of its own"
            )
        if config.data.pairs and stored.get("batches", 1) != BATCHES:
            raise ConfigError(
                f"config.data.pairs: True; {workdir} holds a run of a version that made other pairs (batches "
                f"{stored.get('batches', 1)}, now {BATCHES}); accepted: that version, or a --config.workdir of its own"
            )
        if stored["config"]["model"]["vocab_size"] != config.model.vocab_size:
            raise ConfigError(
                f"config.model.vocab_size: {config.model.vocab_size}; {workdir} holds a run with "
                f"{stored['config']['model']['vocab_size']}"
            )
        return
    half = workdir / f".{FILE_NAME}.{os.getpid()}"
    try:
        half.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        half.replace(path)
    except OSError as error:
        raise ConfigError(f"config.workdir: {path} cannot be written ({error.strerror})") from None


def identity(config: Config, fingerprint: str) -> dict[str, str]:
    """What all processes of one run must have alike: text, versions and config, but for where each keeps its cache."""
    told = to_dict(config)
    told["distributed"] = told["data"]["cache_dir"] = told["data"]["tfds_dir"] = None
    lines = json.dumps(told, sort_keys=True)
    return {
        "text": f"corpus {fingerprint}",
        "config": hashlib.blake2b(lines.encode(), digest_size=8).hexdigest(),
        "version of jax": str(_version("jax")),
    }


def check_shared(config: Config, seconds: float = 30.0) -> None:
    """Looks whether this process sees the manifest that process 0 has written; a network file system gets some time.

    Raises:
      ConfigError: it does not.
    """
    path, until = Path(config.workdir) / FILE_NAME, time.monotonic() + seconds
    while FILE_NAME not in os.listdir(path.parent):
        if time.monotonic() > until:
            raise ConfigError(
                f"config.workdir: {path.absolute()} is not there, though process 0 wrote it; accepted: a directory "
                "that all processes share"
            )
        time.sleep(0.1)


def _essential(config: dict[str, Any], free: Sequence[str]) -> dict[str, Any]:
    """The config without its operational fields."""
    kept = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
    for name in (*OPERATIONAL, *free):
        section, _, field = name.partition(".")
        if field:
            kept[section].pop(field, None)
        else:
            kept.pop(section, None)
    return kept


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the checkout this file lies in, "+changes" if it is not clean; None outside git."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here, capture_output=True, text=True, timeout=10, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if status.strip() else "")

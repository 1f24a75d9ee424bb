"""A run's manifest, and the checks before a run starts or resumes in a directory.

`manifest.json` is written once, before the first step: the whole config, what the command line changed, versions,
devices, data fingerprint, git commit, seed, and a checksum of all this. A directory whose manifest has another config
is refused with a diff, unless that run left nothing worth keeping: no checkpoint, and only the record of its start.
"""

import copy
import hashlib
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxformer.config import Config, DistributedConfig, TrackingConfig, diff, from_mapping, to_dict
from jaxformer.config.fields import shown
from jaxformer.config.loading import blamed, is_loaded, split
from jaxformer.errors import ConfigError
from jaxformer.runs import changes, provenance
from jaxformer.storage import credentials, files, json_checksum
from jaxformer.storage.address import place

C = TypeVar("C", bound=Config)

FILE_NAME = "manifest.json"
# May change when a run resumes: they decide where and how it runs, not what it computes.
OPERATIONAL = (
    "workdir", "execution", "mesh", "distributed", "checkpoint", "tracking", "train.profile_steps", "compilation_cache",
    "data.cache_dir",
)  # fmt: skip
# Version of the rule from config and seed to batches; 2: random spans of data.pairs are cut like the true ones.
BATCHES = 2
# What a run or a study writes into its directory; none of it is ever a link.
OWN_FILES = (
    FILE_NAME, "records.jsonl", "records.damaged.jsonl", "tokenizer.json", "fit.json", "report.html", "trackers.json",
    "mlflow.db", "config.py",
)  # fmt: skip
OWN_FOLDERS = ("checkpoints", "tensorboard", "profile", "wandb", "runs", "trunks", "figures")


def describe(
    config: Config, overrides: list[str], source: str, fingerprint: str, tokenizer: str | None = None
) -> dict[str, Any]:
    """The manifest of a run that starts now, with anything that looks like a credential masked.

    Args:
      config: resolved, vocabulary size filled in.
      overrides: what the command line changed, one line each.
      source: the config file.
      fingerprint: of the corpus.
      tokenizer: `json_checksum.digest` of tokenizer.json; None if the run writes none.
    """
    devices = jax.devices()
    masked = credentials.mask(to_dict(config))
    about = json.dumps([essential(masked, ()), fingerprint], sort_keys=True)
    return {
        "config": masked,
        "config_file": credentials.mask_text(source),
        "overrides": [credentials.mask_change(line) for line in overrides],
        "command": credentials.mask_command([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "fingerprint": json_checksum.digest(about.encode()),
        "tokenizer": tokenizer,
        "seed": config.seed,
        "data_fingerprint": fingerprint,
        "batches": BATCHES,
        **({"own_files": own} if (own := provenance.own_files(config)) else {}),
        "git_commit": provenance.git_commit(),
        "versions": {"jaxformer": provenance.version("jaxformer"), "python": platform.python_version()}
        | {name: provenance.version(name) for name in provenance.VERSIONS},
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
        "processes": jax.process_count(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read(workdir: str | Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
      ConfigError: there is no run in `workdir`, or its manifest was damaged or edited.
    """
    path = place(workdir) / FILE_NAME
    try:
        found = json_checksum.read(path)
    except FileNotFoundError:
        raise ConfigError(f"workdir {workdir}: holds no run (no {FILE_NAME})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"workdir {workdir}: {FILE_NAME} cannot be read ({reason})") from None
    # Manifests of earlier versions have neither a checksum nor a fingerprint.
    earlier = isinstance(found, dict) and json_checksum.FIELD not in found and "fingerprint" not in found
    manifest = found if earlier else json_checksum.verified(found)
    if manifest is None:
        raise ConfigError(
            f"workdir {workdir}: {FILE_NAME} is damaged or was edited (its checksum does not match); accepted: the "
            "file as it was written"
        )
    for name, kind in (("config", dict), ("data_fingerprint", str), ("fingerprint", str)):
        if not isinstance(manifest.get(name, "" if name == "fingerprint" else None), kind):
            raise ConfigError(f"workdir {workdir}: {FILE_NAME} cannot be read ({name}: {shown(manifest.get(name))})")
    return manifest


def read_config(workdir: str | Path, cls: type[C] = Config) -> C:  # type: ignore[assignment]
    """The config of the run in `workdir`, which may come from another machine: paths to write to and hosts to contact
    are not taken from it. Raises ConfigError as `read`, or if it is not the config of a `cls`."""
    config = _config_of(workdir, read(workdir), cls)
    return replace(
        config,
        workdir=str(workdir),
        data=replace(config.data, cache_dir=None),
        distributed=DistributedConfig(),
        tracking=TrackingConfig(),
    )


def _config_of(workdir: str | Path, manifest: Mapping[str, Any], cls: type[C]) -> C:
    """The manifest's config; fields that its version did not have take their defaults."""
    file = str(manifest.get("config_file") or "")
    try:
        with blamed(split(file)[0], passing=(ConfigError,)):
            config = from_mapping(changes.with_known_trackers(manifest["config"]), cls=cls)
    except ConfigError as error:
        missing = file and not is_loaded(file) and " is not one of " in str(error)
        hint = f"; if {file} brings it, give --config={file}" if missing else ""
        raise ConfigError(f"workdir {workdir}: {FILE_NAME}: {error}{hint}") from None
    if config.model.vocab_size is None:
        raise ConfigError(f"workdir {workdir}: {FILE_NAME}: config.model.vocab_size: None; a run that started has one")
    return config


def fingerprints(workdir: str | Path, config: Config | None = None) -> tuple[str, list[str]]:
    """The fingerprint of the run in `workdir`, and others that its checkpoints may have instead.

    The fingerprint covers the text and the config without the fields that may change on resume (`OPERATIONAL`). It is
    read from the manifest, not recomputed, so that it stays the same when later versions add fields. Checkpoints of
    versions before that have a hash of the whole config at that start.

    Args:
      workdir: of the run.
      config: of the run that starts now; None if none does.
    """
    manifest = read(workdir)
    if "fingerprint" in manifest:
        return manifest["fingerprint"], []
    moved = {**manifest["config"], "workdir": str(workdir)}
    return _whole(manifest["config"]), [_whole(moved), *([] if config is None else [_whole(to_dict(config))])]


def _whole(config: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()


def tokenizer_is_kept(workdir: str | Path) -> bool:
    """True if tokenizer.json exists and matches the manifest; those of earlier versions have no digest to match.

    Raises:
      ConfigError: it exists and cannot be read.
    """
    expected = read(workdir).get("tokenizer")
    path = place(workdir) / "tokenizer.json"
    try:
        found = json_checksum.digest(files.read_bytes(path, json_checksum.MOST_BYTES, follow=True))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"workdir {workdir}: tokenizer.json cannot be read ({error.strerror})") from None
    return expected in (None, found)


def nothing_kept(workdir: str | Path) -> bool:
    """True if the run in `workdir` left nothing worth keeping: no checkpoint, and only the record of its start.

    Files that cannot be read count as worth keeping.
    """
    workdir = place(workdir)
    found = (path.name for pattern in ("checkpoints/*", "trunks/*/*", "runs/*") for path in workdir.glob(pattern))
    if any(".orbax-checkpoint-tmp" not in name and name[0] != "." for name in found):
        return False
    try:
        lines = files.read_bytes(workdir / "records.jsonl", 2**16).split(b"\n")
        return all(not line or json_checksum.parse(line)["kind"] == "event" for line in lines[:-1])
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_own_files(workdir: str | Path) -> None:
    """Checks that no link leads out of the directory, which may come from another machine, before anything is written.

    Raises:
      ConfigError: what a run writes is a symbolic link, or a folder where a file should be, or the other way round.
    """
    workdir = place(workdir)
    there = {path.name for path in workdir.iterdir()} if workdir.is_dir() else set()
    own = [workdir / name for name in (*OWN_FILES, *OWN_FOLDERS) if name in there]
    for path in own:
        if not path.is_symlink() and path.exists() and path.is_dir() != (path.name in OWN_FOLDERS):
            kind = "a folder" if path.name in OWN_FOLDERS else "a file"
            raise ConfigError(f"config.workdir: {path} is not {kind}; accepted: what a jaxformer run writes there")
    # wandb's library keeps links to its newest files itself.
    patterns = [f"{name}/*" for name in (*OWN_FOLDERS, "trunks/*") if name.split("/")[0] in there - {"wandb"}]
    for path in [*own, *(path for pattern in patterns for path in sorted(workdir.glob(pattern)))]:
        if path.is_symlink():
            raise ConfigError(
                f"config.workdir: {path} is a symbolic link, which is not followed; accepted: what a jaxformer run "
                "writes there"
            )


def check_workdir(config: Config, free: Sequence[str] = ()) -> None:
    """Checks, before anything is computed, that `config.workdir` is writable and either empty or holds this run.

    Creates the directory, and writes nothing else.

    Args:
      config: of the run that starts now.
      free: sections and fields, besides OPERATIONAL, that may differ from the run found.

    Raises:
      ConfigError: not a directory, not writable, not empty and not a run, or a run of another config (with a diff).
    """
    workdir = place(config.workdir)
    try:
        found = files.open_folder(workdir)
    except OSError as error:
        raise ConfigError(f"config.workdir: {workdir} cannot be used ({error.strerror})") from None
    if not files.writable(workdir):
        raise ConfigError(f"config.workdir: {workdir} cannot be written to")
    check_own_files(workdir)
    if FILE_NAME in found and nothing_kept(workdir):
        read(workdir)
    elif FILE_NAME in found:
        stored = credentials.mask(to_dict(_config_of(workdir, read(workdir), type(config))))
        new = credentials.mask(to_dict(config))
        changes.fill_in(new, stored)
        if changed := diff(essential(stored, free), essential(new, free)):
            raise ConfigError(
                f"config.workdir: {workdir} holds a run of another config ({'; '.join(changed)}); "
                "give this one a --config.workdir of its own"
            )
    elif foreign := [name for name in found if not name.startswith(".")]:
        raise ConfigError(
            f"config.workdir: {workdir} is not empty and holds no jaxformer run ({', '.join(sorted(foreign)[:3])}); "
            "accepted: a new or empty directory, or that of a run to resume"
        )


def stored_config(workdir: str | Path, cls: type[C] = Config) -> C:  # type: ignore[assignment]
    """The config of the run in `workdir`, as it last started. Raises ConfigError as `read_config`."""
    return _config_of(workdir, read(workdir), cls)


def record_change(config: Config) -> None:
    """Makes `config` the one that the run in `config.workdir` has from now on, and keeps what it changed.

    The fingerprint stays: it is the run's name. Manifests of versions that had none are left as they are.

    Raises:
      ConfigError: the manifest cannot be read or written.
    """
    manifest, path = read(config.workdir), place(config.workdir) / FILE_NAME
    new = credentials.mask(to_dict(config))
    changed = changes.said(credentials.mask(to_dict(_config_of(config.workdir, manifest, type(config)))), new)
    if changed and "fingerprint" in manifest:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        history = [*manifest.get("changes", []), {"at": now, "changed": changed}]
        write(path, {**manifest, "config": new, "changes": history})


def changed_files(workdir: str | Path, config: Config) -> str | None:
    """A note about the files of own kinds that are not as they were when the run in `workdir` started, or None."""
    now = provenance.own_files(config)
    changed = [name for name, digest in read(workdir).get("own_files", {}).items() if now.get(name) != digest]
    if not changed:
        return None
    return f"note: {', '.join(changed)} changed since this run began; what it computes now may be something else"


def write_or_check(manifest: Mapping[str, Any], config: Config, free: Sequence[str] = ()) -> None:
    """Writes the manifest of a new run; for a resumed one, checks that the data are the same.

    Called with the directory locked (`workdir_lock`), so it repeats `check_workdir`. A run that left nothing worth
    keeping is replaced.

    Raises:
      ConfigError: as `check_workdir`; the corpus differs, this version would make other batches from it, or the
        manifest cannot be written.
    """
    check_workdir(config, free)
    workdir = place(config.workdir)
    path = workdir / FILE_NAME
    if path.exists() and not nothing_kept(workdir):
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
    try:
        if not path.exists() or read(workdir).get("fingerprint") != manifest["fingerprint"]:  # its starts took time
            (workdir / "records.jsonl").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"config.workdir: {path} cannot be written ({error.strerror})") from None
    write(path, manifest)


def write(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes manifest.json with its checksum. Raises ConfigError: it cannot be written."""
    try:
        files.write_atomically(path, json.dumps(json_checksum.add_checksum(manifest), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"config.workdir: {path} cannot be written ({error.strerror})") from None


def identity(config: Config, fingerprint: str) -> dict[str, str]:
    """What all processes of one run must agree on: text, versions, and the config except each machine's own paths."""
    shared = essential(to_dict(config), ("distributed", "data.cache_dir", "data.tfds_dir", "data.hf_dir"), ())
    return {"text": f"corpus {fingerprint}", "config": _whole(shared), "version of jax": str(provenance.version("jax"))}


def check_shared(config: Config, seconds: float = 30.0) -> None:
    """Waits up to `seconds`, for network file systems, until this process sees the manifest that process 0 has written.

    Raises:
      ConfigError: it does not.
    """
    path, until = place(config.workdir) / FILE_NAME, time.monotonic() + seconds
    while FILE_NAME not in (each.name for each in path.parent.iterdir()):  # a list, which network file systems renew
        if time.monotonic() > until:
            raise ConfigError(
                f"config.workdir: {path.absolute()} is not there, though process 0 wrote it; accepted: a directory "
                "that all processes share"
            )
        time.sleep(0.1)


def essential(config: dict[str, Any], free: Sequence[str], operational: Sequence[str] = OPERATIONAL) -> dict[str, Any]:
    """A config as a dict, without its operational fields and those in `free`, each source of a mixture included."""
    kept = copy.deepcopy(config)
    mixed = kept.get("data", {}).get("mixture") or {}
    for name in (*operational, *free):
        section, _, field = name.rpartition(".")
        for fields in (kept[section] if section else kept, *(mixed.values() if section == "data" else ())):
            fields.pop(field, None)
    return kept

"""What a glob pattern matches: on this machine's disks, or in an object store."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from jaxformer.errors import ConfigError
from jaxformer.storage.address import Address, is_address


def matching(pattern: str, field: str) -> tuple[list[str], list[Path]]:
    """(all names, the files among them, sorted) that a pattern matches; `text_files.find` says what patterns do.

    Raises:
      ConfigError: it matches a pipe or a link to nothing, or the store cannot be asked; names the field.
    """
    return _in_store(pattern, field) if is_address(pattern) else _on_disk(pattern, field)


def _on_disk(pattern: str, field: str) -> tuple[list[str], list[Path]]:
    path = str(Path(os.path.expanduser(pattern)))  # expanded first, because Path turns ./~name into ~name
    names = [path] if os.path.lexists(path) else sorted(set(_matches(path)))
    matched = [Path(name) for name in names if not os.path.isdir(name)]
    for file in matched:
        if not os.path.isfile(file):
            what = "a link to nothing" if file.is_symlink() else "a pipe, a socket or a device"
            raise ConfigError(f"config.{field}: {file} is {what}; accepted: files")
    return names, matched


def _in_store(pattern: str, field: str) -> tuple[list[str], list[Path]]:
    address = Address(pattern)
    try:
        matched = address.matching()
        return ([] if matched or not address.is_dir() else [str(address)]), cast(list[Path], matched)
    except OSError as error:
        raise ConfigError(f"config.{field}: {address}: {error.strerror}") from None


def _matches(pattern: str) -> Iterator[str]:
    """As `glob.iglob`, but `**` enters each folder once, however many links lead to it.

    With a link to a parent folder glob would find every file many times, so that validation text would also be trained
    on; with two such links it does not end.
    """
    deep = re.search(r"(?:^|(?<=/))\*\*(?:/+|$)", pattern)
    if deep is None:
        yield from glob.iglob(pattern)
        return
    before, after = pattern[: deep.start()], pattern[deep.end() :]
    entered: set[str] = set()
    for top in sorted(glob.glob(before)) if before else [""]:
        for folder, inside, _ in os.walk(top or ".", followlinks=True):
            real = os.path.realpath(folder)
            inside[:] = [] if real in entered else sorted(name for name in inside if name[0] != ".")
            if real not in entered:
                entered.add(real)
                here = folder if top else os.path.relpath(folder)
                yield from _matches(os.path.normpath(os.path.join(glob.escape(here), after or "*")))

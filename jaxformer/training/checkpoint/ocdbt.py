"""The databases that a checkpoint's arrays lie in (OCDBT, https://google.github.io/tensorstore/kvstore/ocdbt): joined,
and what of one is needed.

Each process writes a database of its own. One that joins several has nodes of its own, and its values are references
into the files of the others. So of what another process wrote only the nodes are needed for it.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.training.checkpoint.checksum import leaf_name


class ByteRange(NamedTuple):
    """Bytes `begin` to `end` of a file, by its name in the database's folder."""

    file: str
    begin: int
    end: int


def join(folder: Path, parts: Sequence[str]) -> None:
    """Makes `folder` a database of all that is in the databases `parts`, which are folders in it; no value is read."""
    import tensorstore as ts

    context = ts.Context()  # the same one, or nothing can be copied from one to the other

    def opened(path: Path) -> Any:
        base = {"driver": "file", "path": f"{path}/"}
        return ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()

    transaction = ts.Transaction(atomic=True)
    whole = opened(folder).with_transaction(transaction)
    for copying in [opened(folder / part).experimental_copy_range_to(whole) for part in parts]:
        copying.result()
    transaction.commit_async().result()


def values(folder: Path, fetch: Callable[[ByteRange], Any]) -> dict[str, ByteRange | bytes]:
    """key -> where its value lies, or the value itself, of every key of a database.

    Args:
      folder: holds its manifest.
      fetch: called before a node is read, which it may bring into the folder.
    """
    import tensorstore as ts

    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    found: dict[str, ByteRange | bytes] = {}

    def visit(node: str, prefix: bytes) -> None:
        fetch(_place(node))
        for entry in ts.ocdbt.dump(base, node=node).result()["entries"]:
            if "location" in entry:
                visit(entry["location"], prefix + entry.get("subtree_common_prefix", b""))
            elif "inline_value" in entry:
                found[(prefix + entry["key"]).decode()] = entry["inline_value"]
            else:
                found[(prefix + entry["key"]).decode()] = _place(entry["indirect_value"])

    visit(ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"], b"")
    return found


def needed(found: dict[str, ByteRange | bytes], tree: Any, read: Callable[[ByteRange], bytes]) -> set[ByteRange]:
    """What of the values this process's devices need of a tree of arrays, each stored in chunks (Zarr, version 2).

    Args:
      found: of `values`.
      tree: shapes and shardings.
      read: the bytes at a place.

    Raises:
      KeyError: something of it is not there.
    """
    places = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = leaf_name(path)
        about = found[f"{name}/.zarray"]
        chunk = json.loads(about if isinstance(about, bytes) else read(about))["chunks"]
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
            spans = [each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True)]
            grid = (range(low // size, -(-high // size)) for (low, high), size in zip(spans, chunk, strict=True))
            places |= {found[f"{name}/{'.'.join(map(str, each)) or '0'}"] for each in itertools.product(*grid)}
    return {each for each in places if isinstance(each, ByteRange)}


def spans(places: set[ByteRange], gap: int, most: int) -> list[ByteRange]:
    """The same bytes in few pieces: what is at most `gap` apart is one; of at most `most` bytes each.

    >>> spans({ByteRange("a", 0, 4), ByteRange("a", 6, 9), ByteRange("b", 0, 5)}, gap=2, most=6)
    [ByteRange(file='a', begin=0, end=6), ByteRange(file='a', begin=6, end=9), ByteRange(file='b', begin=0, end=5)]
    """
    whole: list[ByteRange] = []
    for each in sorted(places):
        if whole and each.file == whole[-1].file and each.begin <= whole[-1].end + gap:
            whole[-1] = whole[-1]._replace(end=max(whole[-1].end, each.end))
        else:
            whole.append(each)
    return [ByteRange(file, at, min(at + most, end)) for file, begin, end in whole for at in range(begin, end, most)]


def _place(location: str) -> ByteRange:
    """Of what tensorstore calls kind:folder:file:begin:length. Raises ValueError: it lies outside the database."""
    _, folder, file, begin, length = location.split(":")
    if (folder + file).startswith("/") or ".." in (folder + file).split("/"):
        raise ValueError(location)
    return ByteRange(folder + file, int(begin), int(begin) + int(length))

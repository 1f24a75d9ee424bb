"""Addresses in object stores, as `gs://bucket/run`, beside paths of this machine. THE one place that tells them apart.

`place` makes a `pathlib.Path` of a path and an `Address` of an address, which has those of Path's methods that are used
here; a function of `storage.files` that `addressed` decorates works on both. A store has objects, whose names hold
slashes, and no folders: a folder is there if an object is in it. A put is atomic. Nothing is appended, renamed, linked.

>>> folder = place("memory://bucket/run/")
>>> folder / "records.jsonl", (folder / "a.txt.gz").stem, place("runs/a").name
(memory://bucket/run/records.jsonl, 'a.txt', 'a')
>>> place("memory://bucket/run/note.txt").write_atomically("to be")
>>> [path.name for path in folder.iterdir()], folder.is_dir(), (folder / "other").exists()
(['note.txt'], True, False)
"""

import errno
import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

from jaxformer.errors import StoreError
from jaxformer.storage import object_store, spool

F = TypeVar("F", bound=Callable[..., Any])
DOWNLOAD_BYTES = 1 << 26  # of one request
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def is_address(path: object) -> bool:
    """True if a text is an address, not a path of this machine.

    >>> is_address("gs://bucket/run"), is_address("runs/a"), is_address("a/s3://b")
    (True, False, False)
    """
    return isinstance(path, Address) or (isinstance(path, str) and _ADDRESS.match(path) is not None)


def like_an_address(text: str) -> bool:
    """True for what was meant as an address and is none: it would be a folder of this machine named `gs:`.

    >>> [like_an_address(each) for each in ("GS://bucket/run", "gs:/bucket", "simplecache::s3://b/a", "gs://b", "a/s3://b")]
    [True, True, True, False, False]
    """
    known = "|".join(object_store.EXTRAS)
    return not is_address(text) and re.match(rf"[\w+.:-]{{2,}}://|({known}):/", text) is not None


def place(path: "str | os.PathLike | Address") -> Path:
    """A path of this machine as a Path, an address as an `Address`, which is used like one."""
    return cast(Path, Address(str(path))) if is_address(path) else Path(cast(Any, path))


def addressed(function: F) -> F:
    """A function of a path that also takes an address, which does the same by its method of that name."""

    @functools.wraps(function)
    def either(path: Any, *args: Any, **settings: Any) -> Any:
        if is_address(path):
            return getattr(Address(str(path)), function.__name__)(*args, **settings)
        return function(path, *args, **settings)

    return cast(F, either)


def unusable(text: str) -> str | None:
    """Why this cannot be an address, and what is accepted; None if it can. Nothing is contacted.

    >>> unusable("gs://bucket/run"), unusable("s3:///run")
    (None, 'names no bucket; accepted: SCHEME://BUCKET/NAME')
    """
    scheme, rest = cast(Any, _ADDRESS.match(text)).groups()
    if scheme in ("file", "local"):
        return "is a path of this machine; accepted: the path itself"
    if scheme not in object_store.schemes():
        return f"has the scheme {scheme}, which is not known; accepted: gs://, s3://, another of fsspec's, or a path"
    if not rest.strip("/") or rest[0] == "/":
        return "names no bucket; accepted: SCHEME://BUCKET/NAME"
    if "?versionId=" in rest:
        return "names a version of an object; accepted: an address without, which is that of the newest"
    if "@" in rest.split("/")[0]:
        return "holds a user or a password; accepted: an address without; they are taken from the environment"
    return None


def _glob(pattern: str, **settings: Any) -> Any:
    """What matches. Raises StoreError where there is no bucket: nothing matches only in one that is there."""
    try:
        return object_store.request("glob", pattern, **settings)
    except FileNotFoundError:
        raise StoreError(errno.ENOENT, "there is no such bucket", pattern) from None


@functools.total_ordering
class Address:
    """An object in a store, or a folder of objects; has the methods of `pathlib.Path` that are used here.

    Methods raise FileNotFoundError, FileExistsError and `errors.StoreError`, which are OSErrors, as Path's do.
    """

    def __init__(self, text: str):
        scheme, rest = cast(Any, _ADDRESS.match(text)).groups()
        self._scheme, self._path = scheme, PurePosixPath(rest)

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path}"

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and str(self) == str(other)

    def __lt__(self, other: "Address") -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> "Address":
        return self._with(self._path / name)

    def _with(self, path: PurePosixPath) -> "Address":
        return Address(f"{self._scheme}://{path}")

    name = property(lambda self: self._path.name)
    stem = property(lambda self: self._path.stem)
    suffix = property(lambda self: self._path.suffix)
    parent = property(lambda self: self._with(self._path.parent))

    def with_name(self, name: str) -> "Address":
        """Beside this one, of another name."""
        return self._with(self._path.with_name(name))

    def with_suffix(self, suffix: str) -> "Address":
        """With another ending."""
        return self._with(self._path.with_suffix(suffix))

    def absolute(self) -> "Address":
        """Itself."""
        return self

    resolve = expanduser = absolute

    # What is there.

    def _info(self) -> dict[str, Any] | None:
        """What the store says of it; None if there is nothing."""
        try:
            return object_store.request("info", str(self))
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """True if there is such an object, or one in such a folder."""
        return self._info() is not None

    def is_file(self) -> bool:
        """True if there is such an object."""
        return (self._info() or {}).get("type") == "file"

    def is_dir(self) -> bool:
        """True if there is an object in such a folder."""
        return (self._info() or {}).get("type") == "directory"

    def is_symlink(self) -> bool:
        """False."""
        return False

    def iterdir(self) -> Iterator["Address"]:
        """What is directly in this folder, sorted; nothing if there is no such folder."""
        try:
            found = object_store.request("ls", str(self), detail=False)
        except FileNotFoundError:
            return iter(())
        names = {name.rstrip("/").rpartition("/")[2] for name in found} - {""}
        return iter([self / name for name in sorted(names)])

    def glob(self, pattern: str) -> Iterator["Address"]:
        """What matches in this folder, objects and folders, sorted."""
        found = _glob(f"{self._literal()}/{pattern}")
        return iter(sorted(self._named(name) for name in found))

    def _literal(self) -> str:
        """As part of a pattern that matches this name alone."""
        return re.sub(r"[*?[]", r"[\g<0>]", str(self))

    def _named(self, name: str) -> "Address":
        """By a name that fsspec gave."""
        return Address(f"{self._scheme}://{name.partition('://')[2] or name.lstrip('/')}")

    def matching(self) -> list["Address"]:
        """This object, or the objects that it matches as a pattern, sorted; `**` is any number of folders."""
        if not re.search(r"[*?\[]", str(self)):
            return [self] if self.is_file() else []
        found = _glob(str(self), detail=True)
        return sorted(self._named(name) for name, about in found.items() if about["type"] == "file")

    def objects(self) -> dict["Address", int]:
        """Every object in this folder and its folders, with its size."""
        try:
            found = object_store.request("find", str(self), detail=True)
        except FileNotFoundError:
            return {}
        return {self._named(name): int(about["size"]) for name, about in sorted(found.items())}

    # What is changed.

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there once an object is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        spool.forget(str(self))
        try:
            object_store.request("rm_file", str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: "Address") -> "Address":
        """Copies the object to `target` and deletes it; a kill may leave both."""
        target.write_atomically(self._content())
        self.unlink()
        return target

    def upload(self, path: Path) -> None:
        """Puts a file of this machine as this object."""
        size = path.stat().st_size
        object_store.request("put_file", str(self), before=(str(path),), size=size)

    def download(self, path: Path, size: int) -> None:
        """Writes this object of `size` bytes into a file of this machine, in an existing folder or a new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for start in range(0, size, DOWNLOAD_BYTES):
                file.write(object_store.part(str(self), start, min(start + DOWNLOAD_BYTES, size)))

    def _content(self) -> bytes:
        return object_store.request("cat_file", str(self))

    # The functions of `storage.files`, by their names.

    def write_atomically(self, content: str | bytes) -> None:
        """As `files.write_atomically`."""
        content = content.encode() if isinstance(content, str) else content
        spool.forget(str(self))
        object_store.request("pipe_file", str(self), content, size=len(content))

    def move_here(self, file: Path) -> None:
        """As `files.move_here`."""
        self.upload(file)
        file.unlink()

    def sync_folder(self) -> None:
        """As `files.sync_folder`: a put is durable."""

    def open_to_append(self, *, sole: bool = False) -> spool.Spool:
        """As `files.open_to_append`; what is written is in the store after `files.sync`."""
        return spool.of(str(self))

    def open_to_read(self, *, follow: bool = False) -> BinaryIO:
        """As `files.open_to_read`; of what was there when it was opened, so that a change shows as another content."""
        return cast(BinaryIO, io.BufferedReader(spool.Reader(str(self), self._file_info()["size"]), 1 << 16))

    def read_bytes(self, most: int, *, follow: bool = False) -> bytes:
        """As `files.read_bytes`."""
        if self._file_info()["size"] > most:
            raise OSError(errno.EFBIG, f"is longer than {most} bytes", str(self))
        return self._content()

    def _file_info(self) -> dict[str, Any]:
        info = object_store.request("info", str(self))
        if info["type"] != "file":
            raise OSError(errno.EINVAL, "is not a regular file", str(self))
        return info

    def look(self) -> list[int]:
        """As `files.look`: the size, and a number that is another one when the object is put anew."""
        info = self._file_info()
        version = hashlib.blake2b(object_store.version_of(info).encode(), digest_size=7).digest()
        return [int(info["size"]), int.from_bytes(version)]

    def irregular(self) -> None:
        """As `files.irregular`: a store has neither pipes nor devices."""

    def folders(self, seal: str) -> list["Address"]:
        """As `files.folders`: those in which there is the object `seal`, which is put last and deleted first."""
        depth = seal.count("/") + 1
        found = _glob(f"{self._literal()}/*/{seal}")
        return sorted(self._named(name.rstrip("/").rsplit("/", depth)[0]) for name in found)

    def open_folder(self) -> list[str]:
        """As `files.open_folder`: names what is in it, and checks that its bucket is there."""
        found = [path.name for path in self.iterdir()]
        if not found and self._scheme != "memory" and self._with(PurePosixPath(self._path.parts[0]))._info() is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", str(self))
        return found

    def writable(self) -> bool:
        """As `files.writable`."""
        return True

    def make_folder(self) -> "Address":
        """As `files.make_folder`."""
        return self

    def remove_folder(self, inside: "Address", *, seal: str = "") -> None:
        """As `files.remove_folder`; the object `seal` first, so that a kill leaves no folder that looks complete."""
        if self.parent != inside:
            raise OSError(errno.EPERM, f"does not lie in {inside} and is not removed", str(self))
        for address in sorted(self.objects(), key=lambda each: str(each) != f"{self}/{seal}"):
            address.unlink(missing_ok=True)

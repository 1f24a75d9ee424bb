"""Requests to object stores, through fsspec, which is imported when the first address is met. The only file that does.

Every request has a time limit, and is tried again while the store does not answer, for PATIENCE seconds in all
($JAXFORMER_STORE_PATIENCE). What goes wrong in any of the libraries below ends as one of three exceptions:
FileNotFoundError, FileExistsError, or `errors.StoreError`, whose message is one line.
"""

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxformer.errors import StoreError
from jaxformer.storage import credentials

PATIENCE = 60.0  # seconds from the first failure of a request to the last try
# A try may take as long, and longer by what it sends at this rate; while nothing answers at all, less.
ATTEMPT_SECONDS, BYTES_PER_SECOND, AGAIN_SECONDS = 30.0, 1e6, 5.0
# Scheme -> the extra that brings what fsspec needs for it. Others name the package themselves.
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
_REFUSED = ("forbidden", "access denied", "accessdenied", "credentials", "invalidaccesskeyid", "signaturedoesnotmatch",
            "unauthorized", "expiredtoken", "invalid_grant", "permission")  # fmt: skip
_lock = threading.Lock()
_systems: dict[str, Any] = {}
_answered = False  # True once a request has succeeded
_gave_up: float | None = None  # when the last request failed in vain; None since one has succeeded


def schemes() -> list[str]:
    """The schemes that fsspec knows, installed or not."""
    with contextlib.suppress(ImportError):
        import fsspec

        return list(fsspec.available_protocols())
    return list(EXTRAS)


def system(address: str) -> Any:
    """The fsspec file system of an address; one for each scheme.

    Raises:
      StoreError: its package is not installed, or it cannot be set up.
    """
    scheme = address.partition("://")[0]
    with _lock:
        if scheme not in _systems:
            try:
                import fsspec

                logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # prints the traceback of what it also raises
                kind = fsspec.get_filesystem_class(scheme)
                options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
                if EXTRAS.get(scheme) == "s3":
                    once = {"total_max_attempts": 1}  # s3fs tries again as well
                    options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": ATTEMPT_SECONDS, "retries": once}
                made = kind(**options)
                if made.async_impl:  # or the loop prints what becomes of requests that nobody waits for any more
                    made.loop.call_soon_threadsafe(made.loop.set_exception_handler, lambda loop, context: None)
                _systems[scheme] = made
            except ImportError as error:
                extra = EXTRAS.get(scheme)
                need = f"needs the {extra} extra: pip install 'jaxformer[{extra}]'" if extra else _line(error)
                raise StoreError(errno.EOPNOTSUPP, need, address) from None
            except Exception as error:  # credentials are read here, by libraries with errors of their own
                raise StoreError(errno.EACCES, _line(error), address) from None
        return _systems[scheme]


def request(name: str, address: str, *args: Any, size: int = 0, before: tuple = (), **settings: Any) -> Any:
    """Calls a method of the file system of an address.

    Args:
      name: of the method, as "cat_file".
      address: its first argument, named in errors.
      args, settings: its other arguments.
      size: bytes that it sends or receives.
      before: arguments that come before the address.

    Raises:
      FileNotFoundError, FileExistsError: the store says so. StoreError: it refuses, or does not answer.
    """
    return persist(_limited(system(address), name, *before, address, *args, size=size, **settings), address)


def _limited(files: Any, name: str, /, *args: Any, size: int = 0, **settings: Any) -> Callable[[], Any]:
    """A call of a method, which raises TimeoutError when it takes too long, if the file system can be interrupted."""
    coroutine = getattr(files, f"_{name}", None) if files.async_impl else None
    if coroutine is None:
        return functools.partial(getattr(files, name), *args, **settings)
    from fsspec.asyn import sync

    allowed = (ATTEMPT_SECONDS if _gave_up is None else AGAIN_SECONDS) + size / BYTES_PER_SECOND
    return functools.partial(sync, files.loop, coroutine, *args, timeout=allowed, **settings)


def persist(work: Callable[[], Any], address: str) -> Any:
    """`work()`, tried again while the store does not answer. Raises as `request`."""
    global _gave_up, _answered
    patience = float(os.environ.get("JAXFORMER_STORE_PATIENCE", PATIENCE))
    if _gave_up is not None and time.monotonic() - _gave_up < patience:
        patience = 0.0  # others have just waited as long in vain
    failed: float | None = None
    for number in itertools.count():
        try:
            found, _gave_up, _answered = work(), None, True
            return found
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address) from None
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), address) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # of this machine's disk
                raise
            caught: Exception = error
        except Exception as error:  # of any of the libraries below
            caught = error
        failed = failed or time.monotonic()
        waited, refused = time.monotonic() - failed, _refuses(caught)
        # Credentials that have served may only be about to be renewed.
        may_pass = _answered if refused else _may_pass(caught)
        if waited >= patience or not may_pass:
            line = _line(caught)
            why = f"access is refused: {line}" if refused else f"the store does not answer as it should ({line})"
            tried = f"; tried for {waited:.0f} s" if waited >= 1 else ""
            if may_pass:
                _gave_up = time.monotonic()
            raise StoreError(errno.EACCES if refused else errno.ETIMEDOUT, why + tried, address) from None
        time.sleep(min(0.2 * 2**number, 5.0, max(patience - waited, 0.0)))
    raise AssertionError  # never: count has no end


def _refuses(error: Exception) -> bool:
    """True if the store, or who gives credentials for it, says no."""
    if isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403, "401", "403"):
        return True
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in _REFUSED) and not isinstance(error, TimeoutError)


def _may_pass(error: Exception) -> bool:
    """True if another try may succeed: not for a wrong request, which is ours or the library's mistake."""
    if isinstance(error, json.JSONDecodeError):  # someone on the way answered, as with a page of HTML
        return True
    return not isinstance(error, TypeError | ValueError | NotImplementedError | AttributeError)


def _line(error: BaseException) -> str:
    text = credentials.mask_text(" ".join(str(error).split()))
    text = text or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    return (text[:160] + " ...") if len(text) > 160 else text


def put_if(address: str, content: bytes, version: str | None) -> None:
    """Puts an object if it has not been changed since: in one request, where the store has preconditions.

    Args:
      address: of the object.
      content: at most a few kilobytes.
      version: of `version`; None: if there is no object of that name.

    Raises:
      FileExistsError: another has put one. Others as `request`.
    """
    files = system(address)
    extra = EXTRAS.get(address.partition("://")[0])
    if version is None:
        request("pipe_file", address, content, mode="create")
    elif extra == "s3":
        bucket, key, _ = files.split_path(address)
        put = _limited(files, "call_s3", "put_object", Bucket=bucket, Key=key, Body=content, IfMatch=version)

        def put_or_differs() -> None:
            try:
                put()
            except OSError as error:
                said = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code", "")
                if said == "PreconditionFailed":
                    raise FileExistsError from None
                raise

        persist(put_or_differs, address)
    elif extra == "gcs":
        bucket, key, _ = files.split_path(address)
        where = f"{files._location}/upload/storage/v1/b/{bucket}/o"
        settings = {"uploadType": "media", "name": key, "ifGenerationMatch": version, "data": content, "json_out": True}
        persist(_limited(files, "call", "POST", where, **settings), address)
    elif version_of(request("info", address)) != version:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), address)
    else:
        request("pipe_file", address, content)


def version_of(info: dict[str, Any]) -> str:
    """What changes whenever an object is put anew, from what the store says of it."""
    names = ("generation", "ETag", "etag", "LastModified", "mtime", "created", "last_modified")
    return next((str(info[name]) for name in names if info.get(name)), str(info.get("size")))


def part(address: str, start: int, end: int) -> bytes:
    """Bytes of an object, which is at least `end` long."""
    return request("cat_file", address, start=start, end=end, size=end - start)

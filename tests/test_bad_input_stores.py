"""Addresses that cannot be used, and stores that cannot be reached; the lines stand in bad_input.md."""

import sys
from types import SimpleNamespace

import fsspec
import pytest
from bad_input_cases import expected, place  # noqa: F401

from jaxformer.runs import workdir_lock
from jaxformer.runs.store_lock import StoreLock
from jaxformer.storage import files, object_store
from jaxformer.storage.address import Address


class HttpError(Exception):
    code = 401


class Refusing:
    """A file system whose every method raises an error; of FileNotFoundError nothing is there."""

    async_impl = False

    def __init__(self, error):
        self._error = error

    def _raise(self):
        raise self._error

    def __getattr__(self, name):
        def method(*args, **settings):
            if name == "glob" and isinstance(self._error, FileNotFoundError):
                return {}
            raise self._error

        return method


@pytest.fixture
def store(monkeypatch):
    """Makes gs:// raise an error."""
    monkeypatch.setenv("JAXFORMER_STORE_PATIENCE", "0")
    monkeypatch.setattr(object_store, "_gave_up", None)
    return lambda error: monkeypatch.setitem(object_store._systems, "gs", Refusing(error))


@pytest.mark.parametrize(
    ("case", "address"),
    [
        ("an address of an unknown scheme", "xs://bucket/run"),
        ("an address without a bucket", "gs:///run"),
        ("an address with a password", "s3://me:S3CRET@bucket/run"),
        ("an address of one version", "s3://bucket/run?versionId=3"),
        ("an address in capitals", "GS://bucket/run"),
        ("an address with one slash", "s3:/bucket/run"),
        ("an address in an address", "simplecache::s3://bucket/run"),
        ("a path written as an address", "file:///runs/a"),
    ],
)
def test_addresses_that_are_none(place, case, address):  # noqa: F811
    before = sorted(place.folder.iterdir())
    for flag in ("--config.workdir", "--config.init_from", "--config.data.tokenizer_file", "--config.data.files"):
        line = expected()[case].replace("config.workdir", flag[2:])
        assert place.pretrain(f"{flag}={address}") == (2, line) and "S3CRET" not in line
    assert place.run("evaluate", f"--workdir={address}") == (2, expected()[case].replace("config.workdir", "--workdir"))
    assert sorted(place.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("a store whose credentials are refused", HttpError("Invalid Credentials")),
        ("a bucket that is not there", FileNotFoundError("b/nosuch/o")),
        ("a store that does not answer", ConnectionRefusedError("Connect call failed ('127.0.0.1', 9)")),
    ],
)
def test_stores_that_refuse(place, store, case, error):  # noqa: F811
    store(error)
    assert place.pretrain("--config.workdir=gs://bucket/run") == (2, expected()[case])


def test_a_scheme_whose_package_is_missing(place, monkeypatch):  # noqa: F811
    def missing(scheme):
        raise ImportError(f"Please install {scheme}fs to access it")

    monkeypatch.setattr(object_store, "_systems", {})
    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    case = expected()["an address whose package is missing"]
    assert place.pretrain("--config.workdir=gs://bucket/run") == (2, case)
    code, line = place.pretrain("--config.workdir=s3://bucket/run")
    assert (code, line) == (2, case.replace("gs://", "s3://").replace("gcs", "s3"))
    assert place.run("evaluate", "--workdir=gs://bucket/run") == (
        2, expected()["evaluating an address whose package is missing"],
    )  # fmt: skip
    line = expected()["sweep into an address whose package is missing"]
    assert place.run("sweep", "gpt_tiny", "--over=seed=0,1", "--workdir=gs://bucket/sweep") == (2, line)


def test_names_that_are_too_long_in_a_list(place):  # noqa: F811
    assert place.pretrain(f"--config.data.files={300 * 'a'}") == (2, expected()["a name of a list that is too long"])


def test_text_that_is_not_in_the_store(place, store):  # noqa: F811
    store(FileNotFoundError("b/bucket/o"))
    assert place.pretrain("--config.data.files=gs://bucket/*.txt") == (2, expected()["no text in the store"])
    store(HttpError("Invalid Credentials"))
    assert place.pretrain("--config.data.files=gs://bucket/*.txt") == (2, expected()["text that a store refuses"])


def test_a_bucket_that_is_deleted_meanwhile(place, store, monkeypatch):  # noqa: F811
    store(FileNotFoundError("b/bucket/o"))
    monkeypatch.delattr(Refusing, "__getattr__")
    monkeypatch.setattr(Refusing, "glob", lambda self, *_, **__: self._raise(), raising=False)
    monkeypatch.setattr(Refusing, "info", lambda self, *_: {"type": "file", "size": 9, "etag": "1"}, raising=False)
    monkeypatch.setattr(Refusing, "cat_file", lambda self, *_, **__: self._raise(), raising=False)
    assert place.pretrain("--config.data.files=gs://bucket/*.txt") == (
        2,
        expected()["text in a bucket that is not there"],
    )
    module = SimpleNamespace(main=lambda: files.read_bytes(Address("gs://bucket/run/any"), 99))
    monkeypatch.setitem(sys.modules, "jaxformer.programs.pretrain", module)
    assert place.pretrain() == (2, expected()["an object that is deleted meanwhile"])


def test_a_run_in_a_store_that_is_in_use(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(workdir_lock.time, "strftime", lambda *args: "NOW")
    monkeypatch.setattr(workdir_lock.platform, "node", lambda: "HOST")
    with StoreLock(Address("memory://bucket/used")) as lock:
        code, line = place.pretrain("--config.workdir=memory://bucket/used")
        assert (code, line.replace(f"process {lock._mine['process']}", "process 17")) == (
            2, expected()["a run in a store that is in use"],
        )  # fmt: skip
    assert not Address("memory://bucket/used/.lock").exists()

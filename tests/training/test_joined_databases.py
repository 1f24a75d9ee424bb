"""Databases of arrays: joined without their values, and read by those who have only what they need of them."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_checkpoint import KEEP_ALL, equal, shifted
from test_store_checkpoints import damage_byte, folder, save

from jaxformer.storage import object_store
from jaxformer.training.checkpoint import ocdbt, staging
from jaxformer.training.checkpoint.manager import Checkpoints

__all__ = ["folder"]
ts = pytest.importorskip("tensorstore")


def opened(where, name):
    base = {"driver": "file", "path": f"{where}/"}
    return ts.open({"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}).result()


def write(where, name, values, rows):
    """Some rows of an array, in chunks of a row, as one process writes them."""
    base = {"driver": "file", "path": f"{where}/"}
    about = {"shape": values.shape, "chunks": [1, *values.shape[1:]], "dtype": "<f4"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    array = ts.open({"driver": "zarr", "kvstore": kvstore, "metadata": about}, create=True, open=True).result()
    array[rows].write(values[rows]).result()


class HasRows:
    """An array of which this process has these rows, and its own sharding."""

    def __init__(self, shape, *rows):
        self.shape, self.rows, self.sharding = shape, rows, self

    def addressable_devices_indices_map(self, shape):
        return {number: (rows, slice(None)) for number, rows in enumerate(self.rows)}


@pytest.fixture
def parts(tmp_path):
    """Rows 0 to 3 of an array in one database, 4 to 7 in another."""
    values = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
    for name, rows in (("a", slice(0, 4)), ("b", slice(4, 8))):
        write(tmp_path / name, "x.w", values, rows)
    return tmp_path, values


def test_databases_are_joined_by_their_nodes_alone(parts):
    """As processes do it: what holds the values is away while its database is joined to another."""
    where, values = parts
    (where / "c").mkdir()
    (where / "b").rename(where / "c" / "b")
    ocdbt.join(where / "c", ["b"])
    shutil.move(where / "c" / "b", where / "away")
    ocdbt.join(where, ["a", "c"])
    shutil.move(where / "away", where / "c" / "b")
    np.testing.assert_array_equal(opened(where, "x.w").read().result(), values)
    assert sum(path.stat().st_size for path in (where / "d").iterdir()) < values.nbytes / 8


@pytest.mark.parametrize("rows", [(slice(3, 5),), (slice(0, 1), slice(7, 8)), (slice(None),)])
def test_what_is_needed_is_enough_and_no_more(parts, rows):
    where, values = parts
    ocdbt.join(where, ["a", "b"])
    copy = where / "copy"
    copy.mkdir()
    shutil.copy(where / "manifest.ocdbt", copy)
    bytes_read = []

    def fetch(place):
        with open(where / place.file, "rb") as file:
            file.seek(place.begin)
            content = file.read(place.end - place.begin)
        (copy / place.file).parent.mkdir(parents=True, exist_ok=True)
        with open(copy / place.file, "r+b" if (copy / place.file).exists() else "wb") as file:
            file.seek(place.begin)
            file.write(content)
        bytes_read.append(len(content))
        return content

    found = ocdbt.values(copy, fetch)
    assert sorted(found) == ["x.w/.zarray", *(f"x.w/{row}.0" for row in range(8))]
    tree = {"x": {"w": HasRows(values.shape, *rows)}}
    places = ocdbt.needed(found, tree, fetch)
    nodes = sum(bytes_read)
    for place in ocdbt.spans(places, gap=0, most=1000):
        fetch(place)
    for each in rows:
        np.testing.assert_array_equal(opened(copy, "x.w")[each].read().result(), values[each])
    share = len({row for each in rows for row in range(8)[each]}) / 8
    assert 0.8 * share * values.nbytes < sum(bytes_read) - nodes < 1.1 * share * values.nbytes
    assert max(bytes_read) <= max(1000, nodes)


@pytest.mark.slow
def test_several_processes_restore_from_parts(folder, monkeypatch):
    """This one needs everything, and gets it from ranges; what is damaged is read whole before it counts as damaged."""
    state, abstract = save(folder, 1, 2)
    monkeypatch.setattr(staging, "in_parts", lambda path: True)
    asked, part = [], object_store.part
    monkeypatch.setattr(object_store, "part", lambda *place: (asked.append(place), part(*place))[1])
    restored, step = Checkpoints(folder, KEEP_ALL, "print").restore(abstract)
    assert step == 2 and equal(restored, shifted(state, 2))
    of_parts = "ocdbt.process_0/manifest.ocdbt"  # which whoever has the joined database does not read
    assert asked and not any(of_parts in address for address, *_ in asked)
    found = {path: size for path, size in folder.objects().items() if str(path).startswith(f"{folder}/2/params")}
    damage_byte(max(found, key=found.__getitem__), max(found.values()))
    said = []
    restored, step = Checkpoints(folder, KEEP_ALL, "print", warn=said.append).restore(abstract)
    assert step == 1 and equal(restored, shifted(state, 1))
    assert len(said) == 1 and said[0].startswith(f"checkpoint {folder}/2 is not valid: ")
    assert any(f"{folder}/2/params/{of_parts}" == address for address, *_ in asked)


def test_shardings_say_what_is_needed():
    """Of a mesh all of whose devices are here, all of it, once."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    leaf = jax.ShapeDtypeStruct((4, 6), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    found = {"w/.zarray": b'{"chunks": [2, 6]}', "w/0.0": ocdbt.ByteRange("a", 0, 9), "w/1.0": b"inline"}
    assert ocdbt.needed(found, {"w": leaf}, lambda place: b"") == {ocdbt.ByteRange("a", 0, 9)}
    with pytest.raises(KeyError):
        ocdbt.needed({name: found[name] for name in ("w/.zarray", "w/0.0")}, {"w": leaf}, lambda place: b"")


@pytest.mark.parametrize("place", ["value:../:d/a:0:9", "value::/etc/passwd:0:9", "value:d:0:9"])
def test_values_lie_in_the_folder_of_their_database(place):
    with pytest.raises(ValueError, match=r":0:9|unpack"):
        ocdbt._place(place)

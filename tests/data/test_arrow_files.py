"""Tables as text: .parquet, .arrow and .feather files. Written by pyarrow, compared with the .jsonl file of the same
rows, cell by cell."""

import json
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from token_folders import saved

from jaxformer.config import DataConfig
from jaxformer.data import sources
from jaxformer.data.contents import Contents
from jaxformer.data.faults import Faults
from jaxformer.data.text_files import documents
from jaxformer.errors import ConfigError

TEXTS = [f"row {i} naïve 语" * (i % 7) for i in range(1000)]  # every seventh is empty
TABLE = pa.table({"id": range(1000), "text": TEXTS, "none": pa.nulls(1000)})


def stream(table, path):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=170)


def file(table, path):
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=170)


def cast(kind, inner=lambda table, path: pa.parquet.write_table(table, path)):
    def write(table, path):
        column = table["text"].dictionary_encode() if kind == "dictionary" else table["text"].cast(kind)
        inner(table.set_column(1, "text", column), path)

    return write


WRITERS = {
    "groups.parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=130, compression="zstd"),
    "file.arrow": file,
    "stream.arrow": stream,
    "lz4.feather": lambda table, path: pa.feather.write_feather(table, str(path), compression="lz4"),
    "bytes.parquet": cast(pa.binary()),
    "large.parquet": cast(pa.large_string()),
    "view.arrow": cast(pa.string_view(), stream),
    "codes.arrow": cast("dictionary", stream),
    "codes.feather": cast("dictionary", lambda table, path: pa.feather.write_feather(table, str(path))),
}


def read(path, **settings):
    return list(documents(path, **{"separator": None, "text_field": "text", "field": "data.files", **settings}))


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_says_what_its_lines_say(name, tmp_path):
    WRITERS[name](TABLE, tmp_path / name)
    lines = tmp_path / "same.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    kept = Contents([sources.Input(tmp_path / name, "")])
    assert read(tmp_path / name, open_file=kept.open) == read(tmp_path / name) == read(lines)


@pytest.mark.parametrize("name", ["groups.parquet", "file.arrow", "stream.arrow", "lz4.feather"])
def test_a_file_that_was_cut_anywhere_is_refused(name, tmp_path):
    """Never fewer rows without a word: also between two batches of a stream, which the library takes for its end."""
    WRITERS[name](TABLE, tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    cut = tmp_path / f"cut_{name}"
    for size in {0, 5, len(whole) // 3, len(whole) // 2, len(whole) - 9, len(whole) - 8, len(whole) - 1}:
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"^config.data.files: {cut}: cannot be read"):
            read(cut)


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_bytes_cost_a_line_and_nothing_more(name, tmp_path):
    """No other exception and no end of the process; what damage cannot be told from text is text."""
    WRITERS[name](TABLE, tmp_path / name)
    whole, dice, refused = (tmp_path / name).read_bytes(), np.random.default_rng(0), 0
    for _ in range(30):
        damaged = bytearray(whole)
        for place in dice.integers(0, len(whole), dice.integers(1, 9)):
            damaged[place] = dice.choice([0, 255, dice.integers(0, 256)])
        (tmp_path / f"damaged_{name}").write_bytes(damaged)
        try:
            assert all(isinstance(text, str) for text in read(tmp_path / f"damaged_{name}", faults=Faults("skip")))
        except ConfigError as error:
            assert "cannot be read" in str(error) or "text" in str(error)
            refused += 1
    assert refused


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": TEXTS}), path)
    kept = Contents([sources.Input(path, "")])
    pa.parquet.write_table(pa.table({"text": TEXTS[::-1]}), path)
    with pytest.raises(ConfigError, match="changed while it was read"):
        read(path, open_file=kept.open)


def test_cells_that_are_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": [b"one", b"caf\xe9", None, b" \n", b"two"]}), path)
    with pytest.raises(ConfigError) as caught:
        read(path)
    why = f"config.data.files: {path}: row 2: byte 3 is not UTF-8 text"
    assert str(caught.value) == f"{why}; data.on_error=skip skips it"
    faults = Faults("skip")
    assert read(path, faults=faults) == ["one", "two"]
    assert (faults.count, faults.first) == (2, why)
    pa.parquet.write_table(pa.table({"text": ["one", None]}), path)
    with pytest.raises(ConfigError, match="row 2: 'text' is null, not text"):
        read(path)


def test_columns(tmp_path):
    path = tmp_path / "a.arrow"
    stream(TABLE, path)
    with pytest.raises(ConfigError) as caught:
        read(path, text_field="body")
    assert str(caught.value) == f"config.data.text_field: 'body' is no column of {path}; it has id, text, none"
    with pytest.raises(ConfigError) as caught:
        read(path, text_field="id")
    assert str(caught.value) == f"config.data.text_field: 'id' of {path} is int64, not text; columns of text: text"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_column_whose_name_is_also_a_path(name, tmp_path):
    """`a.b` is a column, and the field b of a column a."""
    table = pa.table({"a": [{"b": "wrong"}] * 3, "a.b": ["one", "two", "three"]})
    (stream if name == "a.arrow" else lambda table, path: pa.parquet.write_table(table, path))(table, tmp_path / name)
    assert read(tmp_path / name, text_field="a.b") == ["one", "two", "three"]


def test_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"a.parquet needs the parquet extra: pip install 'jaxformer\[parquet\]'$"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["groups.parquet", "stream.arrow"])
def test_memory_is_that_of_a_batch_of_rows(name, tmp_path):
    """20 MB in one row group of pages of 1 MB, or in batches of 170 rows: a part of it is held at once."""
    texts = [chr(0x4E00 + i) * 3333 for i in range(2000)]
    table = pa.table({"text": texts})
    if name == "stream.arrow":
        stream(table, tmp_path / name)
    else:
        pa.parquet.write_table(table, tmp_path / name, use_dictionary=False, write_batch_size=64, compression="none")
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    held = []
    tracemalloc.start()  # what it reads from the file is Python's, what it makes of that the pool's
    for _ in documents(tmp_path / name, separator=None, text_field="text", field="data.files"):
        held.append(pool.bytes_allocated() - before)
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(held) == 2000 and max(held) < 8e6 and read < 8e6


def test_both_splits_are_cut_as_those_of_lines(tmp_path):
    stream(TABLE, tmp_path / "a.arrow")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    table, lines = (DataConfig(files=(str(tmp_path / f"a.{ending}"),)) for ending in ("arrow", "jsonl"))
    for split in sources.SPLITS:
        assert list(sources.documents(table, split)) == list(sources.documents(lines, split))


def hf(folder, split="train", **fields):
    return list(sources.documents(DataConfig(hf_dir=str(folder), **fields), split))


def test_a_saved_dataset(tmp_path):
    texts = [text for text in TEXTS if text]
    saved(tmp_path / "one", TEXTS)
    assert hf(tmp_path / "one") + hf(tmp_path / "one", "validation") == texts
    assert len(hf(tmp_path / "one", "validation")) == round(len(texts) * 0.1)
    for name, part in {"train": texts[:500], "validation": texts[500:550], "test": texts[550:]}.items():
        saved(tmp_path / "dict" / name, part)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    assert hf(tmp_path / "dict") == texts[:500]
    assert hf(tmp_path / "dict", "validation") == texts[500:550]
    assert hf(tmp_path / "dict", "validation", hf_validation_split="test") == texts[550:]


def test_a_saved_dataset_that_is_not_whole(tmp_path):
    saved(tmp_path / "a", TEXTS, 3)
    for change, why in (
        (lambda state: state["_data_files"].append({"filename": "../../x.arrow"}), "lists no files of its own folder"),
        (lambda state: state["_data_files"].append({"filename": "more.arrow"}), "more.arrow is missing"),
        (lambda state: state.update(_indices_data_files=[{"filename": "indices.arrow"}]), "the order of the rows"),
        (lambda state: state.clear(), "lists no files"),
    ):
        state = json.loads((tmp_path / "a" / "state.json").read_text())
        keep = json.dumps(state)
        change(state)
        (tmp_path / "a" / "state.json").write_text(json.dumps(state))
        with pytest.raises(ConfigError, match=f"^config.data.hf_dir: .*{why}"):
            hf(tmp_path / "a")
        (tmp_path / "a" / "state.json").write_text(keep)

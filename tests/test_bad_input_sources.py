"""Tables, saved datasets and mixtures that are no good, provoked as a user would meet them; the lines stand in
bad_input.md."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from bad_input_cases import TINY, expected, place

from jaxformer.config import registry

__all__ = ["place"]


def pretrain(place, *flags, config=None):
    """As `place.pretrain`, without a source of text of its own."""
    base = [f"--config={config or place.config}", f"--config.workdir={place.folder / 'run'}"]
    outcome = place.run("pretrain", *base, f"--config.data.cache_dir={place.folder / 'cache'}", *TINY, *flags)
    assert not (place.folder / "run" / "manifest.json").exists()
    return outcome


def stream(path, table):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


TWICE = pa.Table.from_arrays([pa.array(["All"]), pa.array(["happy"])], names=["text", "text"])
TEXTS = pa.table({"id": range(9), "text": ["All happy families are alike. "] * 9})
NULL = pa.table({"text": ["All happy families are alike. ", None]})
LATIN = pa.table({"text": [b"caf\xe9"]})
CUT = slice(0, -8)  # the end of an Arrow stream is 8 bytes
# case -> (what is written, its name, which bytes of that, more flags)
TABLES = {
    "table without the column": (TEXTS, "a.parquet", slice(None), ["--config.data.text_field=body"]),
    "column that is not text": (TEXTS, "a.parquet", slice(None), ["--config.data.text_field=id"]),
    "two columns of that name": (TWICE, "a.parquet", slice(None), []),
    "broken parquet file": (TEXTS, "a.parquet", slice(0, -4), []),
    "Arrow stream that was cut": (TEXTS, "a.arrow", CUT, []),
    "row of a table that is null": (NULL, "a.parquet", slice(None), []),
    "row of a table that is not UTF-8": (LATIN, "a.arrow", slice(None), []),
    "compressed table": (TEXTS, "a.parquet.gz", slice(None), []),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(place, case):
    table, name, part, flags = TABLES[case]
    path = place.folder / name
    (stream if name.endswith(".arrow") else lambda path, table: pa.parquet.write_table(table, path))(path, table)
    path.write_bytes(path.read_bytes()[part])
    assert pretrain(place, f"--config.data.files={path}", *flags) == (2, expected()[case])


def test_a_table_of_the_first_version_of_feather(place):
    path = place.folder / "a.feather"
    path.write_bytes(b"FEA1" + bytes(60) + b"FEA1")  # pyarrow no longer writes them without a warning
    assert pretrain(place, f"--config.data.files={path}") == (2, expected()["table of an old version"])


def test_no_pyarrow(place, monkeypatch):
    pa.parquet.write_table(TEXTS, place.folder / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    flag = f"--config.data.files={place.folder / 'a.parquet'}"
    assert pretrain(place, flag) == (2, expected()["table without the extra"])


def saved(folder, splits=("train", "validation"), **state):
    for split in splits or [""]:
        (folder / split).mkdir(parents=True, exist_ok=True)
        stream(folder / split / "data-0.arrow", TEXTS)
        files = {"_data_files": [{"filename": "data-0.arrow"}]}
        (folder / split / "state.json").write_text(json.dumps(files | state))
    if splits:
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))


SPLITS = ("train", "validation")
# case -> (splits of the dataset, more of its state, more flags)
SAVED = {
    "saved dataset without the split": (SPLITS, {}, ["--config.data.hf_train_split=all"]),
    "saved dataset held out from itself": (SPLITS, {}, ["--config.data.hf_validation_split=train"]),
    "split of a saved dataset without splits": ((), {}, ["--config.data.hf_validation_split=test"]),
    "saved dataset with its order beside it": ((), {"_indices_data_files": [{"filename": "i.arrow"}]}, []),
    "saved dataset that names another's files": ((), {"_data_files": [{"filename": "../a.arrow"}]}, []),
    "saved dataset without a file": ((), {"_data_files": [{"filename": "data-1.arrow"}]}, []),
}


@pytest.mark.parametrize("case", SAVED)
def test_saved_datasets(place, case):
    splits, state, flags = SAVED[case]
    saved(place.folder / "set", splits, **state)
    assert pretrain(place, f"--config.data.hf_dir={place.folder / 'set'}", *flags) == (2, expected()[case])


def test_folders_that_are_no_saved_datasets(place):
    flag = f"--config.data.hf_dir={place.folder / 'set'}"
    assert pretrain(place, flag) == (2, expected()["saved dataset that is not there"])
    assert pretrain(place, "--config.data.source=huggingface") == (2, expected()["saved dataset that is not named"])
    (place.folder / "set").mkdir()
    assert pretrain(place, flag) == (2, expected()["folder that is no saved dataset"])
    (place.folder / "set" / "dataset_dict.json").write_text("{}")
    assert pretrain(place, flag) == (2, expected()["saved dataset that lists no splits"])
    (place.folder / "set" / "dataset_dict.json").write_text("{")
    assert pretrain(place, flag) == (2, expected()["saved dataset whose list is broken"])


A, B = "--config.data.mixture.a.source=markov", "--config.data.mixture.b.source=markov"
MIXTURES = {
    "mixture with a weight of 0": [A, "--config.data.mixture.a.weight=0"],
    "mixture with a weight below 0": [A, "--config.data.mixture.a.weight=-1"],
    "mixture with a weight that is not finite": [A, "--config.data.mixture.a.weight=inf"],
    "mixture with a hyphen in a name": ["--config.data.mixture.a-b.source=markov"],
    "mixture with an unknown field": [A, "--config.data.mixture.a.wieght=1"],
    "mixture with a tokenizer for one source": [A, "--config.data.mixture.a.tokenizer=bytes"],
    "mixture with an entry without a source": [A, "--config.data.mixture.b.weight=1"],
    "mixture with a value for an entry": ["--config.data.mixture.a=markov"],
    "mixture that is no section": ["--config.data.mixture=markov"],
    "mixture in a mixture": [A, "--config.data.mixture.b.source=mixture"],
    "mixture that is not given": ["--config.data.source=mixture"],
    "mixture beside another source": [A, "--config.data.files=a.txt"],
    "mixture beside a field of a source": [A, "--config.data.on_error=skip"],
    "mixture with a field that the source does not read": [A, "--config.data.mixture.a.separator=-"],
    "mixture of a language and text": [A, "--config.data.mixture.b.source=stdlib"],
    "mixture of different alphabets": [A, B, "--config.data.mixture.b.language_symbols=8"],
    "mixture of languages with whole words": [A, "--config.data.whole_word=true"],
    "mixture with a missing file": ["--config.data.mixture.a.files=text.txt", "--config.data.mixture.b.files=none.txt"],
    "mixture with a source shorter than one row": [
        *(A, "--config.data.mixture.a.language_tokens=900"),
        *(B, "--config.data.mixture.b.language_tokens=9"),
    ],
}


@pytest.fixture
def only_our_sources():
    """Without those that config files of other tests have registered in this process, which lines would list."""
    names = [name for field, name in registry._BROUGHT if field == "data.source"]
    others = {name: registry.SOURCES.pop(name) for name in names if name in registry.SOURCES}
    yield
    registry.SOURCES.update(others)


@pytest.mark.usefixtures("only_our_sources")
@pytest.mark.parametrize("case", MIXTURES)
def test_mixtures(place, case, monkeypatch):
    monkeypatch.chdir(place.folder)
    assert pretrain(place, *MIXTURES[case]) == (2, expected()[case])


FILES = {
    "mixture of nothing": {},
    "mixture with a name that is none": {"a/b": {"source": "markov"}},
    "mixture with a name that is taken": {"shares": {"source": "markov"}},
    "mixture with an entry that is no section": {"a": "markov"},
}


@pytest.mark.parametrize("case", FILES)
def test_config_files(place, case):
    place.config.write_text(f"def get_config():\n    return {{'data': {{'mixture': {FILES[case]!r}}}}}\n")
    assert pretrain(place) == (2, expected()[case])


def test_a_source_of_ones_own_with_another_alphabet(place):
    place.config.write_text("""
from jaxformer.data.sources import SOURCES, Source

def source(letters):
    def documents(data, split, faults, open_file):
        return iter([letters * 99])
    return Source(documents, lambda data: [], alphabet=lambda data: letters)

SOURCES["two_letters"], SOURCES["three_letters"] = source("ab"), source("abc")

def get_config():
    return {"data": {"mixture": {"a": {"source": "two_letters"}, "b": {"source": "three_letters"}}}}
""")
    flags = ["--config.data.tokenizer=chars"]
    assert pretrain(place, *flags) == (2, expected()["mixture of sources that share no tokenizer"])


@pytest.mark.slow
def test_another_weight_when_a_run_goes_on(place):
    flags = [f"--config={place.config}", f"--config.workdir={place.folder / 'run'}", *TINY, A, B]
    flags += [f"--config.data.cache_dir={place.folder / 'cache'}", "--config.data.mixture.a.language_seed=1"]
    assert place.run("pretrain", *flags) == (0, "")
    before = sorted((p, p.read_bytes()) for p in (place.folder / "run").rglob("*") if p.is_file())
    assert place.run("pretrain", *flags, "--config.data.mixture.a.weight=2") == (
        2,
        expected()["mixture whose weight changed"],
    )
    assert sorted((p, p.read_bytes()) for p in (place.folder / "run").rglob("*") if p.is_file()) == before

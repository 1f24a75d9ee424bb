"""Examples with labels in tables: the examples of the .jsonl file of the same rows, whatever wrote the table."""

import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from jaxformer.config import DataConfig, Labelled, from_mapping
from jaxformer.data import arrow_records, labelled_files, sources
from jaxformer.data.faults import Faults
from jaxformer.data.unpacked_files import open_file
from jaxformer.errors import ConfigError
from jaxformer.runs import tasks

FEATURES = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
ROWS = [{"text": f"row {i} naïve", "other": "b", "label": i % 2, "id": i} for i in range(600)]


def stream(table, path):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=170)


def file(table, path):
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    ".parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=130),
    ".feather": lambda table, path: pa.feather.write_feather(table, str(path), compression="lz4"),
    "stream.arrow": stream, "file.arrow": file,
}  # fmt: skip


def table_of(rows, features=None):
    table = pa.Table.from_pylist(rows)
    known = {} if features is None else {"huggingface": json.dumps({"info": {"features": features}})}
    return table.replace_schema_metadata(known)


def examples(path, objective="sequence_classification", faults="stop", unlabelled=False, **fields):
    data = DataConfig(objective=objective, labelled=Labelled(**fields))
    found = labelled_files.examples(
        path, data=data, field="data.files", faults=Faults(faults), open_file=open_file, unlabelled=unlabelled
    )
    return [(each.texts, each.label) for each in found]


@pytest.mark.parametrize("ending", WRITERS)
def test_the_examples_of_the_same_lines(ending, tmp_path):
    path, lines = tmp_path / f"table{ending}", tmp_path / "lines.json.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    WRITERS[ending](table_of(ROWS), path)
    assert examples(path, second_field="other") == examples(lines, second_field="other")
    WRITERS[ending](table_of(ROWS, FEATURES), path)
    named = examples(path)
    assert named[:2] == [(("row 0 naïve",), "no"), (("row 1 naïve",), "yes")] and len(named) == 600


def test_labels_of_words_answers_and_choices(tmp_path):
    path = tmp_path / "t.parquet"
    tags = {"tags": {"feature": {"names": ["O", "B-X"]}, "_type": "Sequence"}}
    pa.parquet.write_table(table_of([{"text": ["a", "bc"], "tags": [0, 1]}], tags), path)
    assert examples(path, "token_classification", label_field="tags") == [
        (("a bc",), [[0, 2], [1, 4], ["O", "B-X"]])
    ]  # fmt: skip
    answers = {"text": ["b"], "answer_start": [2]}
    pa.parquet.write_table(table_of([{"id": "q", "question": "what?", "context": "a b", "answers": answers}]), path)
    lines = tmp_path / "t.jsonl"
    lines.write_text(json.dumps({"id": "q", "question": "what?", "context": "a b", "answers": answers}))
    assert examples(path, "extractive_qa") == examples(lines, "extractive_qa")
    ends = {"label": {"names": ["0", "1"], "_type": "ClassLabel"}}
    for features, label in ((ends, 1), (None, "1"), (None, 1)):
        pa.parquet.write_table(table_of([{"text": "It", "choices": ["is", "was"], "label": label}], features), path)
        assert examples(path, "multiple_choice") == [(("It", " is", " was"), 1)]


def test_classes_keep_their_order(tmp_path):
    """GLUE's MRPC has the class that F1 is of second, and sorted it would be the first."""
    names = ["not_equivalent", "equivalent"]
    for ending, write in WRITERS.items():
        path = tmp_path / f"t{ending}"
        write(table_of(ROWS, {"label": {"names": names, "_type": "ClassLabel"}}), path)
        data = DataConfig(files=(str(path),), objective="sequence_classification", labelled=Labelled())
        assert sources.SOURCES["files"].class_names(data) == names
    lines = tmp_path / "t.jsonl"
    lines.write_text("{}")
    data = DataConfig(files=(str(lines),), objective="sequence_classification", labelled=Labelled())
    assert sources.SOURCES["files"].class_names(data) == []
    tags = {"label": {"feature": {"names": ["O", "B"]}, "_type": "Sequence"}}
    pa.parquet.write_table(table_of([{"text": ["a"], "label": [0]}], tags), tmp_path / "t.parquet")
    assert arrow_records.class_names(tmp_path / "t.parquet", "label", open_file) == ["O", "B"]


def test_labels_stand_in_the_order_of_their_classes(tmp_path, monkeypatch):
    names, path = ["not_equivalent", "equivalent"], tmp_path / "t.parquet"
    pa.parquet.write_table(table_of(ROWS, {"label": {"names": names, "_type": "ClassLabel"}}), path)
    data = {"files": (str(path),), "objective": "sequence_classification"}
    monkeypatch.setattr(tasks, "label_counts", lambda config, text: dict.fromkeys(names, 3))
    fitted = tasks.fit_labels(from_mapping({"data": data}), None)
    assert fitted.data.labelled.labels == tuple(names) and fitted.model.head.outputs == 2
    monkeypatch.setattr(tasks, "label_counts", lambda config, text: {**dict.fromkeys(names, 3), "another": 1})
    assert tasks.fit_labels(from_mapping({"data": data}), None).data.labelled.labels[0] == "another"


def test_what_is_no_example(tmp_path):
    path = tmp_path / "t.parquet"
    rows = [
        {"text": "a", "label": -1},
        {"text": None, "label": 1},
        {"text": "b", "label": 1},
        {"text": "c", "label": 2},
    ]
    pa.parquet.write_table(table_of(rows, FEATURES), path)
    assert examples(path, faults="skip") == [(("b",), "yes")]
    with pytest.raises(ConfigError, match=r"t.parquet:1: the field 'label' holds no label"):
        examples(path)
    with pytest.raises(ConfigError, match=r"t.parquet:2: the field 'text' holds None"):
        examples(path, unlabelled=True)
    pa.parquet.write_table(table_of(rows[2:], FEATURES), path)
    with pytest.raises(ConfigError, match=r"t.parquet:2: class 2; accepted: 0 to 1, which have names"):
        examples(path)
    pa.parquet.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(ConfigError, match=r"^config.data.files: \S+t.parquet: 2 columns 'text'; accepted: one$"):
        examples(path)
    bad = pa.array([b"a", b"\xff"])
    pa.parquet.write_table(pa.table({"text": bad, "label": [1, 1]}), path)
    with pytest.raises(ConfigError, match=r"t.parquet:2: the field 'text' holds b'.xff'"):
        examples(path)


def test_columns_that_nobody_reads(tmp_path):
    path = tmp_path / "t.parquet"
    columns = [pa.array(["a", "b"]), pa.array([0.5, float("nan")]), *[pa.array([b"\xff\xfe", None])] * 2]
    pa.parquet.write_table(pa.table(columns, names=["text", "label", "image", "image"]), path)
    zones = pa.array([1, 2], pa.timestamp("us", "Foo/Bar"))
    columns.append(zones)
    pa.parquet.write_table(pa.table(columns, names=["text", "label", "image", "image", "when"]), path)
    assert examples(path, unlabelled=True) == [(("a",), None), (("b",), None)]
    with pytest.raises(ConfigError, match=r"a column of timestamp\[us, tz=Foo/Bar\] cannot be read"):
        examples(path, label_field="when")
    with pytest.raises(ConfigError, match=r"has no column 'text'; it has a, a$"):
        pa.parquet.write_table(pa.table(columns[:2], names=["a", "a"]), path)
        examples(path)
    pa.parquet.write_table(pa.table(columns[:2], names=["text", "label"]), path)
    with pytest.raises(ConfigError, match=r"t.parquet:2: the field 'label' holds no label"):  # which pandas writes so
        examples(path)


def test_labels_that_nobody_reads(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a", "label": ["yes"]}\n{"text": "b", "label": ""}\n{"text": "c", "label": NaN}\n')
    assert examples(path, unlabelled=True) == [(("a",), None), (("b",), None), (("c",), None)]
    assert examples(path, "regression", unlabelled=True)[0] == (("a",), None)
    with pytest.raises(ConfigError, match=r"t.jsonl:1: the label is \['yes'\]; accepted: a text, a number or a truth"):
        examples(path)


@pytest.mark.parametrize("ending", WRITERS)
def test_damaged_tables(ending, tmp_path):
    """Whatever is damaged, it is one line, or the examples that are there."""
    path = tmp_path / f"table{ending}"
    WRITERS[ending](table_of(ROWS, FEATURES), path)
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]):
            path.write_bytes(content)
            try:
                examples(path, faults="skip")
            except ConfigError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 60


@pytest.mark.slow
def test_a_saved_dataset(tmp_path, monkeypatch):
    """As the library datasets writes it, with its own classes; needs the extra `services`."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"row {i}" for i in range(40)], "label": [i % 2 for i in range(40)]}
    whole = datasets.Dataset.from_dict(rows, features=kinds).train_test_split(test_size=0.25, seed=0)
    whole.save_to_disk(tmp_path / "set")
    data = DataConfig(
        source="huggingface", hf_dir=str(tmp_path / "set"), hf_validation_split="test",
        objective="sequence_classification", labelled=Labelled(),
    )  # fmt: skip
    for split, part in (("train", whole["train"]), ("validation", whole["test"])):
        found = [(each.texts[0], each.label) for each in sources.documents(data, split)]
        assert found == [(row["text"], ["no", "yes"][row["label"]]) for row in part]
    whole["train"].to_parquet(tmp_path / "one.parquet")
    assert examples(tmp_path / "one.parquet")[0][1] in ("no", "yes")

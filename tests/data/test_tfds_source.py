"""Only datasets prepared here are read; none of these tests may reach for a network."""

import shutil
import socket
import sys

import numpy as np
import pytest

from jaxformer.config import DataConfig, Labelled
from jaxformer.data import sources, tfds_source
from jaxformer.errors import ConfigError

TEXTS = {"train": [f"text é {i}" for i in range(20)] + [" "], "validation": ["held", "out"]}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the datasets tiny (1.9.0 and 1.10.0) and other."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="the tfds extra; .ci/run has it")
    root = tmp_path_factory.mktemp("tfds")

    def prepare(dataset, version, texts):
        class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
            name = dataset
            VERSION = tfds.core.Version(version)

            def _info(self):
                features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "raw": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(split) for split in texts}

            def _generate_examples(self, split):
                for number, text in enumerate(texts[split]):
                    yield number, {"text": text, "raw": b"\xff" if number else b"x"}

        Builder(data_dir=root, file_format="array_record").download_and_prepare()

    prepare("tiny", "1.9.0", {"train": ["old"], "validation": ["old"]})
    prepare("tiny", "1.10.0", TEXTS)
    prepare("other", "1.0.0", {"train": ["no held-out split"]})
    return root


def config(root, name="tiny", **settings):
    return DataConfig(source="tfds", tfds_name=name, tfds_dir=str(root), **settings)


def error_of(data, split="train"):
    with pytest.raises(ConfigError) as error:
        list(sources.documents(data, split))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_texts_by_name_and_by_directory(prepared):
    for data in (
        config(prepared),
        config(prepared, "tiny:1.10.0"),
        config(prepared / "tiny", None),
        config(prepared / "tiny" / "1.10.0", None),
    ):
        assert list(sources.documents(data, "train")) == TEXTS["train"][:20]  # the blank one is left out
        assert list(sources.documents(data, "validation")) == TEXTS["validation"]
    assert list(sources.documents(config(prepared, "tiny:1.9.0"), "train")) == ["old"]
    assert "tensorflow" not in sys.modules


def test_the_default_folder_is_that_of_tfds(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    data = DataConfig(source="tfds", tfds_name="tiny")
    assert tfds_source.find(data) == prepared / "tiny" / "1.10.0"


def test_splits_may_be_slices(prepared):
    data = config(prepared, "other", tfds_train_split="train[:1]")
    assert list(sources.documents(data, "train")) == ["no held-out split"]
    data = config(prepared, tfds_validation_split="train[50%:]")
    assert list(sources.documents(data, "validation")) == TEXTS["train"][10:20]


def test_inputs_are_its_files(prepared):
    names = [each.path.name for each in sources.inputs(config(prepared))]
    assert names == sorted(names) and "features.json" in names and len(names) == 4


def test_bad_splits_and_fields(prepared):
    where = prepared / "other" / "1.0.0"
    message = error_of(config(prepared, "other"), "validation")
    assert message.startswith("config.data.tfds_validation_split: 'validation': Unknown split")
    assert message.endswith(f"({where} has train)")
    where = prepared / "tiny" / "1.10.0"
    assert error_of(config(prepared, text_field="body")) == (
        f"config.data.text_field: 'body' is not a feature of {where}; it has raw, text"
    )
    assert error_of(config(prepared, text_field="raw")) == (
        f"config.data.tfds_train_split: {where}: train: example 1: byte 0 is not UTF-8 text; "
        "data.on_error=skip skips it"
    )


FILES = ["dataset_info.json", "features.json", "tiny-train.array_record-00000-of-00001"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_dataset_is_one_line_and_never_left_out(prepared, tmp_path, file, damage):
    shutil.copytree(prepared / "other", tmp_path / "other")
    path = tmp_path / "other" / "1.0.0" / file.replace("tiny", "other")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "flipped":
        content[middle : middle + 40] = bytes(byte ^ 0x55 for byte in content[middle : middle + 40])
    path.write_bytes(content if damage == "flipped" else content[:middle] if damage == "cut" else b"")
    if damage == "gone":
        path.unlink()
    for on_error in ("stop", "skip"):
        message = error_of(config(tmp_path, "other", on_error=on_error))
        assert message.startswith("config.data.tfds_") and message.isprintable()
        if (file, damage) != (FILES[0], "gone"):  # that is no dataset at all
            assert "cannot be read (" in message


def test_unknown_names(prepared, tmp_path):
    assert error_of(config(prepared, "tinny")).startswith(
        f"config.data.tfds_name: 'tinny' is not a dataset that TFDS knows, nor one under {prepared}; nearest: tiny"
    )
    assert "nearest: lm1b" in error_of(config(tmp_path, "lm1bb"))
    assert "nearest" not in error_of(config(tmp_path, "qqqqqqqqqqqq"))


def test_known_but_not_prepared(prepared):
    message = error_of(config(prepared, "ag_news_subset"))
    assert message.startswith(f"config.data.tfds_name: 'ag_news_subset' is not prepared under {prepared}; prepare it")
    assert "t.builder('ag_news_subset', data_dir=" in message
    assert "is not prepared under" in error_of(config(prepared, "tiny:9.9.9"))


def test_bad_directories(prepared, tmp_path):
    assert error_of(config(tmp_path / "no", None)) == f"config.data.tfds_dir: {tmp_path / 'no'} is not a directory"
    assert error_of(config(tmp_path, None)) == (
        f"config.data.tfds_dir: {tmp_path} holds no prepared dataset (no dataset_info.json below it)"
    )
    assert error_of(config(prepared, None)) == (
        f"config.data.tfds_dir: {prepared} is several datasets; set data.tfds_name to one of other, tiny"
    )


def test_a_format_that_needs_tensorflow(prepared, tmp_path):
    where = tmp_path / "tiny" / "1.10.0"
    where.mkdir(parents=True)
    for path in (prepared / "tiny" / "1.10.0").glob("*.json"):
        (where / path.name).write_text(path.read_text().replace("array_record", "tfrecord"))
    assert error_of(config(tmp_path)) == (
        f"config.data.tfds_name: {where} is in the format tfrecord, which needs TensorFlow; "
        "prepare it with file_format='array_record'"
    )


def test_without_the_extra(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert error_of(config(prepared)) == (
        "config.data.source: tfds needs the tfds extra: pip install 'jaxformer[tfds]'"
    )


def test_labels_have_the_names_of_their_class(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets", reason="the tfds extra; .ci/run has it")

    class Tagged(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            kinds = tfds.features.ClassLabel(names=["yes", "no"])
            features = {"text": tfds.features.Text(), "label": kinds, "score": tfds.features.Scalar(np.float32),
                        "words": tfds.features.Sequence(tfds.features.Text()),
                        "tags": tfds.features.Sequence(kinds)}  # fmt: skip
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples() for split in ("train", "validation")}

        def _generate_examples(self):
            yield 0, {"text": "it is", "label": "yes", "score": 1.5, "words": ["it", "is"], "tags": ["no", "yes"]}

    Tagged(data_dir=tmp_path, file_format="array_record").download_and_prepare()

    def read(objective, **fields):
        labelled = Labelled(label_field=fields.pop("label_field", "label"))
        data = config(tmp_path, "tagged", objective=objective, labelled=labelled, **fields)
        (example,) = sources.documents(data, "train")
        return example, example.label

    for field, names in (("label", ["yes", "no"]), ("tags", ["yes", "no"]), ("score", []), ("none", [])):
        data = config(tmp_path, "tagged", objective="sequence_classification", labelled=Labelled(label_field=field))
        assert sources.SOURCES["tfds"].class_names(data) == names
    assert read("sequence_classification") == ("it is", "yes")
    assert read("regression", label_field="score") == ("it is", 1.5)
    found = read("token_classification", text_field="words", label_field="tags")
    assert found == ("it is", [[0, 3], [2, 5], ["no", "yes"]])

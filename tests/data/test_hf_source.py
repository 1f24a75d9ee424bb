"""Folders that `save_to_disk` wrote, read here and by the library `datasets` itself."""

import pytest

from jaxformer.config import DataConfig
from jaxformer.data import sources

pytestmark = pytest.mark.slow  # needs the extra `services`

ROWS = [f"row {i} of naïve 语 text" for i in range(997)]


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    return found


def texts(folder, split, **fields):
    return list(sources.documents(DataConfig(hf_dir=str(folder), **fields), split))


@pytest.mark.parametrize("shards", [1, 5])
def test_shuffled_filtered_and_selected_sets(datasets, tmp_path, shards):
    whole = datasets.Dataset.from_dict({"n": range(len(ROWS)), "text": ROWS})
    for number, one in enumerate(
        [
            whole,
            whole.shuffle(seed=3),
            whole.filter(lambda row: row["n"] % 3 == 0).shuffle(seed=1).select(range(40, 200)),
            datasets.concatenate_datasets([whole.select([7, 1, 4]), whole.shuffle(seed=2)]),
        ]
    ):
        folder = tmp_path / f"set{number}"
        one.save_to_disk(folder, num_shards=shards)
        wanted = list(datasets.load_from_disk(folder)["text"])
        assert texts(folder, "train") + texts(folder, "validation") == wanted == list(one["text"])


def test_splits(datasets, tmp_path):
    whole = datasets.Dataset.from_dict({"text": ROWS})
    parts = whole.train_test_split(test_size=0.2, seed=0)
    parts.save_to_disk(tmp_path / "two")
    found = datasets.load_from_disk(tmp_path / "two")
    assert texts(tmp_path / "two", "train", hf_validation_split="test") == list(found["train"]["text"])
    assert texts(tmp_path / "two", "validation", hf_validation_split="test") == list(found["test"]["text"])
    assert texts(tmp_path / "two", "train") + texts(tmp_path / "two", "validation") == list(found["train"]["text"])

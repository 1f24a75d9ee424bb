"""Few-shot tasks that cannot be asked: one line, before a model is opened."""

import json

import pytest
from bad_input_cases import expected, place

from jaxformer.config import from_mapping
from jaxformer.runs import harness, manifest

__all__ = ["place"]


@pytest.fixture
def run(place, monkeypatch):
    """Folders of runs that have a manifest and nothing else."""
    monkeypatch.chdir(place.folder)
    models = {
        "gpt": {},
        "bert": {"model": {"family": "bert"}, "data": {"objective": "masked"}},
        "tuned": {"model": {"head": {"task": "regression", "outputs": 1}},
                  "data": {"objective": "regression", "labelled": {}}},
    }  # fmt: skip
    for name, fields in models.items():
        config = from_mapping(fields | {"model": {"vocab_size": 300, **fields.get("model", {})}})
        (place.folder / name).mkdir()
        manifest.write(place.folder / name / manifest.FILE_NAME, manifest.describe(config, [], "", "", ""))
    return lambda *words: place.run("lm_eval", *words)


@pytest.mark.parametrize(("case", "words"), [
    ("few-shot tasks without a name", ["gpt", "--tasks=,"]),
    ("few-shot tasks of a bert", ["bert", "--tasks=a"]),
    ("few-shot tasks of a run with another head", ["tuned", "--tasks=a"]),
    ("few-shot tasks without the extra", ["gpt", "--tasks=a"]),
    ("settings of generation without a value", ["gpt", "--tasks=a", "--gen-kwargs=temperature"]),
])  # fmt: skip
def test_what_needs_no_harness(run, monkeypatch, case, words):
    monkeypatch.setattr(harness, "TemplateLM", object)
    assert run(*words) == (2, expected()[case])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_tasks_that_are_not_there(run, place, monkeypatch):
    import lm_eval.tasks

    own = lm_eval.tasks.TaskManager
    monkeypatch.setattr(  # reading those that come with it takes a while
        lm_eval.tasks, "TaskManager", lambda include_path, **_: own(include_path=include_path, include_defaults=False)
    )
    (place.folder / "tasks").mkdir()
    task = {"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": "none.jsonl"},
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}  # fmt: skip
    (place.folder / "tasks" / "mine.yaml").write_text(json.dumps(task))
    words = ["gpt", "--include-path=tasks"]
    assert run("gpt", "--tasks=a", "--include-path=none") == (2, expected()["few-shot tasks of no folder"])
    assert run(*words, "--tasks=min") == (2, expected()["few-shot task that is unknown"])
    code, line = run(*words, "--tasks=mine")
    assert (code, line.split(" (")[0]) == (2, expected()["few-shot task without its data"].split(" (")[0])

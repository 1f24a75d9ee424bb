"""Models from elsewhere that cannot become a run, and what such a run has not: one line, and nothing written."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bad_input_cases import expected, place
from foreign_folders import folder_of, word_tokenizer
from safetensors.numpy import load_file, save_file

from jaxformer.interchange import tokenizer_files
from jaxformer.runs.imported_run import import_run

__all__ = ["place"]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Folders of models, and a run made of one."""
    top = tmp_path_factory.mktemp("import")
    folder_of(top / "theirs")
    for name, tokens in (("bare", None), ("large", ["<s>", *"abcdefgh"]), ("mute", [])):
        (top / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (top / name / file).write_bytes((top / "theirs" / file).read_bytes())
        if tokens is not None:
            word_tokenizer(tokens).save(str(top / name / "tokenizer.json"))
    (top / "adapter").mkdir()
    (top / "adapter" / "adapter_config.json").write_text("{}")
    import_run(top / "theirs", str(top / "run"), log=lambda line: None)
    return top


@pytest.mark.parametrize(("case", "words"), [
    ("import into a folder that is not empty", ["theirs", "--workdir=full"]),
    ("import without a workdir", ["theirs"]),
    ("import of no folder", ["nowhere", "--workdir=new"]),
    ("import of adapters without their run", ["adapter", "--workdir=new"]),
    ("import without a tokenizer", ["bare", "--workdir=new"]),
    ("import with a tokenizer that is none", ["theirs", "--workdir=new", "--tokenizer=text.txt"]),
    ("import with a larger tokenizer", ["theirs", "--workdir=new", "--tokenizer=large"]),
    ("import with a tokenizer that begins nothing", ["theirs", "--workdir=new", "--tokenizer=mute"]),
])  # fmt: skip
def test_what_cannot_be_imported(place, there, monkeypatch, case, words):
    monkeypatch.chdir(there)
    for folder in (there, there / "full"):
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("text")
    assert place.run("import", *words) == (2, expected()[case])
    assert not Path("new").exists() or not [path for path in Path("new").iterdir() if path.name[0] != "."]


def test_an_unknown_word(place, there, monkeypatch):
    monkeypatch.chdir(there)
    found = place.run("generate", "run", "--prompt=the cat", "--max-new-tokens=1")
    assert found == (2, expected()["text that an imported tokenizer has no token for"])


@pytest.mark.parametrize("number", [np.nan, -np.inf], ids=str)
def test_weights_that_are_not_finite(place, there, monkeypatch, number):
    monkeypatch.chdir(place.folder)
    shutil.copytree(there / "theirs", place.folder / "theirs")
    weights = place.folder / "theirs" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 1] = number
    save_file(tensors, weights)
    found = place.run("import", str(place.folder / "theirs"), "--workdir=new")
    assert found == (2, expected()["import of weights that are not finite"])
    assert not Path("new").exists() or not [path for path in Path("new").iterdir() if path.name[0] != "."]


@pytest.mark.parametrize(("case", "about"), [
    ("import of a model of several types", {"model_type": ["llama"]}),
    ("import of a config nested too deeply", None),
])  # fmt: skip
def test_configs(place, there, monkeypatch, case, about):
    monkeypatch.chdir(place.folder)
    text = (
        "[" * 100_000 if about is None else json.dumps(json.loads((there / "theirs/config.json").read_text()) | about)
    )
    (place.folder / "theirs").mkdir()
    (place.folder / "theirs" / "config.json").write_text(text)
    assert place.run("import", str(place.folder / "theirs"), "--workdir=new") == (2, expected()[case])


@pytest.mark.parametrize(("case", "about"), [
    ("adapters of peft of no rank", {"r": 0}),
    ("adapters of peft with half an expression", {"alpha_pattern": {"(": 4}}),
])  # fmt: skip
def test_adapters(place, there, monkeypatch, case, about):
    monkeypatch.chdir(there)
    (place.folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, **about}))
    words = [str(place.folder), "--base=run", "--workdir=new"]
    assert place.run("import", *words) == (2, expected()[case])


def test_an_export_to_a_full_disk(place, there, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(there)
    monkeypatch.setattr(tokenizer_files.files, "write_atomically", full)
    assert place.run("export", "run", f"--out={place.folder}/x") == (2, expected()["export to a full disk"])


def test_what_an_imported_run_has_not(place, there, monkeypatch):
    monkeypatch.chdir(there)
    assert place.run("evaluate", "run") == (2, expected()["evaluate an imported run without text"])
    assert place.run("curves", "run", "--out=a.png") == (2, expected()["curves of an imported run"])


@pytest.mark.parametrize(("case", "fields"), [
    ("optimizer of an imported run", ["init_optimizer=true"]),
    ("masks with a tokenizer that has none", [
        "model.family=bert", "model.block=post_norm", "model.positions=learned", "data.objective=masked",
        "init_from=none", "data.tokenizer_file=run/tokenizer.json",
    ]),
])  # fmt: skip
def test_what_cannot_start_from_it(place, there, monkeypatch, case, fields):
    monkeypatch.chdir(there)
    place.text.write_text("the quick brown fox " * 200)
    words = ["run/config.py", f"--config.data.files={place.text}", "--config.train.global_batch_size=8",
             "--config.init_from=run", f"--config.workdir={place.folder / 'next'}", "--config.compilation_cache=false",
             f"--config.data.cache_dir={place.folder / 'cache'}"]  # fmt: skip
    assert place.run("pretrain", *words, *(f"--config.{each}" for each in fields)) == (2, expected()[case])

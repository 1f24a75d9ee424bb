"""Models that other libraries cannot have, and folders that they cannot go to: one line, and nothing written."""

import shutil
from pathlib import Path

import pytest
from bad_input_cases import expected, place

from jaxformer.config import from_mapping
from jaxformer.runs import manifest

__all__ = ["place"]
RUN = Path(__file__).parent / "fixtures" / "last_version" / "run"


@pytest.mark.parametrize(("case", "flags"), [
    ("export of another dtype", ["--out=x", "--dtype=int8"]),
    ("export of adapters that a run has not", ["--out=x", "--adapter"]),
    ("export into a file", ["--out=text.txt"]),
    ("export into a folder with a model", ["--out=taken"]),
    ("export into a run", ["--out=run"]),
    ("export into what a stopped one left", ["--out=half"]),
    ("export of what others have not", ["--out=x"]),
])  # fmt: skip
def test_what_cannot_be_exported(place, monkeypatch, case, flags):
    monkeypatch.chdir(place.folder)
    shutil.copytree(RUN, "run")
    for name in ("taken", "half"):
        Path(name).mkdir()
    Path("half/model.safetensors").touch()
    Path("taken/config.json").write_text("{}")
    assert place.run("export", "run", *flags) == (2, expected()[case])
    assert not Path("x").exists() and [path.name for path in Path("taken").iterdir()] == ["config.json"]


def test_adapters_beside_a_head(place):
    """The manifest alone is read."""
    task = {"data": {"objective": "sequence_classification"}, "model": {"head": {"outputs": 2}, "vocab_size": 300}}
    config = from_mapping({**task, "tune": {"lora_rank": 2}, "init_from": "runs/a"})
    run = place.folder / "run"
    run.mkdir()
    manifest.write(run / manifest.FILE_NAME, manifest.describe(config, [], "", "0"))
    found = place.run("export", str(run), "--adapter", f"--out={place.folder / 'x'}")
    assert found == (2, expected()["export of adapters beside a head"])

"""Sweeps that cannot be: one line before the first run begins, and nothing written."""

import re

import pytest
from bad_input_cases import TINY, expected, place

__all__ = ["place"]


def sweep(place, *flags: str, workdir: str = "sweep") -> tuple[int, str]:
    """What `jaxformer sweep` says on the folder's text in a tiny size."""
    data = [f"--config.data.files={place.text}", f"--config.data.cache_dir={place.folder / 'cache'}"]
    where = f"--workdir={place.folder / workdir}"
    return place.run("sweep", f"--config={place.config}", where, *data, *TINY, *flags)


@pytest.mark.parametrize(("case", "flags"), [
    ("sweep over nothing", []),
    ("sweep without values", ["--over", "seed"]),
    ("sweep over a misspelt field", ["--over", "optimizer.weight_deca=0,1"]),
    ("sweep over a value out of range", ["--over", "seed=0,1", "--over", "model.dropout=0,2"]),
    ("sweep over values of the wrong type", ["--over", "seed=0,x"]),
    ("sweep over the same value twice", ["--over", "seed=0..2,1"]),
    ("sweep over one value in two spellings", ["--over", "optimizer.learning_rate=0.001,1e-3"]),
    ("sweep over one field twice", ["--over", "seed=0,1", "--over", "seed=2,3"]),
    ("sweep over a field that is given", ["--over", "seed=0,1", "--config.seed=3"]),
    ("sweep over its folder", ["--over", "workdir=a,b"]),
    ("sweep over too many values", ["--over", "seed=0..99999"]),
    ("sweep over too many runs", ["--over", "seed=0..999", "--over", "train.max_bad_steps=1..1000"]),
    ("sweep over an empty range", ["--over", "seed=4..0"]),
])  # fmt: skip
def test_values(place, case, flags):
    assert sweep(place, *flags) == (2, expected()[case])
    assert not (place.folder / "sweep").exists()


def test_folders(place):
    (place.folder / "foreign").mkdir()
    (place.folder / "foreign" / "thesis.tex").write_text("x")
    assert sweep(place, "--over=seed=0,1", workdir="foreign") == (2, expected()["sweep into a foreign folder"])
    assert sweep(place, "--over=seed=0,1", workdir="text.txt") == (2, expected()["sweep into a file"])
    line = expected()["report of no sweep"]
    assert place.run("sweep", "--report-only", f"--workdir={place.folder}") == (2, line)
    assert [path.name for path in (place.folder / "foreign").iterdir()] == ["thesis.tex"]


def test_a_sweep_that_another_process_trains(place, monkeypatch):
    from jaxformer.runs import sweeping

    path, before = place.folder / "sweep" / "sweep.json", []

    def meanwhile(*_):
        before.append(path.read_bytes())
        code, line = sweep(place, "--over=seed=0..5")
        line = re.sub(r"process \d+ on \S+ since .*", "process PROCESS on HOST since SINCE", line)
        assert (code, line) == (2, expected()["sweep that is being trained"])
        assert path.read_bytes() == before[0]
        return False

    monkeypatch.setattr(sweeping, "run", meanwhile)
    assert sweep(place, "--over=seed=0,1") == (75, "") and before


def test_another_sweep_s_folder(place, monkeypatch):
    from jaxformer.runs import sweeping

    monkeypatch.setattr(sweeping, "run", lambda *_: False)  # the folder is made, and a signal comes
    assert sweep(place, "--over=seed=0,1") == (75, "")
    assert sweep(place, "--over=model.dropout=0,0.5") == (2, expected()["sweep over other fields in its folder"])
    line = expected()["sweep of another config in its folder"]
    assert sweep(place, "--over=seed=0,1", "--config.model.width=32") == (2, line)
    assert sweep(place, "--over=seed=0..5", "--config.train.log_every_steps=3") == (
        75,
        "",
    )  # more runs are no other sweep
    path = place.folder / "sweep" / "sweep.json"
    path.write_text(path.read_text().replace('"seed": 5', '"seed": 6'))
    assert sweep(place, "--over=seed=0,1") == (2, expected()["sweep file that was edited"])

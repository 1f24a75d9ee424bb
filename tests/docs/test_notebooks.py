"""The notebooks in docs/ run from top to bottom, and what is stored of their outputs is of one such run."""

import json

import pytest

from tests.docs.pages import ROOT
from tests.forks import QUICK

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, reader, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name in ("PATH", "PYTHONPATH", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.setenv(name, reader[name])
    if path.stem == "attention":  # a few numbers through many programs
        monkeypatch.setenv(QUICK, "1")
    notebook = nbformat.read(path, 4)
    stored = [[output.output_type for output in cell.outputs] for cell in code(notebook)]
    folder = tmp_path / "empty"
    folder.mkdir()
    options = {"timeout": 600, "kernel_name": "python3", "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, **options).execute()
    assert [[output.output_type for output in cell.outputs] for cell in code(notebook)] == stored


def test_there_are_three_that_ran_in_order_without_an_error():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        cells = code(json.loads(text))
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path
        assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"]), path
        assert "/tmp" not in text and "\\u001b" not in text and text.count("image/png") >= 1, path

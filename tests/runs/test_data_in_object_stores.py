"""What else is in object stores: what reads runs, token shards and saved datasets, a scaling study."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from object_stores import wait_for
from store_runs import MARKS, ROOT, SHORT, SMALL, Runs, in_store, on_disk, result, store
from test_scaling_study import CONFIG as STUDY
from test_scaling_study import told

from jaxformer import records
from jaxformer.data.mixture import open_text
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runs.texts import batches_of, held_out_of
from jaxformer.storage import object_store
from jaxformer.storage.address import place

__all__ = ["on_disk", "store"]
pytestmark = MARKS


def test_everything_else_that_reads_and_writes_runs(store, tmp_path):
    """evaluate, generate, curves, a tokenizer file and init_from, all in a store."""
    scheme, port = store
    runs = Runs(tmp_path, scheme, port)
    text, run = in_store(f"{scheme}://bucket/text"), f"{scheme}://bucket/run"
    runs.finish(run, text, *SHORT)

    def say(*words: str) -> str:
        command = [sys.executable, "-m", "jaxformer", *words]
        found = subprocess.run(command, cwd=ROOT, env=runs.environment, capture_output=True, text=True, timeout=400)
        assert found.returncode == 0, found.stderr[-3000:]
        assert not found.stderr
        return found.stdout

    final = records.load(place(run) / "records.jsonl", "final")[-1]
    assert f"loss {final['loss']:.4f}" in say("evaluate", f"--workdir={run}")
    assert say("generate", f"--workdir={run}", "--prompt=def", "--max-new-tokens=8").startswith("def")
    say("curves", f"--workdir={run}", f"--out={tmp_path / 'curve.png'}")
    for name in ("manifest.json", "records.jsonl"):
        assert b"S3CRET" not in (place(run) / name).read_bytes(2**20)  # the key in the environment
    runs.finish(f"{run}2", text, *SHORT, f"--config.init_from={run}")
    runs.finish(f"{run}3", text, *SHORT, f"--config.data.tokenizer_file={run}/tokenizer.json")
    assert "init_from: " in runs.log.read_text()


def tokenize(runs: Runs, text: object, out: object) -> subprocess.Popen:
    flags = [f"--config.data.files={text}/*", "--config.data.tokenizer=bytes", f"--out={out}", "--shards=6"]
    command = [sys.executable, "-m", "jaxformer", "tokenize", *flags]
    with open(runs.log, "a") as log:
        return subprocess.Popen(command, cwd=ROOT, env=runs.environment, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def data_on_disk(on_disk):
    """The folder on disk, with token shards of the texts, another project's tokens and a saved dataset in it."""
    datasets, folder, runs = pytest.importorskip("datasets"), on_disk[0], Runs(on_disk[0])
    assert tokenize(runs, folder / "text", folder / "tokens").wait(timeout=200) == 0, runs.said()
    text = (folder / "text" / "c.jsonl").read_text()
    rows = [text[begin : begin + 4000] for begin in range(0, len(text), 4000)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(folder / "set")
    ids = np.concatenate([[0, *(np.frombuffer(row.encode(), np.uint8) % 200 + 6)] for row in rows]).astype("<u2")
    ids.tofile(folder / "all.bin")
    return folder


def rows_of(cache: Path, *flags: str) -> list[np.ndarray]:
    """The first rows that a run with the flags would train on, and those that it would be measured on."""
    words = ["gpt_tiny", *SMALL, *SHORT, f"--config.data.cache_dir={cache}", *flags]
    config = parse_config(parser("", "pretrain"), words).config
    corpus = open_text(config.data, progress=False)
    config = fit_vocabulary(config, corpus.tokenizer)
    found = [batches_of(config, corpus)[step] for step in range(3)]
    return [each.tokens for each in [*found, *held_out_of(config, corpus)[""].batches]]


def test_tokens_and_saved_datasets_in_a_store(store, data_on_disk, tmp_path):
    """Shards that `jaxformer tokenize` put there while it was killed are those of a disk, object for object as fsspec
    reads them; a run on them is that on a disk, bit for bit, and so are the rows of another project's tokens and of a
    saved dataset."""
    scheme, port = store
    runs, there, disk = Runs(tmp_path, scheme, port), f"{scheme}://bucket/data", data_on_disk
    text = in_store(f"{there}/text")

    def written() -> int:
        return len([*(place(there) / "tokens").glob("train-*.json")])

    for wanted in (1, 3):
        process = tokenize(runs, text, f"{there}/tokens")
        while written() < wanted and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert tokenize(runs, text, f"{there}/tokens").wait(timeout=200) == 0, runs.said()
    files = object_store.system(f"{scheme}://bucket")
    for path in (disk / "tokens").glob("*.*"):
        if path.suffix not in (".json", ""):  # which name the text's address by a hash
            assert files.cat_file(f"bucket/data/tokens/{path.name}") == path.read_bytes()
    assert not list((tmp_path / "cache" / "jaxformer" / "staging").glob("*/content/*"))

    for path in [disk / "all.bin", *(disk / "set").iterdir()]:
        place(f"{there}/{path.relative_to(disk).as_posix()}").upload(path)
    tokenizer = f"--config.data.tokenizer_file={disk / 'tokens' / 'tokenizer.json'}"
    for kind, name, *more in [("tokens", "tokens"), ("tokens", "all.bin", tokenizer), ("hf_dir", "set")]:
        rows = [rows_of(tmp_path / "rows", f"--config.data.{kind}={base}/{name}", *more) for base in (disk, there)]
        assert len(rows[0]) > 3
        for one, other in zip(*rows, strict=True):
            np.testing.assert_array_equal(one, other)
    runs.train(tmp_path / "run", *SHORT, f"--config.data.tokens={there}/tokens")
    if not (disk / "of_tokens").exists():
        runs.train(disk / "of_tokens", *SHORT, f"--config.data.tokens={disk}/tokens")
    assert result(tmp_path / "run") == result(disk / "of_tokens")


def study(runs: Runs, where: object) -> subprocess.Popen:
    config = runs.folder / "study.py"
    config.write_text(STUDY.replace('"learning_rates": (1.0, 2.0)', '"learning_rates": (1.0,)'))  # nine runs
    command = [sys.executable, "-m", "jaxformer", "scaling", f"--config={config}", "--bootstrap=100"]
    with open(runs.log, "a") as log:
        return subprocess.Popen(
            [*command, f"--config.workdir={where}"], cwd=ROOT, env=runs.environment, stdout=log, stderr=log
        )


@pytest.fixture(scope="module")
def study_on_disk(tmp_path_factory):
    """The records of the study on disk."""
    runs = Runs(tmp_path_factory.mktemp("study"))
    assert study(runs, runs.folder / "study").wait(timeout=500) == 0, runs.said()
    return told(runs.folder / "study")


def test_a_killed_study_in_a_store(store, study_on_disk, tmp_path):
    """A scaling study, killed once its second run is recorded: the records of one on disk, and a report beside them."""
    runs, workdir = Runs(tmp_path, *store), f"{store[0]}://bucket/study"
    killed = study(runs, workdir)
    folder = place(workdir)
    wait_for(lambda: killed.poll() is not None or len(list((folder / "runs").iterdir())) > 1, 200)
    killed.kill()
    assert killed.wait() == -9, runs.said()
    assert study(runs, workdir).wait(timeout=500) == 0, runs.said()
    assert told(folder) == study_on_disk
    assert (folder / "report.html").is_file() and list((folder / "figures").iterdir())

"""`jaxformer tokenize` as real processes: Beam with any number of workers, killed and started again; runs on shards."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from token_folders import content, tokens_of, write_files

from jaxformer.config import DataConfig
from jaxformer.data import shards
from tests.forks import forks

beam = pytest.importorskip("importlib.util").find_spec("apache_beam")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(beam is None, reason="needs the extra beam")]
SMALL = [
    "--config.model.num_layers=1", "--config.model.width=16", "--config.model.num_heads=2",
    "--config.model.context_length=16", "--config.train.global_batch_size=8", "--config.optimizer.warmup_steps=0",
    "--config.optimizer.schedule=constant", "--config.compilation_cache=false",
    "--config.checkpoint.save_every_steps=2",
]  # fmt: skip


def start(folder, *words):
    """A process in a folder, in a session of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxformer", *map(str, words)], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Standard output of a command in a folder, which ends well; a fork of a process that has imported Beam."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
    with forks(tmp_path_factory.mktemp("bin"), environment, "jaxformer.runs.tokenization") as commands:

        def run(folder, *words):
            words = [commands / "jaxformer", *map(str, words)]
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout

        yield run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with text, what is said to tokenize about it, and the bytes of the shards made without Beam."""
    folder = tmp_path_factory.mktemp("text")
    data = write_files(folder / "text", counts=(60, 5, 90, 30))
    tokens_of(data, folder / "expected", 6)
    words = [f"--config.data.files={folder / 'text'}/*.jsonl", "--config.data.tokenizer_vocab=300", "--shards=6"]
    return folder, words, content(folder / "expected")


WORKERS = {
    "two threads": ["--direct_num_workers=2", "--direct_running_mode=multi_threading"],
    "two processes": ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
}


@pytest.mark.parametrize("workers", WORKERS)
def test_the_same_bytes_for_any_number_of_workers(tmp_path, text, run, workers):
    _, words, expected = text
    said = run(tmp_path, "tokenize", *words, "--out=tokens", "--", *WORKERS[workers])
    assert content(tmp_path / "tokens") == expected
    assert f"corpus {shards.read(tmp_path / 'tokens').fingerprint}; 7 shards written" in said


def test_another_runner_that_is_named(tmp_path, text, run):
    _, words, expected = text
    run(tmp_path, "tokenize", *words, "--out=tokens", "--runner=BundleBasedDirectRunner")
    assert content(tmp_path / "tokens") == expected


def test_killed_again_and_again_it_goes_on_and_gives_the_same_bytes(tmp_path, text, run):
    """kill -9 of the program and its workers, at a moment after each next shard is there."""
    folder, words, _ = text
    words = [*words[:-1], "--shards=60"]
    tokens_of(
        DataConfig(files=(f"{folder}/text/*.jsonl",), tokenizer_vocab=300, cache_dir=f"{folder}/text/cache"),
        folder / "sixty",
        60,
    )
    expected = content(folder / "sixty")
    dice, out, kills = random.Random(0), tmp_path / "tokens", 0
    for _ in range(3):
        before = len(list(out.glob("*-0*.json")))
        process = start(tmp_path, "tokenize", *words, "--out=tokens")
        deadline = time.monotonic() + 120
        while process.poll() is None and len(list(out.glob("*-0*.json"))) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.02))
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        if (out / "tokens.json").exists():
            break
        assert not content(tmp_path / "tokens").keys() & {"tokens.json"}
    assert kills > 1
    run(tmp_path, "tokenize", *words, "--out=tokens")
    assert content(out) == expected


def test_a_fault_of_the_text_is_one_line(tmp_path, text):
    folder, _, _ = text
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{broken')
    process = start(tmp_path, "tokenize", f"--config.data.files={folder}/text/*.jsonl,bad.jsonl", "--out=tokens")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 2
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "bad.jsonl:2: not JSON" in errors[0] and "Traceback" not in err


def test_a_run_trains_goes_on_evaluates_and_writes_from_shards(tmp_path, text, run):
    """Going on from shards that were cut anew, in another folder, is going on with the same text."""
    _, words, expected = text
    run(tmp_path, "tokenize", *words, "--out=tokens")  # by one worker
    assert content(tmp_path / "tokens") == expected
    (tmp_path / "c.py").write_text("def get_config():\n    return {}\n")
    train = ["pretrain", "c.py", *SMALL, "--config.workdir=run"]
    run(tmp_path, *train, "--config.data.tokens=tokens", "--config.train.steps=4")
    run(tmp_path, "tokenize", *[word for word in words if "shards" not in word], "--shards=2", "--out=again")
    run(tmp_path, *train, "--config.data.tokens=again", "--config.train.steps=6")
    run(tmp_path, *train[:-1], "--config.workdir=whole", "--config.data.tokens=tokens", "--config.train.steps=6")
    assert "at step 6" in run(tmp_path, "evaluate", "--workdir=run")
    values = [run(tmp_path, "evaluate", f"--workdir={name}", "--json") for name in ("run", "whole")]
    assert values[0] == values[1] and "bits_per_byte" in values[0]
    assert run(tmp_path, "generate", "--workdir=run", "--prompt=the", "--max-new-tokens=5")


@pytest.mark.parametrize(("most", "line"), [(64, "error: --out: OUT"), (5000, "error: --out: OUT: File too large")])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, text, run, most, line):
    """With room for the file that says what went wrong on a worker, and without."""
    resource = pytest.importorskip("resource")
    folder, words, expected = text
    limit = f"import resource; resource.setrlimit({resource.RLIMIT_FSIZE}, ({most}, {most}))"
    again = [sys.executable, "-c", f"{limit}; from jaxformer.__main__ import main; main()"]
    out = tmp_path / "tokens"
    done = subprocess.run(
        [*again, "tokenize", *words, f"--out={out}"], cwd=folder, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    errors = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(line.replace("OUT", str(out))), errors
    run(folder, "tokenize", *words, f"--out={out}")
    found = content(out)
    assert found.keys() == expected.keys()
    for name in found:  # the .json say when the text was written, which an earlier test does again
        assert name.endswith(".json") or found[name] == expected[name]

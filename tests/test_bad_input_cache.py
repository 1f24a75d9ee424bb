"""Whole programs over a cache, a text or a run directory that a stranger or a bad disk had in hand: one line and exit
code 2, or the right numbers, and nothing outside their own folders touched."""

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from test_bad_input import Place, expected, mask_hex, place  # noqa: F401 (a fixture)

from jaxformer.data import blocks, description, ingest


def line(case: str) -> tuple[int, str]:
    return mask_hex((2, expected()[case]))


def listing(folder: Path, *but: str) -> dict[str, tuple]:
    """Everything in a folder but for what lies in some of its subfolders."""
    found = {}
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if str(Path(here, name).relative_to(folder)) not in but]
        for path in (Path(here, name) for name in [*folders, *names]):
            about = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(about.st_mode) else about.st_mode
            found[str(path.relative_to(folder))] = (about.st_mode, about.st_mtime_ns, about.st_size, content)
    return found


def corpus_of(place: Place) -> Path:  # noqa: F811
    (folder,) = (p for p in (place.folder / "cache").iterdir() if re.fullmatch("[0-9a-f]{16}", p.name))
    return folder


@pytest.fixture
def kept(place):  # noqa: F811
    """A place where the text is in the cache, and a folder of the user lies beside it; no run yet."""
    (place.folder / "victim").mkdir()
    (place.folder / "victim" / "thesis.tex").write_text("mine")
    place.monkeypatch.setenv("XDG_CACHE_HOME", str(place.folder / "cache" / "user"))
    from jaxformer.config import DataConfig
    from jaxformer.data.corpus import open_corpus

    data = DataConfig(
        source="files", files=(str(place.text),), tokenizer="bytes", cache_dir=str(place.folder / "cache")
    )
    open_corpus(data, progress=False)
    return place


def test_cache_folder_is_a_link(kept):
    folder = corpus_of(kept)
    shutil.rmtree(folder)
    folder.symlink_to(kept.folder / "victim")
    before = listing(kept.folder)
    assert mask_hex(kept.pretrain()) == line("cache folder that was not made here")
    assert {k: v for k, v in listing(kept.folder).items() if not k.startswith("run")} == before


def test_cache_lock_is_a_link(kept):
    folder = corpus_of(kept)
    shutil.rmtree(folder)
    lock = folder.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(kept.folder / "made")
    assert mask_hex(kept.pretrain()) == line("cache lock that was not made here")
    assert not (kept.folder / "made").exists() and not (kept.folder / "run" / "manifest.json").exists()


def test_text_that_changes_while_it_is_read(place, monkeypatch):  # noqa: F811
    real = ingest._tokenizer

    def changing(*args):
        place.text.write_text(place.text.read_text() + "And more.")
        return real(*args)

    monkeypatch.setattr(ingest, "_tokenizer", changing)
    assert place.pretrain() == line("text that changes while it is read")
    assert not (place.folder / "run" / "manifest.json").exists()


def test_tokenizer_files(place):  # noqa: F811
    path = place.folder / "tokenizer.json"
    from jaxformer.data import tokenizers

    tree = json.loads(tokenizers.train("chars", ["ab"], None).save(place.folder).read_text())
    tree["model"]["vocab"]["b"] = 4_000_000_000
    path.write_text(json.dumps(tree))
    flag = f"--config.data.tokenizer_file={path}"
    assert place.pretrain(flag) == line("tokenizer file with a huge id")
    path.unlink()
    os.mkfifo(path)
    assert place.pretrain(flag) == line("tokenizer file that is a pipe")
    assert not (place.folder / "run" / "manifest.json").exists()


@pytest.mark.slow
def test_damage_found_while_training(kept, monkeypatch):
    """The same command makes the corpus again and goes on; evaluating afterwards gives what an unharmed run gives."""
    monkeypatch.setattr(blocks, "AT_ONCE", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 9)
    shutil.rmtree(corpus_of(kept))
    assert kept.pretrain(workdir="unharmed") == (0, "")
    tokens = corpus_of(kept) / "train.tokens"
    content = bytearray(tokens.read_bytes())
    content[::512] = bytes(b ^ 1 for b in content[::512])
    tokens.write_bytes(content)
    assert mask_hex(kept.pretrain()) == line("training text damaged in the cache")
    assert kept.pretrain() == (0, "")
    finals = [
        json.loads((kept.folder / name / "records.jsonl").read_text().splitlines()[-1]) for name in ("run", "unharmed")
    ]
    assert finals[0]["kind"] == "final" and finals[0]["loss"] == finals[1]["loss"]


KEYS = ["../victim", "../../../victim", "ABSOLUTE", "0123456789abcdef"]


@pytest.mark.slow
def test_hostile_cache_and_run(kept, capsys):
    """pretrain over a shared cache, and evaluate, generate and the rest of a run whose manifest names a cache, a
    workdir and a coordinator of its own: nothing but run, cache and the user's own cache folder is touched."""
    own = ("run", "cache")
    assert kept.pretrain() == (0, "")
    (index,) = (kept.folder / "cache" / "index").iterdir()
    before = listing(kept.folder, *own)
    loss = json.loads((kept.folder / "run" / "records.jsonl").read_text().splitlines()[-1])["loss"]
    for key in KEYS:
        key = str(kept.folder / "victim") if key == "ABSOLUTE" else key
        index.write_text(description.seal({"seen": index.stem, "key": key}))
        assert kept.pretrain() == (0, "")
        index.write_text(json.dumps({"key": key}))
        assert kept.pretrain() == (0, "")
        assert listing(kept.folder, *own) == before

    # Its own cache: complete, but with the index and the corpus as the stranger likes.
    stranger = kept.folder / "stranger"
    shutil.copytree(kept.folder / "cache", stranger)
    manifest = kept.folder / "run" / "manifest.json"
    about = json.loads(manifest.read_text())
    about["config"]["data"]["cache_dir"] = str(stranger)
    about["config"]["workdir"] = str(kept.folder / "victim")
    about["config"]["tensorboard"] = about["config"]["compilation_cache"] = True
    about["config"]["distributed"] |= {"coordinator_address": "localhost:9", "num_processes": 2, "process_id": 0}
    manifest.write_text(json.dumps(about))
    (stranger / "index" / index.name).write_text(json.dumps({"key": "../victim"}))
    tokens = stranger / corpus_of(kept).name / "validation.tokens"
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    before, run = listing(kept.folder, *own), listing(kept.folder / "run")
    workdir = f"--workdir={kept.folder / 'run'}"
    capsys.readouterr()
    from experiments import evaluate

    kept.monkeypatch.setattr("sys.argv", ["evaluate.py", workdir, "--json"])
    evaluate.main()
    out, err = capsys.readouterr()
    assert json.loads(out)["loss"] == pytest.approx(loss, rel=1e-6)
    assert f"note: this run kept its corpus in {str(stranger)!r}" in err
    assert (kept.folder / "cache" / "user" / "jaxformer").is_dir()
    assert kept.run("generate", workdir, "--prompt=a", "--max-new-tokens=2") == (0, "")
    assert kept.run("evaluate", workdir, "--verify", f"--cache-dir={kept.folder / 'cache'}") == (0, "")
    assert listing(kept.folder, *own) == before and listing(kept.folder / "run") == run

    # A tokenizer.json that is a link is replaced when the run goes on; what it points to stays.
    (kept.folder / "run" / "tokenizer.json").unlink()
    (kept.folder / "run" / "tokenizer.json").symlink_to(kept.folder / "victim" / "thesis.tex")
    shutil.copy(kept.folder / "run" / "manifest.json", kept.folder / "aside.json")
    assert kept.pretrain()[0] == 0
    assert not (kept.folder / "run" / "tokenizer.json").is_symlink()
    assert (kept.folder / "victim" / "thesis.tex").read_text() == "mine"

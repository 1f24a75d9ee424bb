"""Whole programs over a cache, a text or a run directory that a stranger or a bad disk had in hand: one line and exit
code 2, or the right numbers, and nothing outside their own folders touched."""

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from bad_input_cases import Place, expected, place
from test_bad_input import mask_hex

from jaxformer.data import checked_array, tokenizers
from jaxformer.storage import json_checksum

__all__ = ["place"]


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


def corpus_of(place: Place) -> Path:
    (folder,) = (p for p in (place.folder / "cache").iterdir() if re.fullmatch("[0-9a-f]{16}", p.name))
    return folder


@pytest.fixture
def kept(place):
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
    assert mask_hex(kept.pretrain()) == mask_hex((2, expected()["cache folder that was not made here"]))
    assert {k: v for k, v in listing(kept.folder).items() if not k.startswith("run")} == before


def test_cache_lock_is_a_link(kept):
    folder = corpus_of(kept)
    shutil.rmtree(folder)
    lock = folder.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(kept.folder / "made")
    assert mask_hex(kept.pretrain()) == mask_hex((2, expected()["cache lock that was not made here"]))
    assert not (kept.folder / "made").exists() and not (kept.folder / "run" / "manifest.json").exists()


def test_text_that_changes_while_it_is_read(place, monkeypatch):
    real = tokenizers.train

    def changing(*args):
        place.text.write_text(place.text.read_text() + "And more.")
        return real(*args)

    monkeypatch.setattr(tokenizers, "train", changing)
    assert place.pretrain() == mask_hex((2, expected()["text that changes while it is read"]))
    assert not (place.folder / "run" / "manifest.json").exists()


def test_tokenizer_files(place):
    path = place.folder / "tokenizer.json"
    tree = json.loads(tokenizers.train("chars", ["ab"], None).save(place.folder).read_text())
    tree["model"]["vocab"]["b"] = 4_000_000_000
    path.write_text(json.dumps(tree))
    flag = f"--config.data.tokenizer_file={path}"
    assert place.pretrain(flag) == mask_hex((2, expected()["tokenizer file with a huge id"]))
    path.unlink()
    os.mkfifo(path)
    assert place.pretrain(flag) == mask_hex((2, expected()["tokenizer file that is a pipe"]))
    assert not (place.folder / "run" / "manifest.json").exists()


@pytest.mark.slow
def test_damage_found_while_training(kept, monkeypatch):
    """The same command makes the corpus again and goes on; evaluating afterwards gives what an unharmed run gives."""
    monkeypatch.setattr(checked_array, "AT_ONCE", 0)
    monkeypatch.setattr(checked_array, "BLOCK_BYTES", 1 << 9)
    shutil.rmtree(corpus_of(kept))
    assert kept.pretrain(workdir="unharmed") == (0, "")
    tokens = corpus_of(kept) / "train.tokens"
    content = bytearray(tokens.read_bytes())
    content[::512] = bytes(b ^ 1 for b in content[::512])
    tokens.write_bytes(content)
    assert mask_hex(kept.pretrain()) == mask_hex((2, expected()["training text damaged in the cache"]))
    assert kept.pretrain() == (0, "")
    finals = [
        json.loads((kept.folder / name / "records.jsonl").read_text().splitlines()[-1]) for name in ("run", "unharmed")
    ]
    assert finals[0]["kind"] == "final" and finals[0]["loss"] == finals[1]["loss"]


@pytest.mark.slow
def test_folders_of_a_run_that_are_links(place):
    """Before, going on wrote into, and removed from, the folder that the link named."""
    assert place.pretrain() == (0, "")
    run, victim = place.folder / "run", place.folder / "victim"
    for name in ("checkpoints", "tensorboard", "runs", "figures"):
        victim.mkdir()
        if (run / name).exists():
            shutil.copytree(run / name, victim, dirs_exist_ok=True)
            shutil.rmtree(run / name)
        (run / name).symlink_to(victim)
        before = listing(place.folder, "cache")
        code, found = place.pretrain()
        assert (code, found.replace(name, "NAME")) == mask_hex((2, expected()["folder of a run that is a link"]))
        assert listing(place.folder, "cache") == before
        (run / name).unlink()
        victim.rename(run / name)
    assert place.pretrain() == (0, "")


def test_figures_are_not_written_through_links(place):
    pytest.importorskip("matplotlib")
    from jaxformer.errors import ConfigError
    from jaxformer.scaling import plotting, results

    (place.folder / "victim").mkdir()
    (place.folder / "victim" / "a.png").write_text("mine")
    (place.folder / "links").mkdir()
    (place.folder / "links" / "a.png").symlink_to(place.folder / "victim" / "a.png")
    figure, _ = plotting.panel()
    plotting.save({"a": figure}, place.folder / "links")
    assert (place.folder / "victim" / "a.png").read_text() == "mine"
    assert (place.folder / "links" / "a.png").read_bytes().startswith(b"\x89PNG")
    (place.folder / "figures").symlink_to(place.folder / "victim")
    place.monkeypatch.setattr(results.figures, "draw", lambda *_: {"a": figure})
    place.monkeypatch.setattr(results.run_figures, "training_curves", lambda *_: figure)
    with pytest.raises(ConfigError, match="figures: is a symbolic link"):
        results.write_report(place.folder, "title", RECORDS, {"all parameters, exact FLOP": {}})
    assert [p.name for p in (place.folder / "victim").iterdir()] == ["a.png"]


FINAL = {"kind": "final", "run": "a", "trunk": "a", "role": "ladder", "status": "finished", "width": 8, "params": 10,
         "params_non_embedding": 9, "tokens": 100, "flops": 6e3, "loss": 1.0, "loss_stderr": 0.1, "seed": 0,
         "learning_rate": 0.1, "step": 1, "branched_at": 0}  # fmt: skip
RECORDS = [FINAL]
KEYS = ["../victim", "../../../victim", "ABSOLUTE", "0123456789abcdef"]


@pytest.mark.slow
def test_hostile_cache_and_run(kept, capsys):
    """pretrain over a shared cache, and evaluate, generate and the rest of a run whose manifest names a cache, a
    workdir and a coordinator of its own: nothing but run, cache and the user's own cache folder is touched."""
    own = ("run", "cache")
    assert kept.pretrain("--verify") == (0, "")
    (index,) = (kept.folder / "cache" / "index").iterdir()
    before = listing(kept.folder, *own)
    loss = json.loads((kept.folder / "run" / "records.jsonl").read_text().splitlines()[-1])["loss"]
    for key in KEYS:
        key = str(kept.folder / "victim") if key == "ABSOLUTE" else key
        index.write_text(json.dumps(json_checksum.add_checksum({"seen": index.stem, "key": key})))
        assert kept.pretrain() == (0, "")
        index.write_text(json.dumps({"key": key}))
        assert kept.pretrain() == (0, "")
        assert listing(kept.folder, *own) == before

    # Its own cache: complete, but with the index and the corpus as the stranger likes.
    stranger = kept.folder / "stranger"
    shutil.copytree(kept.folder / "cache", stranger)
    manifest = kept.folder / "run" / "manifest.json"
    about = json_checksum.read(manifest)
    about.pop(json_checksum.FIELD)
    about["config"]["data"]["cache_dir"] = str(stranger)
    about["config"]["workdir"] = str(kept.folder / "victim")
    about["config"]["tensorboard"] = about["config"]["compilation_cache"] = True
    about["config"]["distributed"] |= {"coordinator_address": "localhost:9", "num_processes": 2, "process_id": 0}
    manifest.write_text(json.dumps(json_checksum.add_checksum(about)))
    (stranger / "index" / index.name).write_text(json.dumps({"key": "../victim"}))
    tokens = stranger / corpus_of(kept).name / "validation.tokens"
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    before, run = listing(kept.folder, *own), listing(kept.folder / "run")
    workdir = f"--workdir={kept.folder / 'run'}"
    capsys.readouterr()
    from jaxformer.programs import evaluate

    kept.monkeypatch.setattr("sys.argv", ["evaluate.py", workdir, "--json"])
    evaluate.main()
    out, err = capsys.readouterr()
    assert json.loads(out)["loss"] == pytest.approx(loss, rel=1e-6)
    assert f"note: this run kept its corpus in {str(stranger)!r}" in err
    assert (kept.folder / "cache" / "user" / "jaxformer").is_dir()
    assert kept.run("generate", workdir, "--prompt=a", "--max-new-tokens=2") == (0, "")
    assert kept.run("evaluate", workdir, "--verify", f"--cache-dir={kept.folder / 'cache'}") == (0, "")
    assert listing(kept.folder, *own) == before and listing(kept.folder / "run") == run

    # A run whose tokenizer.json is a link does not go on; what it points to stays.
    (kept.folder / "run" / "tokenizer.json").unlink()
    (kept.folder / "run" / "tokenizer.json").symlink_to(kept.folder / "victim" / "thesis.tex")
    code, line = kept.pretrain()
    assert code == 2 and "tokenizer.json is a symbolic link" in line
    assert (kept.folder / "victim" / "thesis.tex").read_text() == "mine"

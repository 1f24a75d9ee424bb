"""Run directories that are damaged, edited, swapped or hostile: one line, or one line and on with the run; nothing
outside them is touched."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input_cases import TINY, Nothing, Place, expected, place
from file_formats import early_fingerprint
from quick_runs import quickly

from jaxformer import records
from jaxformer.programs import generate
from jaxformer.runs import manifest
from jaxformer.storage import json_checksum
from jaxformer.training.checkpoint.layout import list_steps

__all__ = ["place"]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two finished runs that differ in their seed, `run` and `other`, and their text."""
    with quickly() as patch:
        first = Place(tmp_path_factory.mktemp("made"), patch, Nothing())
        for workdir, seed in (("run", 0), ("other", 1)):
            flags = [f"--config.seed={seed}", "--config.checkpoint.save_every_steps=2", "--config.train.steps=4"]
            assert first.pretrain(*flags, workdir=workdir) == (0, "")
    assert list_steps(first.folder / "run" / "checkpoints") == [2, 4]
    return first


class Runs:
    """Copies of the two runs in a test's own folder."""

    def __init__(self, made: Place, mine: Place):
        self.place, self.made = mine, made
        for name in ("run", "other"):
            shutil.copytree(made.folder / name, mine.folder / name)
        mine.monkeypatch.setattr(generate, "generated", lambda *_: iter(()))  # it opens the run, and samples nothing
        self.run = mine.folder / "run"
        self.checkpoints = self.run / "checkpoints"

    def resume(self, *flags: str, workdir: str = "run") -> tuple[int, str]:
        """Goes on with a copy, to more steps where `flags` say so."""
        text = f"--config.data.files={self.made.text}"
        cache = f"--config.data.cache_dir={self.made.folder / 'cache'}"
        base = [f"--config={self.made.config}", f"--config.workdir={self.place.folder / workdir}", text, cache, *TINY]
        return self.place.run("pretrain", *base, "--config.checkpoint.save_every_steps=2", *flags)

    def read(self, name: str, *flags: str) -> tuple[int, str]:
        """Runs a program that only reads the run."""
        extra = {"generate": ["--prompt=a", "--max-new-tokens=2"], "curves": [f"--out={self.place.folder / 'c.png'}"]}
        return self.place.run(name, f"--workdir={self.run}", *extra.get(name, []), *flags)

    def all(self) -> list[tuple[int, str]]:
        """What evaluate, generate and pretrain say."""
        return [self.read("evaluate"), self.read("generate"), self.resume()]

    def manifest(self, **fields) -> None:
        """Changes the manifest as someone could who knows its checksum; a value of None removes a field."""
        path = self.run / "manifest.json"
        told = {**json.loads(path.read_text()), **fields}
        told = {name: value for name, value in told.items() if value is not None and name != "seal"}
        path.write_text(json.dumps(json_checksum.add_checksum(told) if "fingerprint" in told else told))


@pytest.fixture
def runs(made, place):
    return Runs(made, place)


def heard(runs: Runs) -> list:
    """What the programs print from now on."""
    said: list = []
    capture = type(runs.place.capsys).readouterr
    runs.place.capsys.readouterr = lambda: said.append(capture(runs.place.capsys)) or said[-1]
    return said


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_a_run_whose_last_steps_were_skipped_has_diverged(place):
    """It said "finished", with the loss of an untrained model and the exit code 0."""
    flags = ["--config.optimizer.learning_rate=1e38", "--config.optimizer.clip_norm=none"]
    assert place.pretrain(*flags) == (3, expected()["a run that diverges at its end"])
    kinds = [record["kind"] for record in records.load(place.folder / "run" / "records.jsonl")]
    assert kinds == ["event", "train", "eval", "event"]


@pytest.mark.slow
def test_evaluate_prints_json_where_a_number_is_not_finite(runs, monkeypatch):
    from jaxformer.training import metrics

    monkeypatch.setattr(metrics, "estimate", lambda *_: metrics.WeightedMean(float("nan"), float("inf"), 1.0, 1))
    said = heard(runs)
    assert runs.read("evaluate", "--json", f"--cache-dir={runs.made.folder / 'cache'}") == (0, "")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(said[-1].out, parse_constant=refuse)
    assert (found["loss"], found["loss_stderr"], found["perplexity"], found["step"]) == ("nan", "inf", "nan", 4)


@pytest.mark.slow
def test_an_edited_manifest(runs):
    edit(runs.run / "manifest.json", '"norm_epsilon": 1e-05', '"norm_epsilon": 0.1')
    assert runs.all() == [(2, expected()["manifest edited by hand"])] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config"),
    [("manifest whose config is null", "null"), ("manifest whose config is a text", '"gpt"'),
     ("manifest without a model", '{"seed": 0}')],
)  # fmt: skip
def test_manifests_that_are_none(runs, case, config):
    (runs.run / "manifest.json").write_text(f'{{"config": {config}, "data_fingerprint": "0"}}')
    assert runs.all() == [(2, expected()[case])] * 3


@pytest.mark.slow
def test_a_tokenizer_that_was_replaced(runs):
    edit(runs.run / "tokenizer.json", '"id": 0', '"id": 1')
    assert runs.read("generate") == (2, expected()["tokenizer of the run damaged"])
    assert runs.resume() == (0, "")  # writes it again
    assert runs.read("generate") == (0, "")


@pytest.mark.slow
def test_a_checkpoint_of_another_run(runs):
    shutil.rmtree(runs.checkpoints / "4")
    shutil.copytree(runs.place.folder / "other" / "checkpoints" / "4", runs.checkpoints / "4")
    lines = [(code, re.sub(r"\b[0-9a-f]{32}\b", "HASH", line)) for code, line in runs.all()]
    assert lines == [(2, expected()["checkpoint of another run"])] * 3
    assert list_steps(runs.checkpoints) == [2, 4]  # it is somebody's: not deleted


@pytest.mark.slow
def test_a_copied_checkpoint_is_passed_over(runs):
    shutil.copytree(runs.checkpoints / "4", runs.checkpoints / "5")
    line = f"checkpoint {runs.checkpoints / '5'} is not valid: it holds step 4: the folder was copied or renamed"
    said = heard(runs)
    assert runs.all() == [(0, "")] * 3
    assert all(line in each.err for each in said) and "at step 4" in said[0].out
    shutil.rmtree(runs.checkpoints / "4")
    shutil.rmtree(runs.checkpoints / "2")
    assert runs.read("evaluate") == (2, expected()["a checkpoint that was renamed"])


@pytest.mark.slow
def test_odd_names_among_the_checkpoints(runs):
    for name in ("²", "0115", "٣"):
        (runs.checkpoints / name).mkdir()
    assert [*runs.all(), runs.read("curves")] == [(0, "")] * 4
    assert sorted(os.listdir(runs.checkpoints)) == sorted(["2", "4", "²", "0115", "٣"])
    (runs.checkpoints / "9").symlink_to(runs.place.folder / "other" / "checkpoints" / "4")
    assert [runs.read("evaluate"), runs.read("generate")] == [(0, "")] * 2
    assert runs.resume() == (2, expected()["a link among the checkpoints"])


TRAIN = {"kind": "train", "step": 1, "tokens": 1, "grad_norm": 1.0, "learning_rate": 1.0, "skipped": 0, "seconds": 1.0}


@pytest.mark.slow
def test_damaged_records(runs):
    """Readers refuse, a curve through holes being worse than none; the run goes on without the line, and says so."""
    path = runs.run / "records.jsonl"
    whole = path.read_text()
    cases = {
        "garbage in the records": "\x00\x00",
        "text for a number in the records": json.dumps({**TRAIN, "loss": "x"}),
    }
    for case, line in cases.items():
        path.write_text(whole.replace("\n", f"\n{line}\n", 1))
        assert runs.read("curves") == (2, expected()[case])
        said = heard(runs)
        assert runs.resume() == (0, "")
        note = [text for each in said for text in each.out.splitlines() if text.startswith("note: ")]
        reason = expected()[case].removeprefix("error: ").replace("DIR", str(runs.place.folder))
        assert note == [f"note: {reason}; 1 line is set aside in records.damaged.jsonl, and the run goes on"]
        assert (runs.run / "records.damaged.jsonl").read_text().endswith(f"{line}\n")
        assert runs.read("curves") == (0, "") and path.read_text().startswith(whole)
    path.unlink()
    path.mkdir()
    assert runs.resume() == (2, expected()["a folder as records"])


@pytest.mark.slow
def test_records_of_another_run(runs):
    """Evaluations decide when a run stops early."""
    shutil.copy(runs.place.folder / "other" / "records.jsonl", runs.run / "records.jsonl")
    before = (runs.run / "records.jsonl").read_bytes()
    lines = [(code, re.sub(r"\b[0-9a-f]{32}\b", "HASH", line)) for code, line in (runs.read("curves"), runs.resume())]
    assert lines == [(2, expected()["records of another run"])] * 2
    assert (runs.run / "records.jsonl").read_bytes() == before


HOSTILE = {
    "records.jsonl is a link": "records.jsonl",
    "tokenizer.json is a link": "tokenizer.json",
    "checkpoints is a link": "checkpoints",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_links_in_a_hostile_run_directory(runs, case):
    name = HOSTILE[case]
    victim = runs.place.folder / "victim" / name
    victim.parent.mkdir()
    (runs.run / name).rename(victim)
    (runs.run / name).symlink_to(victim)
    before = listing(runs.place.folder)
    assert runs.resume("--config.checkpoint.keep=9") == (2, expected()[case])
    assert [runs.read("evaluate"), runs.read("generate")] == [(0, "")] * 2  # they read, and write nothing
    assert listing(runs.place.folder) == before


def listing(folder: Path) -> list:
    found = sorted(path for path in folder.rglob("*"))
    return [
        (str(path), path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found
    ]  # fmt: skip


@pytest.mark.slow
def test_a_hostile_manifest_decides_nothing_about_where_to_write(runs):
    """Sealed by someone who knows how, with other folders and huge numbers in it."""
    victim = runs.place.folder / "victim"
    victim.mkdir()
    (victim / "mine").write_text("mine")
    told = manifest.read(runs.run)["config"]
    before = listing(runs.place.folder)
    runs.manifest(config={**told, "workdir": str(victim), "tensorboard": True})
    changed = (runs.run / "manifest.json").read_bytes()
    assert [runs.read("evaluate"), runs.read("generate")] == [(0, "")] * 2
    for name, value in (("vocab_size", 10**12), ("width", 2 * 10**9), ("num_layers", 3)):
        runs.manifest(config={**told, "model": {**told["model"], name: value}})
        assert [code for code, _ in (runs.read("evaluate"), runs.read("generate"))] == [2, 2]
    (runs.run / "manifest.json").write_bytes(changed)
    after = [each for each in listing(runs.place.folder) if not each[0].endswith("manifest.json")]
    assert [each[::2] for each in after if Path(each[0]).name != "run"] == [
        each[::2] for each in before if not each[0].endswith("manifest.json") and Path(each[0]).name != "run"
    ]


@pytest.mark.slow
def test_an_earlier_versions_run_goes_on(runs):
    """Neither its manifest nor its records tell its fingerprint; its checkpoints have a hash of the whole config of
    that start, or nothing."""
    told, path = manifest.read(runs.run), runs.run / "records.jsonl"
    records.write(path, [{k: v for k, v in r.items() if k != "fingerprint"} for r in records.load(path)])
    earlier = early_fingerprint(told["config"])
    (runs.run / "manifest.json").write_text(
        json.dumps({k: v for k, v in told.items() if k not in ("fingerprint", "tokenizer")})
    )
    for fingerprint, says in ((earlier, False), ("", True), ("0123456789abcdef", True)):
        mark(runs.checkpoints / "4", fingerprint)
        said = heard(runs)
        assert [runs.read("evaluate"), runs.resume()] == [(0, "")] * 2
        assert all(("both are of an earlier version" in each.err) == says for each in said), said
    mark(runs.checkpoints / "4", "0" * 32)  # but never one of this version's other runs
    assert [code for code, _ in runs.all()] == [2, 2, 2]


def mark(step: Path, fingerprint: str) -> None:
    """Gives a checkpoint another fingerprint, as another version would have."""
    path = step / "meta" / "metadata"
    meta = json_checksum.verified(json.loads(path.read_text()))
    path.write_text(json.dumps(json_checksum.add_checksum({**meta, "fingerprint": fingerprint})))


@pytest.mark.slow
def test_a_directory_that_is_in_use(runs):
    from jaxformer.runs.workdir_lock import WorkdirLock

    with WorkdirLock(runs.run):
        code, line = runs.resume()
        told = json.loads((runs.run / ".lock").read_text())
        for name in ("process", "host", "since"):
            line = line.replace(str(told[name]), name.upper())
        assert (code, line) == (2, expected()["workdir in use"])
        assert [runs.read("evaluate"), runs.read("generate")] == [(0, "")] * 2  # who reads asks nobody
    assert runs.resume() == (0, "") and not (runs.run / ".lock").exists()


@pytest.mark.slow
def test_what_crashes_before_its_first_step_leaves_the_directory_free(place, monkeypatch):
    from jaxformer.training import loop

    def crash(*_):
        raise ZeroDivisionError("while compiling")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_ahead", crash)
        with pytest.raises(ZeroDivisionError):
            place.pretrain()
    assert (place.folder / "run" / "manifest.json").exists() and not (place.folder / "run" / ".lock").exists()
    assert place.pretrain("--config.model.width=32") == (0, "")
    told = json.loads((place.folder / "run" / "manifest.json").read_text())
    assert told["config"]["model"]["width"] == 32
    found = records.load(place.folder / "run" / "records.jsonl", "event")
    assert [each["event"] for each in found] == ["started"]
    assert place.pretrain("--config.model.width=16")[0] == 2  # now there is something to keep


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["array file gone", "array metadata cut short", "few files may be open"])
def test_a_damaged_array_file_is_one_line_and_no_more(runs, damage):
    """Of which 647 came from orbax's coroutines, and sixteen of a checkpoint that could not be written."""
    command = [sys.executable, "-m", "experiments.evaluate", f"--workdir={runs.run}"]
    command.append(f"--cache-dir={runs.made.folder / 'cache'}")
    if damage == "few files may be open":
        text = [f"--config.data.files={runs.made.text}", f"--config.data.cache_dir={runs.made.folder / 'cache'}"]
        new = [f"--config={runs.made.config}", f"--config.workdir={runs.place.folder / 'new'}", *text, *TINY]
        command = ["bash", "-c", 'ulimit -n 32; exec "$@"', "-", sys.executable, "-m", "experiments.pretrain", *new]
        command.append("--config.data.tokenizer=bytes")
    for step in runs.checkpoints.iterdir():
        if damage == "array file gone":
            for path in step.glob("params/**/d/*"):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        elif damage == "array metadata cut short":
            for path in step.glob("params/array_metadatas/*"):
                path.write_bytes(path.read_bytes()[:20])
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # which has something of its own to say when it cannot be read
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr[-3000:]
    lines = [
        line for line in done.stderr.splitlines() if not line.startswith(("making", "reading", "tokenising", "step"))
    ]
    assert lines[-1].startswith("error: ") and "Traceback" not in done.stderr
    if damage == "few files may be open":
        assert lines == [lines[-1]] and "too many open files (see ulimit -n)" in lines[-1]
    else:
        assert len(lines) == 3 and all(" is not valid: " in line for line in lines[:2]), done.stderr[-3000:]


@pytest.mark.slow
def test_a_run_to_start_from_that_is_not_there_or_another(made, place):
    runs = Runs(made, place)
    start = ["--config.workdir=DIR/new".replace("DIR", str(place.folder)), "--config.model.width=32"]
    code, line = runs.resume(f"--config.init_from={place.folder / 'none'}", *start)
    assert (code, line) == (2, expected()["a run to start from that is not there"])
    code, line = runs.resume(f"--config.init_from={runs.run}", *start)
    assert (code, line) == (2, expected()["a run to start from of another width"])
    code, line = runs.resume("--config.init_optimizer=true", *start)
    assert (code, line) == (2, expected()["an optimizer's state from nowhere"])
    assert not (place.folder / "new" / "manifest.json").exists()


@pytest.mark.slow
def test_a_run_to_start_from_that_lacks_what_is_taken(made, place):
    """Before anything is written: a start from another run is not taken for one that has begun from this."""
    runs = Runs(made, place)
    start = [f"--config.workdir={place.folder / 'new'}", f"--config.init_from={runs.run}"]
    code, line = runs.resume(*start, "--config.init_optimizer=true", "--config.optimizer.name=lion")
    assert (code, line) == (2, expected()["the state of another optimizer"])
    tokenizer = (runs.run / "tokenizer.json").read_bytes()
    (runs.run / "tokenizer.json").write_bytes(tokenizer.replace(b"a", b"b"))
    assert runs.resume(*start) == (2, expected()["a run to start from whose tokenizer is another"])
    (runs.run / "tokenizer.json").write_bytes(tokenizer)
    shutil.rmtree(runs.checkpoints)
    assert runs.resume(*start) == (2, expected()["a run to start from without a checkpoint"])
    assert not (place.folder / "new" / "manifest.json").exists()


@pytest.mark.slow
def test_a_schedule_that_denies_the_steps_made(made, place):
    runs = Runs(made, place)
    code, line = runs.resume("--config.train.steps=8")
    assert (code, line) == (2, expected()["more steps than the schedule began with"])
    code, line = runs.resume("--config.train.steps=3")
    assert (code, line) == (2, expected()["fewer steps than were made"])


def test_curves_of_nothing(place):
    (place.folder / "run").mkdir()
    (place.folder / "run" / "records.jsonl").touch()
    found = place.run("curves", str(place.folder / "run"), f"--out={place.folder / 'a.png'}")
    assert found == (2, expected()["curves of a run without records"])
    assert not (place.folder / "a.png").exists()
    records.append(place.folder / "run" / "records.jsonl", {**TRAIN, "loss": 1.0})
    found = place.run("curves", str(place.folder / "run"), "--metric=x", f"--out={place.folder / 'a.png'}")
    assert found == (2, expected()["curves of a number that no record has"])
    assert not (place.folder / "a.png").exists()

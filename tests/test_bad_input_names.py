"""Names that no file can have, and what a line on the terminal quotes of them; the lines stand in bad_input.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input_cases import expected, place  # noqa: F401
from file_formats import record_line

from jaxformer import records
from jaxformer.data.build_cache import default_root
from jaxformer.errors import RecordError
from jaxformer.runs.command_line import Parsed
from jaxformer.runs.workdir_lock import WorkdirLock
from jaxformer.runtime.program import cache_folder
from jaxformer.storage import files, json_checksum

LONG = 300 * "n"
# program -> its flags with a path that is too long
PROGRAMS = {
    "evaluate": [f"--workdir={LONG}"],
    "curves": [f"--workdir={LONG}", "--out=c.png"],
    "generate": [f"--workdir={LONG}", "--prompt=a"],
    "fill_mask": [f"--workdir={LONG}", "--text=[MASK]"],
}
FINAL = {"kind": "final", "run": "a", "trunk": "a", "role": "ladder", "status": "finished", "width": 8, "params": 10,
         "params_non_embedding": 9, "tokens": 100, "flops": 6e3, "loss": 1.0, "loss_stderr": 0.1, "seed": 0,
         "learning_rate": 0.1, "step": 1, "branched_at": 0}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_name_too_long(place, name):  # noqa: F811
    assert place.run(name, *PROGRAMS[name]) == (2, expected()["a name too long for a file"])


@pytest.mark.parametrize("flag", ["--config.data.cache_dir", "--config.data.tokenizer_file", "--config.workdir"])
def test_a_field_whose_path_is_too_long(place, flag):  # noqa: F811
    code, line = place.pretrain(f"{flag}={LONG}")
    assert (code, line) == (2, expected()["a name too long for a file"].replace("--workdir", flag[2:]))


@pytest.mark.parametrize("flag", ["--config.data.cache_dir", "--config.data.tfds_dir"])
def test_an_address_where_a_path_is_needed(place, monkeypatch, flag):  # noqa: F811
    """Before, it made a folder called gs: here, and failed at its first save."""
    monkeypatch.chdir(place.folder)
    before = sorted(place.folder.iterdir())
    code, line = place.pretrain(f"{flag}=gs://bucket/run")
    where = flag[2:]
    assert (code, line) == (2, expected()["an address of an object store"].replace("config.data.cache_dir", where))
    code, line = place.pretrain(f"{flag}=s3://me:S3CRET@bucket/run")
    assert (
        code == 2 and "S3CRET" not in line and line.startswith(f"error: {where}: 's3://***@bucket/run' is an address")
    )
    assert sorted(place.folder.iterdir()) == before


def test_other_paths_that_are_too_long(place):  # noqa: F811
    code, line = place.run("plan", f"--config={place.config}", "--topology=cpu:1", f"--json={LONG}")
    assert (code, line) == (2, expected()["a name too long for a file"].replace("--workdir", "--json"))
    code, line = place.run("pretrain", f"--config={LONG}.py")
    assert code == 2 and line.endswith("has a name of 303 bytes; accepted: at most 255")
    code, line = place.run("pretrain", f"--config={place.config}:{LONG}")  # an argument may be as long as it likes
    assert code == 2 and "get_config() takes 0 positional arguments" in line
    code, line = place.pretrain(f"--config.workdir={'/'.join(['n' * 200] * 30)}")
    assert code == 2 and line.endswith("has 6029 bytes; accepted: at most 4095")


@pytest.mark.parametrize(
    ("case", "name"), [("a path with a zero in it", "a\\0b"), ("a path that is no text", "\\ud800")]
)
def test_paths_of_a_config_file_that_no_file_can_have(place, case, name):  # noqa: F811
    for field in ("'workdir': {}", "'data': {{'cache_dir': {}}}", "'data': {{'tokenizer_file': {}}}"):
        place.config.write_text(
            "from ml_collections import ConfigDict\ndef get_config():\n"
            f"    return ConfigDict({{{field.format(repr(name).replace(chr(92) * 2, chr(92)))}}})\n"
        )
        code, line = place.run("pretrain", f"--config={place.config}")
        where = field.split("'")[3] if "data" in field else "workdir"
        found = line.replace(f"data.{where}:", "workdir:")
        assert (code, found) == (2, expected()[case])


def test_line_ends_and_colours_in_a_path_stay_in_its_line(place):  # noqa: F811
    (place.folder / "a\nb\x1b[31m").write_text("")
    code, line = place.pretrain(workdir="a\nb\x1b[31m")
    assert (code, line) == (2, expected()["a path with a line end and a colour"])


def test_what_a_lock_says_is_one_short_line(tmp_path):
    lock = WorkdirLock(tmp_path)
    with lock:
        told = json.loads((tmp_path / ".lock").read_text())
    mine = {**told, "token": "another", "host": "a\nerror: b\x1b[31m", "since": 5000 * "s"}
    (tmp_path / ".lock").write_text(json.dumps(mine))
    with pytest.raises(Exception, match="is in use") as refused, lock:
        pass
    assert str(refused.value).isprintable() and len(str(refused.value)) < len(str(tmp_path)) + 250


HOSTILE = ["../victim", "/victim", "a/b", "a\\b", "a\0b", "", ".", ".hidden", "\ud800", "a\nb", LONG]


@pytest.mark.parametrize("field", ["run", "trunk"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_whose_run_no_file_can_be_called(tmp_path, name, field):
    """The name of a run is that of its file, which a study writes where only its records have it."""
    path = tmp_path / "records.jsonl"
    path.write_text(record_line({**FINAL, field: name}))
    with pytest.raises(RecordError, match=f"records.jsonl:1: final record: {field}: .* is not ") as refused:
        records.load(path, more=records.STUDY)
    assert str(refused.value).isprintable()
    assert records.set_aside(path, records.STUDY) and records.load(path) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss_stderr", -1.0), ("compressed_bits_per_byte", 3), ("compressed_bits_per_byte", {"gzip -9": "x"}),
     ("role", "\ud800"), ("status", "a\x1b[31m")],
)  # fmt: skip
def test_records_that_no_figure_can_show(tmp_path, field, value):
    path = tmp_path / "records.jsonl"
    path.write_text(record_line({**FINAL, field: value}))
    with pytest.raises(RecordError, match=f"records.jsonl:1: final record: {field}: "):
        records.load(path)


def test_a_backup_of_hard_links_stays_as_it_is(tmp_path):
    run, backup = tmp_path / "run.jsonl", tmp_path / "backup.jsonl"
    records.append(run, FINAL)
    os.link(run, backup)
    before = backup.read_bytes()
    records.append(run, {**FINAL, "step": 2})
    assert backup.read_bytes() == before and [record["step"] for record in records.load(run)] == [1, 2]
    records.append(run, {**FINAL, "step": 3})
    assert [record["step"] for record in records.load(run)] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.jsonl", "run.jsonl"]


def test_an_older_figure_survives_a_full_disk(place, monkeypatch):  # noqa: F811
    pytest.importorskip("matplotlib")
    out = place.folder / "curve.png"
    out.write_bytes(b"older")
    for step in (1, 2):
        records.append(
            place.folder / "records.jsonl",
            {"kind": "eval", "step": step, "tokens": step, "loss": 0.0, "loss_stderr": 0.1, "split": "validation",
             "bits_per_byte": 0.0},
        )  # fmt: skip

    def full(*_):
        raise OSError(28, "No space left on device")

    flags = [f"--workdir={place.folder}", f"--out={out}", r"--label=$\frac$"]
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", full)
        line = expected()["a full disk under a figure"]
        assert place.run("curves", *flags) == (2, line)
    assert out.read_bytes() == b"older"
    assert place.run("curves", *flags) == (0, "") and out.read_bytes().startswith(b"\x89PNG")
    (place.folder / "pipe.png").mkdir()
    code, line = place.run("curves", flags[0], f"--out={place.folder / 'pipe.png'}")
    assert (code, line) == (2, "error: --out: DIR/pipe.png is not a file; accepted: a figure to write")


def test_a_label_that_is_no_text(place):  # noqa: F811
    (place.folder / "records.jsonl").touch()
    flags = [f"--workdir={place.folder}", f"--out={place.folder / 'c.png'}", "--label=\udcff"]
    assert place.run("curves", *flags) == (2, expected()["a label that is no text"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name", "value", "program"),
    [
        ("a backend that matplotlib has not", "MPLBACKEND", "nonsense", ["curves", "--out=c.png"]),
        ("no CPU devices", "JAX_NUM_CPU_DEVICES", "0", ["pretrain"]),
    ],
)
def test_an_environment_that_cannot_be(place, case, name, value, program):  # noqa: F811
    """Read when a package is imported, so in a process of its own."""
    (place.folder / "records.jsonl").touch()
    which, *flags = program
    flags += [f"--workdir={place.folder}"] if which == "curves" else [f"--config={place.config}"]
    command = [sys.executable, "-m", f"experiments.{which}", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", name: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, expected()[case])
    assert not (place.folder / "c.png").exists()


@pytest.mark.parametrize("name", ["JAX_NUM_CPU_DEVICES", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"])
def test_what_jax_cannot_read_of_the_environment(name):
    command = [sys.executable, "-m", "experiments.evaluate", "--workdir=none"]
    ended = subprocess.run(command, env={**os.environ, name: "nonsense"}, capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and line.startswith("error: environment: ") and "nonsense" in line


def test_memory_that_is_all_used(place, monkeypatch):  # noqa: F811
    def none(*_, **__):
        raise MemoryError

    monkeypatch.setattr("jaxformer.runs.evaluation.evaluate", none)
    assert place.run("evaluate", "--workdir=a") == (2, expected()["no memory left"])


def test_the_command_that_goes_on_is_quoted():
    from jaxformer.runs.messages import resume_command

    parsed = Parsed(None, [], "my config.py", {"workdir": "a b"}, None)
    assert resume_command(parsed).endswith(" --config='my config.py' --config.workdir='a b'")


def test_a_manifest_whose_fingerprint_is_a_number(place):  # noqa: F811
    told = json_checksum.add_checksum({"config": {}, "data_fingerprint": "0", "fingerprint": 5})
    (place.folder / "manifest.json").write_text(json.dumps(told))
    line = expected()["manifest whose fingerprint is a number"]
    assert place.run("evaluate", f"--workdir={place.folder}") == (2, line)


def test_a_cache_in_the_home_folder_is_not_made_in_a_folder_called_tilde(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert cache_folder() == default_root() == Path.home() / "caches" / "jaxformer"

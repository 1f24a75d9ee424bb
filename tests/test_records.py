"""Records: what is written comes back; what does not fit is refused in one line; a kill costs one line at most."""

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from jaxformer import records
from jaxformer.errors import RecordError

TRAIN = {
    "kind": "train", "step": 1, "tokens": 768, "loss": 5.5, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": 0,
    "seconds": 0.1,
}  # fmt: skip
EVAL = {"kind": "eval", "step": 1, "tokens": 768, "loss": 5.0, "loss_stderr": 0.1, "split": "validation"}
EVENT = {"kind": "event", "step": 0, "event": "started"}
FINAL = {
    "kind": "final", "step": 9, "tokens": 10, "loss": 5.0, "loss_stderr": 0.1, "params": 3,
    "params_non_embedding": 2, "flops": 1.0,
}  # fmt: skip
ALL = [TRAIN, EVAL, EVENT, FINAL]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "records.jsonl"


def test_what_is_appended_is_loaded_in_order(path):
    for record in ALL:
        records.append(path, {**record, "more": "fields are allowed"})
    assert records.load(path) == [{**r, "more": "fields are allowed"} for r in ALL]
    assert [r["kind"] for r in records.load(path, kind="eval")] == ["eval"]
    assert records.load(path, kind="nothing of that kind") == []


@pytest.mark.parametrize("record", ALL, ids=lambda r: r["kind"])
def test_every_field_of_the_schema_is_needed(path, record):
    for name in records.SCHEMA[record["kind"]]:
        lacking = {k: v for k, v in record.items() if k != name}
        with pytest.raises(RecordError, match=rf"records.jsonl: {record['kind']} record lacks {name}$"):
            records.append(path, lacking)
    assert not path.exists()


def test_a_record_that_lacks_a_field_is_refused_when_read(path):
    records.append(path, TRAIN)
    path.write_text(path.read_text() + json.dumps({"kind": "eval", "step": 1, "split": "validation"}) + "\n")
    with pytest.raises(RecordError, match=r"records.jsonl:2: eval record lacks loss, loss_stderr, tokens$"):
        records.load(path)


@pytest.mark.parametrize("kind", ["trian", None, 3])
def test_an_unknown_kind_names_the_known_ones(path, kind):
    with pytest.raises(RecordError, match=rf"kind {kind!r} is not one of eval, event, final, train$"):
        records.append(path, {**TRAIN, "kind": kind})
    with pytest.raises(RecordError, match="kind None is not one of"):
        records.append(path, {"step": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("number", [float, np.float64], ids=["float", "numpy"])
def test_numbers_that_are_not_finite_are_valid_json_and_come_back(path, value, number):
    records.append(path, {**TRAIN, "loss": number(value)})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["loss"] == str(value)
    (loaded,) = records.load(path)
    assert isinstance(loaded["loss"], float)
    np.testing.assert_equal(loaded["loss"], value)


@pytest.mark.parametrize("value", [np.float32(1.0), {1, 2}, [math.nan]], ids=repr)
def test_what_json_cannot_say_is_refused_in_one_line(path, value):
    records.append(path, TRAIN)
    with pytest.raises(RecordError, match=r"train record cannot be written as JSON \(.*\)$") as caught:
        records.append(path, {**TRAIN, "loss": value})
    assert "\n" not in str(caught.value)
    assert records.load(path) == [TRAIN]


def test_a_write_cut_off_anywhere_costs_that_record_only(path):
    records.append(path, TRAIN)
    records.append(path, EVAL)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        kept = [TRAIN, EVAL] if cut == len(whole) - 1 else [TRAIN]  # only the newline is missing: nothing is lost
        assert records.load(path) == kept
        records.append(path, EVENT)  # the run goes on, in the same file
        assert records.load(path) == [*kept, EVENT], cut


def test_a_first_line_cut_off_leaves_an_empty_record(path):
    path.write_bytes(b'{"kind": "tr')
    assert records.load(path) == []
    records.append(path, TRAIN)
    assert records.load(path) == [TRAIN]


@pytest.mark.parametrize("broken", ['{"kind": "tr', "3", "[]", '"text"', "\x00\x00"])
def test_a_broken_line_anywhere_else_is_an_error(path, broken):
    records.append(path, TRAIN)
    path.write_text(broken + "\n" + path.read_text())
    with pytest.raises(RecordError, match=r"records.jsonl:1: not a JSON object$"):
        records.load(path)


def test_a_flipped_bit_never_gives_another_number(path):
    """In every byte: the records that were written, or one line."""
    for record in ALL:
        records.append(path, record)
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole)):
        for bit in (0, at % 7 + 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                found = records.load(path)
            except RecordError as error:
                refused += 1
                assert "\n" not in str(error)
                continue
            # A flip in the checksum's own name makes it one more field, whose number nobody reads.
            assert [{k: v for k, v in r.items() if k in wrote} for r, wrote in zip(found, ALL, strict=True)] == ALL
    assert refused > 1.8 * len(whole)


def test_records_without_a_checksum_are_read(path):
    """Those of older versions; a line that has one is the same record."""
    path.write_text("".join(json.dumps(record) + "\n" for record in ALL))
    records.append(path, TRAIN)
    assert records.load(path) == [*ALL, TRAIN]
    assert json.loads(path.read_text().splitlines()[-1]).keys() == {*TRAIN, "crc"}


def test_empty_lines_do_not_count(path):
    records.append(path, TRAIN)
    path.write_text("\n" + path.read_text() + "\n\n")
    assert records.load(path) == [TRAIN]


def test_a_file_that_is_not_there(path):
    with pytest.raises(FileNotFoundError):
        records.load(path)


def test_of_records_written_twice_the_later_stands():
    """A killed run repeats the steps after its last checkpoint."""
    steps = [{**TRAIN, "step": step, "loss": loss} for step, loss in [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5)]]
    kept = records.latest([*steps, {**EVAL, "step": 2}, {**EVAL, "step": 2, "split": "train"}, {**EVENT, "step": 2}])
    assert [(r["step"], r["loss"]) for r in kept if r["kind"] == "train"] == [(1, 5.0), (2, 4.5), (3, 3.5)]
    assert [r["split"] for r in kept if r["kind"] == "eval"] == ["validation", "train"]
    assert [r["step"] for r in kept] == sorted(r["step"] for r in kept)


NOT_NUMBERS = ["5.5", None, True, [5.5], {}, 10**400]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", ["loss", "step", "seconds"])
def test_text_for_a_number_is_refused_when_written_and_when_read(path, name, value):
    with pytest.raises(RecordError, match=rf"records.jsonl: train record: {name}: .* is not a (number|count)$"):
        records.append(path, {**TRAIN, name: value})
    path.write_text(json.dumps(TRAIN) + "\n" + json.dumps({**TRAIN, name: value}) + "\n")
    with pytest.raises(RecordError, match=rf"records.jsonl:2: (train record: {name}: .* is|not a JSON object)"):
        records.load(path)


@pytest.mark.parametrize(
    ("name", "value"), [("step", -1), ("step", 1.5), ("split", 3), ("run", None), ("width", 2**70)]
)
def test_counts_and_words_are_that(path, name, value):
    path.write_text(json.dumps({**EVAL, name: value}) + "\n")
    with pytest.raises(RecordError, match=rf"records.jsonl:1: eval record: {name}: .* is not (a count|text)$"):
        records.load(path)


def test_the_records_of_a_study_have_more(path):
    records.append(path, FINAL)
    with pytest.raises(RecordError, match=r"jsonl:1: final record lacks branched_at, learning_rate, role, run,"):
        records.load(path, more=records.STUDY)


def test_what_is_no_file_of_records_is_one_line(path, tmp_path):
    for make in (os.mkdir, os.mkfifo, lambda p: p.symlink_to("/dev/zero")):
        make(path)
        for use in (records.load, lambda p: records.append(p, TRAIN), records.set_aside):
            with pytest.raises(RecordError, match=r"records.jsonl: cannot be (read|written) \("):
                use(path)
        path.rmdir() if path.is_dir() else path.unlink()
    victim = tmp_path / "victim"
    path.symlink_to(victim)
    with pytest.raises(RecordError, match="is a symbolic link, which is not followed"):
        records.append(path, TRAIN)
    assert not victim.exists()
    records.write(path, [TRAIN])  # replaces the link
    assert not victim.exists() and records.load(path) == [TRAIN]


BROKEN = [
    b"garbage",
    b"\x00\x00\x00",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"kind": "train"}',
    b"3",
    b'{"kind": "eval", "loss": "x"}',
]


def test_broken_lines_are_set_aside_and_the_rest_stays(path):
    whole = [json.dumps(record).encode() for record in ALL]
    lines = [whole[0], BROKEN[0], BROKEN[1], whole[1], b"", BROKEN[2], whole[2], *BROKEN[3:], whole[3]]
    path.write_bytes(b"\n".join(lines) + b"\n" + b'{"kind": "tr')
    said = records.set_aside(path)
    assert said == f"{path}:2: not a JSON object; 7 lines are set aside in records.damaged.jsonl, and the run goes on"
    assert records.load(path) == ALL and path.read_bytes().endswith(b'\n{"kind": "tr')
    assert path.with_name("records.damaged.jsonl").read_bytes() == b"".join(line + b"\n" for line in BROKEN)
    assert records.set_aside(path) is None
    records.append(path, TRAIN)
    assert records.load(path) == [*ALL, TRAIN]
    path.write_bytes(path.read_bytes() + b"more\n")
    assert "1 line is set aside" in records.set_aside(path)
    assert path.with_name("records.damaged.jsonl").read_bytes().endswith(b'loss": "x"}\nmore\n')


def test_nothing_is_set_aside_of_a_whole_file_or_of_none(path):
    assert records.set_aside(path) is None and not path.exists()
    records.write(path, ALL)
    before = path.stat().st_ino
    assert records.set_aside(path) is None and path.stat().st_ino == before


def test_what_is_written_whole_is_durable(path, monkeypatch):
    done = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), real(handle))[1])
    records.write(path, ALL)
    assert done == ["sync", "sync"] and records.load(path) == ALL  # the file, and its name
    done.clear()
    for record, count in ((TRAIN, 0), (EVAL, 1), (EVENT, 1), (FINAL, 1)):
        records.append(path, record)
        assert done == ["sync"] * count
        done.clear()


def test_a_full_disk_is_one_line(path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: records.append(path, EVAL), lambda: records.write(path, ALL)):
        with pytest.raises(RecordError, match=r"records.jsonl: cannot be written \(No space left on device\)$"):
            write()

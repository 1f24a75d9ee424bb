"""What a run prints of its time and memory, and of its text."""

import pytest

from jaxformer.config import from_mapping
from jaxformer.runs import messages, texts

USED = {
    "productive_seconds": 60.0, "wall_seconds": 120.0, "startup_seconds": 6.0, "compilation_seconds": 30.0,
    "data_seconds": 0.0, "evaluation_seconds": 12.0, "checkpoint_seconds": 3.0, "restarts": 0, "steps_redone": 0,
    "peak_host_bytes": 2**31, "peak_device_bytes": 3 * 2**30,
}  # fmt: skip


def said(used):
    lines: list[str] = []
    messages.print_used(used, lines.append)
    return lines


def test_where_the_time_went():
    time, memory = said(USED)
    assert time == (
        "time:   2 min: 50% in steps that count, 25% compiling, 5% starting, 10% evaluating, 2% checkpoints, 0% "
        "waiting for data"
    )
    assert memory == "memory: 3.00 GiB fullest device, 2.00 GiB host at most"
    assert said(USED | {"restarts": 1, "steps_redone": 7})[0].endswith("; 1 restart, 7 steps made again")


def test_what_is_not_known_is_not_said():
    assert said({}) == []
    assert said({"peak_host_bytes": 2**30}) == ["memory: 1.00 GiB host at most"]


@pytest.mark.parametrize(
    "data, told",
    [
        ({}, ["of the standard library one file in twenty is held out"]),
        ({"files": ["a.txt"], "validation_files": ["b.txt"]}, ["data.validation_files is held out"]),
        ({"files": ["a.txt"]}, []),
        ({"tokens": ["shards"]}, ["shards has held-out text of its own, chosen when it was tokenised"]),
        ({"tokens": ["a.bin"], "tokenizer_file": "t.json"}, []),
        ({"source": "markov"}, []),
        ({"hf_dir": "set", "hf_validation_split": "test"}, ["data.hf_validation_split is held out"]),
    ],
)
def test_a_share_to_hold_out_that_is_not_used_is_said(data, told):
    """Of a source alone, and of one of a mixture."""

    class Nothing:
        def notes(self):
            return []

    def notes(section):
        return texts.notes(from_mapping({"data": section}), Nothing())

    prefix = "validation_fraction: 0.3 is not used: "
    assert notes({**data, "validation_fraction": 0.3}) == [f"data.{prefix}{why}" for why in told]
    assert notes(data) == []
    own = {name: value for name, value in data.items() if name != "tokenizer_file"} or {"source": "stdlib"}
    mixed = {"mixture": {"a": {**own, "validation_fraction": 0.3}}}
    assert notes(mixed) == [f"data.mixture.a.{prefix}{why}" for why in told]

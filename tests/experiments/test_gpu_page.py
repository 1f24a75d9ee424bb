"""The one command for GPUs: its page of results from records, its table of blocks, and its parts in little, on CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import gpu_page
from jaxformer.benchmarks import autotune
from jaxformer.errors import ConfigError
from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock

ROOT = Path(__file__).parent.parent.parent
EXACT = {"implementation": "flash_gpu", "case": "packed", "dtype": "bfloat16", "leaks": False, "ok": True,
         "errors": {"out": 0.002, "key": 0.004}}  # fmt: skip
TRAIN = {"shape": "gpt2", "dtype": "bfloat16", "rows": 32, "in": "s", "unit": "tokens", "work": 32768}


def lines(file, *records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_page_says_what_was_found_and_what_is_missing(tmp_path):
    assert gpu_page.page(tmp_path).count("Not measured yet.") == 7
    (tmp_path / "device.txt").write_text("NVIDIA H100 80GB HBM3, 570.1, 81559 MiB\n")
    (tmp_path / "exactness.done").write_text("3 s")
    (tmp_path / "exactness.err").write_text("")
    (tmp_path / "sweep.err").write_text("error: no\n")
    lines(tmp_path / "exactness.jsonl", EXACT, EXACT | {"case": "t5", "errors": {"out": 0.5}, "ok": False})
    lines(
        tmp_path / "train.jsonl",
        TRAIN | {"name": "torch", "measured": [0.2, 0.1, 0.3], "flop": 0.2 * 989e12 * 0.4},
        TRAIN | {"name": "jaxformer", "measured": [0.1], "flop": 0.1 * 989e12 * 0.5},
    )
    autotune.keep(tmp_path / "blocks.json", "keys", autotune.TimedShape(2048, 64), FlashBlock(64, 32, 4, 2), 1e-4)
    page = gpu_page.page(tmp_path)
    assert page.startswith("# NVIDIA H100") and "Done: exactness. Failed: sweep." in page
    assert "| flash_gpu | bfloat16 | 2 | 5.0e-01 | t5 |" in page
    assert "| torch | 200 ms | 1.638e+05 tokens | 1.000 | 0.400 (aim: 0.45) |" in page
    assert "| jaxformer | 100 ms | 3.277e+05 tokens | 0.500 | 0.500 (aim: 0.45) |" in page
    assert "| keys | 64 | 2048 | [64, 32, 4, 2] | 100.0 |" in page and page.count("Not measured yet.") == 4


def test_a_measured_size_takes_the_place_of_an_earlier_one(tmp_path):
    table, shape = tmp_path / "blocks.json", autotune.TimedShape(2048, 64)
    autotune.keep(table, "keys", shape, FlashBlock(64, 32, 4, 2), 1e-4)
    autotune.keep(table, "queries", shape, FlashBlock(64, 64, 4, 2), 1e-4)
    autotune.keep(table, "keys", shape, FlashBlock(128, 32, 8, 2), 5e-5)
    found = {row["kernel"]: (row["block"], row["microseconds"]) for row in json.loads(table.read_text())}
    assert found == {"queries": ([64, 64, 4, 2], 100.0), "keys": ([128, 32, 8, 2], 50.0)}


def test_pretrainings_are_told_apart_and_a_record_without_a_speed_is_left_out(tmp_path):
    train = {"kind": "train", "loss": 2.0, "step": 10}
    fast = train | {"step": 20, "tokens_per_second": 1e6, "utilisation": 0.4}
    final = {"kind": "final", "spent": {"total": 9.0, "data": 0.5}}
    for name, lines in (("pretrain-a", [train, fast, final]), ("pretrain-b", [train, {**fast, "utilisation": 0.3}])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "pretrain-c.jsonl").write_text("")
    page = gpu_page.page(tmp_path)
    assert "**pretrain-a**" in page and "| 20 | 2.000 | 1,000,000 | 0.400 |" in page and "| 10 |" not in page
    assert "The run took 9 s; seconds that were no training: data 0.5." in page
    assert "**pretrain-b**" in page and "**pretrain-c**" in page


def test_notes_stand_before_the_tables(tmp_path):
    (tmp_path / "notes.md").write_text("Part by part.\n")
    page = gpu_page.page(tmp_path)
    assert "Part by part.\n\n## Exactness" in page and "Done:" not in page


@pytest.mark.parametrize("folder", sorted((ROOT / "experiments" / "results").glob("gpu_*")), ids=lambda f: f.name)
def test_the_committed_page_is_what_its_records_give(folder):
    assert (folder / "README.md").read_text() == gpu_page.page(folder)


def test_shapes_to_time():
    assert autotune.parsed("2048x64,8192x128") == [autotune.TimedShape(2048, 64), autotune.TimedShape(8192, 128)]
    for text in ("", "2048", "0x64", "2048x64,"):
        with pytest.raises(ConfigError, match=r"--shapes: .*; accepted: LENGTHxWIDTH, several with commas between"):
            autotune.parsed(text)


@pytest.mark.slow
def test_exactness_and_autotuning_in_little(tmp_path):
    commands = (["exactness", f"--out={tmp_path}/exactness.jsonl"], ["autotune", f"--table={tmp_path}/blocks.json"])
    for module, where in commands:
        command = [sys.executable, "-m", f"jaxformer.benchmarks.{module}", "--dry", where]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    found = gpu_page.records(tmp_path / "exactness.jsonl")
    assert {each["case"] for each in found} == {"packed", "t5 and soft cap", "groups"} and all(
        each["ok"] for each in found
    )
    assert len(json.loads((tmp_path / "blocks.json").read_text())) == 3

"""A run goes on with what may change, to the bits of a run that was so from the start; what may not is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from quick_runs import quickly

from jaxformer.config import from_mapping
from jaxformer.errors import ConfigError
from jaxformer.runs import changes, manifest, pretrain
from jaxformer.runs.command_line import parse_config, parser

CONFIG = """
def get_config():
    return {
        "model": {"num_layers": 1, "width": 16, "context_length": 16, "attention": {"num_heads": 2}},
        "data": {"source": "files", "files": (TEXT,), "tokenizer": "bytes", "cache_dir": CACHE},
        "optimizer": {"warmup_steps": 2, "schedule": "wsd", "decay_steps": 3},
        "train": {"steps": 12, "global_batch_size": 8, "eval_every_steps": 6, "log_every_steps": 2, "eval_rows": 8},
        "execution": {"steps_per_dispatch": 2},
        "checkpoint": {"save_every_steps": 3, "save_every_minutes": None, "keep": 9},
        "compilation_cache": False,
    }
"""


@pytest.fixture(scope="module", autouse=True)
def on_one_device():
    with quickly():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a config; `done` in it is a run of 12 steps."""
    folder = written(tmp_path_factory.mktemp("changes"))
    start(folder, "done")
    return folder


def written(folder):
    """The folder, with the text and the config in it."""
    (folder / "text.txt").write_text("All happy families are alike; each is unhappy in its own way. " * 60)
    text = CONFIG.replace("TEXT", repr(str(folder / "text.txt"))).replace("CACHE", repr(str(folder / "cache")))
    (folder / "config.py").write_text(text)
    return folder


def start(place, name, *fields):
    """Trains; the result."""
    flags = [f"--config.{field}" for field in fields]
    return pretrain.pretrain(
        parse_config(parser("", "pretrain"), [str(place / "config.py"), f"--config.workdir={place / name}", *flags])
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Such a folder whose run has begun, and trained nothing yet but what is worth keeping: an empty checkpoint."""
    folder = written(tmp_path_factory.mktemp("begun"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.loop, "train", lambda *_, **__: pretrain.loop.Result("interrupted", 0, None, None, 0.0))
        start(folder, "done")
    (folder / "done" / "checkpoints" / "6").mkdir(parents=True)
    return folder


def cut(place, name, step, of="done"):
    """A copy of a run as it was when it had made `step` steps and not yet ended."""
    shutil.copytree(place / of, place / name)
    for folder in (place / name / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)


def same_weights(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one.state.params), jax.device_get(other.state.params))


@pytest.mark.slow
def test_more_steps_are_those_of_a_longer_run(place, capsys):
    longer = start(place, "longer", "train.steps=18")
    cut(place, "grown", 9)  # the decay of 12 steps begins at 9
    capsys.readouterr()
    grown = start(place, "grown", "train.steps=18")
    told = capsys.readouterr().out
    assert "note: train.steps: 12 -> 18 since this run began" in told
    assert "note: it goes on as a run of 18 steps, whose learning rate ends at 0.0004" in told
    assert grown.step == 18
    same_weights(longer, grown)
    about = manifest.read(place / "grown")
    assert about["config"]["train"]["steps"] == 18 and about["changes"][0]["changed"] == ["train.steps: 12 -> 18"]
    again = start(place, "grown", "train.steps=18")  # nothing more to do, and nothing to say
    assert again.step == 18 and "note: train" not in capsys.readouterr().out
    finals = [
        r for r in map(json.loads, (place / "grown" / "records.jsonl").read_text().splitlines()) if r["kind"] == "final"
    ]
    assert finals[-1]["step"] == 18


@pytest.mark.slow
def test_a_decay_that_has_begun_is_not_taken_back(place):
    cut(place, "decayed", 12)
    before = (place / "decayed" / "manifest.json").read_bytes()
    line = (
        r"^config.train.steps: 12 -> 18: 12 steps were made with the old learning rates, and the new ones differ from "
        r"step 10 on; accepted: the old value, or a run of its own that starts from this one: --config.init_from="
    )
    with pytest.raises(ConfigError, match=line):
        start(place, "decayed", "train.steps=18")
    with pytest.raises(ConfigError, match=r"^config.train.steps: 7; 12 steps were made; accepted: at least 12$"):
        start(place, "decayed", "train.steps=7", "optimizer.schedule=constant")
    assert (place / "decayed" / "manifest.json").read_bytes() == before


@pytest.mark.slow
def test_how_often_and_where_change_no_bit(place, capsys):
    cut(place, "told", 6)
    moved = place / "moved.jsonl"  # the same text, read in another way
    moved.write_text(json.dumps({"body": (place / "text.txt").read_text()}))
    capsys.readouterr()
    fields = ("train.log_every_steps=5", "train.eval_every_steps=4", "train.early_stop_evals=50", f"data.files={moved}")
    fields += ("data.text_field=body", "data.on_error=skip")
    same_weights(start(place, "told", *fields), start(place, "done"))
    told = capsys.readouterr().out
    assert (
        "note: data.files: " in told
        and "data.text_field: 'text' -> 'body'; " in told
        and "train.log_every_steps: 2 -> 5 since this run began" in told
    )
    assert "results agree to rounding" not in told


def test_other_text_is_refused_all_the_same(begun):
    (begun / "other.txt").write_text("Happy families are all alike. " * 100)
    with pytest.raises(ConfigError, match="was trained on other text"):
        start(begun, "done", f"data.files={begun / 'other.txt'}")


@pytest.mark.parametrize("field", ["optimizer.learning_rate=1e-4", "train.global_batch_size=16", "seed=1"])
def test_what_decides_the_weights_stays(begun, field):
    with pytest.raises(ConfigError, match="holds a run of another config"):
        start(begun, "done", field)


def config(steps, **optimizer):
    return from_mapping({"train": {"steps": steps}, "optimizer": {"warmup_steps": 2, **optimizer}})


@pytest.mark.parametrize(("old", "new", "newest", "ok"), [
    (config(100, schedule="constant"), config(40, schedule="constant"), 40, True),
    (config(100, schedule="constant"), config(100, schedule="wsd", decay_steps=20), 80, True),
    (config(100, schedule="constant"), config(100, schedule="wsd", decay_steps=20), 82, False),
    (config(100, schedule="cosine"), config(101, schedule="cosine"), 10, False),
    (config(100, schedule="cosine"), config(200, schedule="cosine"), 2, True),  # only the warm-up was made
    (config(100, schedule="inverse_sqrt"), config(300, schedule="inverse_sqrt"), 90, True),
])  # fmt: skip
def test_schedules_that_agree_on_the_past(old, new, newest, ok):
    if ok:
        changes.check_schedule(old, new, newest)
    else:
        with pytest.raises(ConfigError, match="differ from step"):
            changes.check_schedule(old, new, newest)


def test_every_field_that_may_change_exists():
    tree = from_mapping({})
    for name in changes.MAY_CHANGE:
        for part in name.split("."):
            assert hasattr(tree, part), name
            tree = getattr(tree, part)
        tree = from_mapping({})

"""Whose a run's directory is: the manifest is believed as it was written, and what left nothing behind makes way."""

import json
import os
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from file_formats import early_fingerprint

from jaxformer import records
from jaxformer.config import CheckpointConfig, Execution, MeshConfig, from_mapping
from jaxformer.errors import ConfigError
from jaxformer.modules import make_model
from jaxformer.runs import changes, manifest
from jaxformer.specs import is_spec
from jaxformer.storage import json_checksum
from jaxformer.training.gradients import gradients
from jaxformer.types import Batch


@pytest.fixture
def config(tmp_path):
    return from_mapping({"workdir": str(tmp_path / "run"), "model": {"vocab_size": 320, "width": 128}})


def claim(config, text="0123456789abcdef", **more):
    manifest.check_workdir(config)
    manifest.write_or_check(manifest.describe(config, [], "config.py", text, **more), config)


def path(config):
    return manifest.Path(config.workdir) / "manifest.json"


def change(config, **fields):
    """Changes the manifest by hand."""
    told = json.loads(path(config).read_text())
    path(config).write_text(json.dumps({**told, **fields}))


def keep_something(config):
    (manifest.Path(config.workdir) / "checkpoints" / "5").mkdir(parents=True)


def test_it_is_read_back(config):
    claim(config)
    assert manifest.read_config(config.workdir) == config
    assert os.listdir(config.workdir) == ["manifest.json"]
    text = json.dumps(json.loads(path(config).read_text()), indent=4)  # spaces are not content
    path(config).write_text(text)
    assert manifest.read_config(config.workdir) == config


@pytest.mark.slow
def test_every_changed_byte_is_noticed(config):
    claim(config)
    whole = path(config).read_bytes()
    told = manifest.read(config.workdir)
    for at in range(len(whole)):
        path(config).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert manifest.read(config.workdir) == told  # a space became another sign that JSON passes over
        except ConfigError as error:
            assert str(error).startswith(f"workdir {config.workdir}: manifest.json ") and "\n" not in str(error)
    for end in range(0, len(whole) - 2, 7):
        path(config).write_bytes(whole[:end])
        with pytest.raises(ConfigError):
            manifest.read(config.workdir)


def test_one_digit_by_hand_is_refused(config):
    claim(config)
    text = path(config).read_text()
    assert '"norm_epsilon": 1e-05' in text
    path(config).write_text(text.replace('"norm_epsilon": 1e-05', '"norm_epsilon": 1e-07'))
    line = (
        f"workdir {config.workdir}: manifest.json is damaged or was edited (its checksum does not match); accepted: the"
    )
    with pytest.raises(ConfigError) as error:
        manifest.read_config(config.workdir)
    assert str(error.value) == f"{line} file as it was written"
    told = json.loads(path(config).read_text())
    del told["seal"]  # and without its checksum it is not taken for an earlier version's
    path(config).write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="edited"):
        manifest.read_config(config.workdir)


def test_what_an_earlier_version_wrote_is_read(config):
    claim(config)
    told = json.loads(path(config).read_text())
    for name in ("seal", "fingerprint", "tokenizer"):
        del told[name]
    del told["config"]["model"]["norm_epsilon"]  # a field that it did not know
    path(config).write_text(json.dumps(told))
    keep_something(config)
    assert manifest.read_config(config.workdir) == config
    manifest.check_workdir(config)
    mine, also = manifest.fingerprints(config.workdir, config)
    assert len(mine) == 16 and also[-1] == early_fingerprint(manifest.to_dict(config))
    for results in sorted((manifest.Path(__file__).parents[2] / "experiments" / "results").glob("*/manifest.json")):
        assert manifest.read(results.parent)["data_fingerprint"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"config": None, "data_fingerprint": "a"}, "cannot be read (config: None)"),
        ({"config": "gpt", "data_fingerprint": "a"}, "cannot be read (config: 'gpt')"),
        ({"config": {}, "data_fingerprint": 3}, "cannot be read (data_fingerprint: 3)"),
        ({"config": {}}, "cannot be read (data_fingerprint: None)"),
        ({"config": {}, "data_fingerprint": "a"}, "config.model.vocab_size: None; a run that started has one"),
        ({"config": {"model": None}, "data_fingerprint": "a"}, "config.model: None is not a section of fields"),
        ({"config": {"modle": {}}, "data_fingerprint": "a"}, "config.modle: no such field; did you mean model?"),
        ([], "is damaged or was edited"),
        (None, "is damaged or was edited"),
        ("[" * 100_000, "cannot be read (nested too deeply)"),
        ("\x00", "cannot be read (Expecting value: line 1 column 1 (char 0))"),
        ("", "cannot be read (Expecting value: line 1 column 1 (char 0))"),
        (b'{"seed": "\xff"}', "cannot be read (byte 10 is not of text in UTF-8)"),
    ],
)
def test_a_manifest_that_is_none_is_one_line(config, content, words):
    os.mkdir(config.workdir)
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    path(config).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        manifest.read_config(config.workdir)
    assert str(error.value).startswith(f"workdir {config.workdir}: manifest.json") and words in str(error.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: p.symlink_to("/dev/zero")])
def test_a_manifest_that_never_ends_is_not_waited_for(config, make):
    os.mkdir(config.workdir)
    make(path(config))
    with pytest.raises(ConfigError, match=r"manifest.json cannot be read"):
        manifest.read_config(config.workdir)


def test_the_fingerprint_is_of_what_is_computed(config, tmp_path):
    def of(config, text="0123456789abcdef"):
        return manifest.describe(config, [], "config.py", text)["fingerprint"]

    where = replace(config, workdir="elsewhere", mesh=MeshConfig(2), checkpoint=CheckpointConfig(keep=9))
    assert of(where) == of(config) and len(of(config)) == 32
    others = [replace(config, seed=1), replace(config, model=replace(config.model, norm_epsilon=1e-7))]
    assert len({of(config), *map(of, others), of(config, "another text")}) == 4
    claim(config)
    assert manifest.fingerprints(config.workdir, where) == (of(config), [])


def test_a_start_that_left_nothing_makes_way(config, capsys):
    """An update that does not compile, kill -9 before the first step: the corrected command is not refused."""
    other, workdir = replace(config, seed=1), manifest.Path(config.workdir)
    claim(config, "one text")
    (workdir / "records.jsonl").write_text('{"kind": "event", "step": 0, "event": "started"}\n{"kind": "ev')
    (workdir / "checkpoints" / "5.orbax-checkpoint-tmp-1").mkdir(parents=True)
    claim(other, "another text")
    assert manifest.read(config.workdir)["seed"] == 1 and not (workdir / "records.jsonl").exists()


RECORDS = [
    '{"kind": "train", "step": 1}\n',
    '{"kind": "eval"}\n',
    "garbage\n",
    "\x00\n",
    "[]\n",
    '{"kind": "event"}\n3\n',
]


def test_how_it_runs_may_change_and_is_said(config):
    claim(config)
    keep_something(config)
    assert changes.notes(manifest.stored_config(config.workdir), config) == []
    changed = replace(config, execution=Execution(remat="full", attention="xla"))
    claim(changed)
    assert changes.notes(manifest.stored_config(config.workdir), changed) == [
        "note: execution.attention: 'auto' -> 'xla'; execution.remat: 'none' -> 'full' since this run began; its "
        "results agree to rounding, not bit for bit"
    ]
    assert manifest.fingerprints(config.workdir, changed) == manifest.fingerprints(config.workdir, config)
    before = manifest.fingerprints(config.workdir)
    manifest.record_change(changed)
    assert manifest.read_config(config.workdir) == changed and manifest.fingerprints(config.workdir) == before
    assert (
        manifest.read(config.workdir)["config_file"] == "config.py"
        and len(manifest.read(config.workdir)["changes"]) == 1
    )
    manifest.record_change(replace(changed, workdir=changed.workdir))  # nothing changed: nothing is written
    assert len(manifest.read(config.workdir)["changes"]) == 1


CHANGES = ({"attention": "chunked"}, {"gradient_accumulation_steps": 2}, {"remat": "full"}, {"layers": "scan"})


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["none", "residual", "weights"])
def test_the_note_says_when_dropout_drops_other_elements(config, dropout):
    """It says so exactly where the losses of one batch and one key differ by more than rounding."""
    rates = {"none": (0.0, 0.0), "residual": (0.3, 0.0), "weights": (0.0, 0.3)}[dropout]
    attention = replace(config.model.attention, num_heads=2, dropout=rates[1])
    model = replace(config.model, num_layers=1, width=16, context_length=16, dropout=rates[0], attention=attention)
    config = replace(config, model=model, execution=Execution(attention="xla"))
    claim(config)

    def loss(config):
        made = make_model(config.model, config.loss, config.execution)
        tokens = np.arange(64, dtype=np.int32).reshape(4, 16)
        batch = Batch(tokens, tokens[:, ::-1], np.ones((4, 16), np.float32), None, None)
        micro_batches = config.execution.gradient_accumulation_steps
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda s: rng.normal(0, 0.5, s.shape).astype(np.float32), made.specs, is_leaf=is_spec)
        of = jax.jit(lambda *a: gradients(*a, model=made, micro_batches=micro_batches)[0])
        return float(of(params, batch, jax.random.key(1)))

    before = loss(config)
    for change in CHANGES:
        changed = replace(config, execution=replace(config.execution, **change))
        differ = abs(loss(changed) - before) > 1e-5
        (said,) = changes.notes(manifest.stored_config(config.workdir), changed)
        assert ("dropout then drops other elements" in said, "agree to rounding" in said) == (differ, not differ)


def test_the_manifest_of_a_version_before(config):
    """It says everything under the names of then, and goes on under today's."""
    claim(config)
    keep_something(config)
    told = manifest.read(config.workdir)
    model = told["config"]["model"]
    for section in ("attention", "positions", "feed_forward"):
        kind = model.pop(section)
        model |= {"positions": kind["kind"]} if section == "positions" else {}
    model |= {"num_heads": 4, "window": None, "attention": "auto", "rotary_base": 1e4, "rotary_scaling": "none",
              "rotary_factor": 1.0, "rotary_original_length": None, "token_types": 0, "next_sentence": False,
              "activation": "gelu", "mlp_width": None, "remat": "none", "layers": "unroll"}  # fmt: skip
    told["config"]["train"] |= {"batch_rows": told["config"]["train"].pop("global_batch_size"), "micro_batches": 1,
                                "steps_per_dispatch": 10}  # fmt: skip
    told["config"]["mesh"]["shard_norms"] = told["config"]["mesh"].pop("sequence_parallel")
    del told["config"]["execution"], model["bert"]
    path(config).write_text(json.dumps(json_checksum.add_checksum(told)))
    assert manifest.read_config(config.workdir) == config
    claim(config)
    assert changes.notes(manifest.stored_config(config.workdir), config) == []


@pytest.mark.parametrize("kept", ["checkpoints/5", "checkpoints/mine", "runs/a.jsonl", "trunks/ab/7", *RECORDS])
def test_what_is_worth_keeping_keeps_its_directory(config, kept):
    claim(config)
    workdir = manifest.Path(config.workdir)
    if kept in RECORDS:
        (workdir / "records.jsonl").write_text(kept)
    else:
        (workdir / kept).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run of another config \(seed: 0 -> 1\)"):
        manifest.check_workdir(replace(config, seed=1))
    with pytest.raises(ConfigError, match="holds a run of another config"):
        claim(replace(config, seed=1))
    with pytest.raises(ConfigError, match=r"was trained on other text \(corpus 0123456789abcdef, now another\)"):
        claim(config, "another")
    claim(config)
    assert manifest.read(config.workdir)["seed"] == 0


LINKS = ["records.jsonl", "tokenizer.json", "checkpoints", "tensorboard", "manifest.json", "runs", "figures"]


@pytest.mark.parametrize("name", [*LINKS, "checkpoints/5", "trunks/ab/7", "runs/a.jsonl", "figures/loss.png"])
def test_links_in_a_hostile_directory_are_refused(config, name, tmp_path):
    claim(config)
    victim, link = tmp_path / "victim", manifest.Path(config.workdir) / name
    victim.mkdir()
    if link.exists():
        link.rename(victim / "manifest.json")
        victim = victim / "manifest.json"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim)
    with pytest.raises(ConfigError) as error:
        claim(config)
    assert str(error.value).startswith(f"config.workdir: {link} is a symbolic link, which is not followed")


@pytest.mark.parametrize("name", ["records.jsonl", "tokenizer.json", "checkpoints", "runs"])
def test_a_folder_for_a_file_is_refused(config, name):
    claim(config)
    made = manifest.Path(config.workdir) / name
    made.mkdir() if "." in name else made.write_text("")
    with pytest.raises(ConfigError, match=f"{name} is not a (file|folder); accepted: what a jaxformer run writes"):
        claim(config)


def test_credentials_are_not_written_down(config, monkeypatch):
    words = ["--hub-token=S3CRET", "--password", "S3CRET", "--config.data.tokenizer_file=t.json", "--chunk_tokens=8"]
    monkeypatch.setattr(sys, "argv", ["/home/me/pretrain.py", *words])
    files = ("a.txt?from=https://me:S3CRET@host", "b.txt?access_token=S3CRET")
    config = replace(config, data=replace(config.data, source="files", files=files))
    overrides = [
        "hub.api_key: None -> 'S3CRET'",
        f"data.files: [] -> {list(files)}",
        "data.tokenizer: 'bpe' -> 'bytes'",
    ]
    manifest.check_workdir(config)
    about = manifest.describe(config, overrides, "c.py:secret=S3CRET", "text")
    manifest.write_or_check(about, config)
    text = path(config).read_text()
    assert "S3CRET" not in text
    told = json.loads(text)
    assert told["command"][4:] == words[3:] and told["overrides"][2] == overrides[2]
    keep_something(config)
    manifest.check_workdir(config)  # it is still the same run
    other = replace(config, data=replace(config.data, files=("c.txt",)))
    with pytest.raises(ConfigError, match="another config"):
        manifest.check_workdir(other)


def test_a_checksum_is_of_all_but_itself():
    made = json_checksum.add_checksum({"b": [1.5, None], "a": "ü"})
    assert json_checksum.verified(json.loads(json.dumps(made))) == {"a": "ü", "b": [1.5, None]}
    assert json_checksum.verified({**made, "c": 1}) is None and json_checksum.verified([]) is None


def test_trackers_of_a_config_file_are_not_needed_to_read_its_run(config):
    """They tell others of a run, and say nothing of what it is."""
    told = manifest.describe(config, [], "config.py", "0123456789abcdef")
    told["config"]["tracking"]["trackers"] = ["mine", "wandb"]
    manifest.check_workdir(config)
    manifest.write_or_check(told, config)
    assert manifest.stored_config(config.workdir).tracking.trackers == ("wandb",)
    assert manifest.read_config(config.workdir).tracking.trackers == ()


def test_events_of_starts_that_came_to_nothing_stay_with_the_same_run(config):
    """They say how long those took; another run that takes the folder begins anew."""
    claim(config)
    event = {"kind": "event", "step": 0, "event": "started", "spent": {"total": 9.0}}
    records.append(manifest.Path(config.workdir) / "records.jsonl", event)
    claim(config)
    assert len(records.load(manifest.Path(config.workdir) / "records.jsonl")) == 1
    claim(replace(config, seed=1))
    assert os.listdir(config.workdir) == ["manifest.json"]

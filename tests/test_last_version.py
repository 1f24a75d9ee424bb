"""What the last version wrote is read today: its config files, command lines and runs, in fixtures/last_version."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxformer.config import aliases, diff, from_mapping, load, to_dict
from jaxformer.runs import manifest
from jaxformer.runs.command_line import parse_config, parser

ROOT = Path(__file__).parent.parent
KEPT = Path(__file__).parent / "fixtures" / "last_version"

# The same configs under the names of today: what an old file or command line says, and nothing else.
TODAY = {
    "gpt_tiny": {
        "model": {
            "family": "gpt", "num_layers": 4, "width": 192, "context_length": 256, "norm": "rms_norm",
            "use_bias": False, "initializer": "scaled", "dtype": "bfloat16", "attention": {"num_heads": 3},
            "positions": {"kind": "rotary"}, "feed_forward": {"activation": "swiglu"},
        },
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 4096},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 50, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 450, "global_batch_size": 12, "eval_every_steps": 150, "eval_rows": 120},
        "execution": {"steps_per_dispatch": 10},
    },
    "bert_tiny": {
        "model": {
            "family": "bert", "num_layers": 4, "width": 128, "context_length": 128, "initializer": "scaled",
            "dtype": "bfloat16", "attention": {"num_heads": 4}, "positions": {"kind": "rotary"},
        },
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 2048, "objective": "masked"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 850, "global_batch_size": 24, "eval_every_steps": 425, "eval_rows": 240},
        "execution": {"steps_per_dispatch": 10},
    },
    "rotary": {
        "workdir": "runs/rotary",
        "seed": 3,
        "model": {
            "family": "gpt", "num_layers": 2, "width": 16, "context_length": 32, "norm": "rms_norm",
            "use_bias": False, "initializer": "scaled", "dtype": "float32",
            "attention": {"num_heads": 4, "num_kv_heads": 2, "head_width": 6, "window": 9, "qk_norm": True,
                          "soft_cap": 20.0, "dropout": 0.1},
            "positions": {"kind": "rotary", "base": 500.0, "scaling": "yarn", "factor": 2.0, "original_length": 16},
            "feed_forward": {"width": 24, "activation": "geglu"},
        },
        "data": {"source": "markov", "language_tokens": 20_000, "tokenizer": "bpe", "tokenizer_vocab": 4096},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 5, "beta2": 0.98, "final_fraction": 0.02,
                      "ema_decay": 0.9},
        "train": {"steps": 20, "global_batch_size": 8, "log_every_steps": 5, "eval_every_steps": 10, "eval_rows": 8},
        "execution": {"steps_per_dispatch": 5, "gradient_accumulation_steps": 2, "remat": "full", "layers": "scan",
                      "attention": "xla"},
        "checkpoint": {"save_every_steps": 10},
        "compilation_cache": False,
    },
    "mesh": {
        "workdir": "runs/mesh",
        "model": {
            "family": "gpt", "num_layers": 2, "width": 32, "context_length": 32, "norm": "rms_norm",
            "use_bias": False, "initializer": "scaled", "dtype": "float32",
            "attention": {"num_heads": 8, "num_kv_heads": 2}, "positions": {"kind": "rotary"},
            "feed_forward": {"width": 64, "activation": "swiglu"},
        },
        "data": {"source": "markov", "language_tokens": 20_000, "tokenizer": "bpe", "tokenizer_vocab": 4096},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 5, "beta2": 0.98, "final_fraction": 0.02},
        "train": {"steps": 20, "global_batch_size": 16, "eval_every_steps": 20, "eval_rows": 16},
        "execution": {"steps_per_dispatch": 10, "gradient_accumulation_steps": 2},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True},
    },
    "sentences": {
        "workdir": "runs/sentences",
        "model": {
            "family": "bert", "num_layers": 4, "width": 128, "context_length": 128, "initializer": "scaled",
            "dtype": "bfloat16", "block": "post_norm", "dropout": 0.1, "attention": {"num_heads": 4},
            "positions": {"kind": "learned"}, "bert": {"token_types": 2, "next_sentence": True},
        },
        "data": {"source": "files", "files": ["a.txt", "books/*.xz"], "tokenizer": "bpe", "tokenizer_vocab": 2048,
                 "objective": "masked", "pairs": True},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02,
                      "clip_norm": None},
        "train": {"steps": 850, "global_batch_size": 24, "eval_every_steps": 425, "eval_rows": None},
        "execution": {"steps_per_dispatch": 10, "attention": "chunked"},
    },
}  # fmt: skip
RUN = ["gpt_tiny", "rotary"]  # a file and a command line; of the others the config is compared, and decides the rest


def old_flags(name):
    """The flags of a command of command_lines.txt."""
    parts = re.split(r"^\[(\w+)\]$", (KEPT / "command_lines.txt").read_text(), flags=re.MULTILINE)
    commands = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(commands) == set(TODAY)
    return shlex.split(commands[name].replace("FILE/", f"{KEPT}/"), comments=True)


def leaves(tree, prefix=""):
    """Dotted field -> value."""
    found = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("name", TODAY)
def test_old_spellings_give_the_config_of_todays(name):
    config = parse_config(parser("", "test"), old_flags(name)).config
    today = from_mapping({"workdir": f"runs/{name}", **TODAY[name]})
    got, wanted = leaves(to_dict(config)), leaves(to_dict(today))
    assert {field: (got[field], wanted[field]) for field in wanted if got[field] != wanted[field]} == {}
    assert config == today
    # What TODAY says stands where it says so: none of its names is an old one that would be translated as well.
    assert {field: got.get(field) for field in leaves(TODAY[name])} == leaves(TODAY[name])


def test_every_old_name_is_among_them():
    """In a command line, or in a config file."""
    flags = [re.match(r"--config\.([\w.]+)", word) for name in TODAY for word in old_flags(name)]
    files = [leaves(load(str(KEPT / f"{name}.py"))) for name in ("gpt_tiny", "bert_tiny")]
    assert set(aliases.ALIASES) - {"model.source_length"} <= {flag[1] for flag in flags if flag} | set().union(*files)


def test_the_manifest_of_a_run_gives_the_config_of_todays():
    """It holds every field, under the names of then; the vocabulary's size was filled in."""
    told = TODAY["rotary"]
    today = from_mapping({**told, "workdir": str(KEPT / "run"), "model": {**told["model"], "vocab_size": 64}})
    assert diff(to_dict(today), to_dict(manifest.read_config(KEPT / "run"))) == []


# As files they train for minutes on text; here for 20 steps on a language.
SHORT = [
    "--config.data.source=markov", "--config.data.language_tokens=20000", "--config.model.num_layers=2",
    "--config.model.width=48", "--config.model.context_length=32", "--config.optimizer.warmup_steps=5",
    "--config.train.steps=20", "--config.train.eval_every_steps=20", "--config.train.eval_rows=24",
]  # fmt: skip
EXTRA = {"gpt_tiny": SHORT}


def pretrain(flags, workdir):
    """Runs the program on one CPU device to its end; what it printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "experiments.pretrain", *flags, f"--config.workdir={workdir}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def todays_flags(name, folder):
    """A config file of TODAY's names, written into `folder`."""
    file = folder / "today.py"
    file.write_text(f"def get_config():\n    return {TODAY[name]!r}\n")
    return [f"--config={file}"]


def arrays(workdir):
    """Checksums of all arrays of the checkpoint of step 20, as they stand in it: parameters, optimizer and all."""
    return json.loads((workdir / "checkpoints" / "20" / "meta" / "metadata").read_text())["leaves"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_both_spellings_train_to_the_same_bits(name, tmp_path):
    """20 steps; every array of the last checkpoint has the same shape, dtype and checksum."""
    flags = {"old": old_flags(name), "today": todays_flags(name, tmp_path)}
    said = {how: pretrain([*flags[how], *EXTRA.get(name, [])], tmp_path / how) for how in flags}
    assert all("on 1 x cpu, into" in text for text in said.values())
    old, today = (arrays(tmp_path / how) for how in flags)
    assert any(path.startswith("params.") for path in old) and old == today


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["old", "today"])
def test_a_run_of_the_last_version_goes_on(spelling, tmp_path):
    """From step 10, where that version was killed, to the parameters that it found itself at step 20."""
    workdir = tmp_path / "run"
    shutil.copytree(KEPT / "run", workdir)
    flags = old_flags("rotary") if spelling == "old" else todays_flags("rotary", tmp_path)
    said = pretrain(flags, workdir)
    assert "\ngoing on from step 10\n" in said and "earlier version" not in said and "not valid" not in said, said
    with np.load(KEPT / "step_20.npz") as file:
        kept = {name: file[name] for name in file.files}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orbax, which would rather be told the shardings
        orbax = ocp.StandardCheckpointHandler()
        found = {item: orbax.restore(workdir / "checkpoints" / "20" / item) for item in ("params", "ema")}
    assert leaves(found).keys() == kept.keys() and len(kept) == 26
    for path, x in leaves(found).items():
        # Another CPU, or another generator of loops, adds in another order.
        np.testing.assert_allclose(x, kept[path], rtol=1e-6, atol=1e-6 * np.abs(kept[path]).max(), err_msg=path)

"""A run of an encoder-decoder on pairs, from its config by name to answers; what was killed goes on where it was."""

import shutil

import jax
import numpy as np
import pytest
from quick_runs import one_device

from jaxformer import records
from jaxformer.runs import pretrain
from jaxformer.runs.command_line import parse_config, parser

SHORT = [
    "--config.train.steps=8", "--config.train.eval_every_steps=4", "--config.train.eval_rows=32",
    "--config.optimizer.warmup_steps=2", "--config.model.num_layers=1", "--config.model.width=32",
    "--config.data.language_tokens=20_000", "--config.checkpoint.save_every_steps=4",
    "--config.execution.steps_per_dispatch=2", "--config.compilation_cache=false",
]  # fmt: skip


def run(workdir, *flags):
    given = ["--config=transduction", f"--config.workdir={workdir}", *flags]
    return pretrain.pretrain(parse_config(parser("", "test"), given))


@pytest.mark.slow
def test_what_was_killed_goes_on_bit_for_bit(tmp_path, capsys, monkeypatch):
    one_device(monkeypatch)
    flags = [*SHORT, f"--config.data.cache_dir={tmp_path / 'cache'}"]
    whole = run(tmp_path / "run", *flags)
    said = capsys.readouterr().out
    assert "encoder_decoder: 1 + 1 layers, width 32" in said and "sources of 64" in said
    assert f"generate --workdir={tmp_path / 'run'} --source=" in said
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "8")
    again = run(tmp_path / "killed", *flags)
    assert again.step == whole.step == 8 and again.evaluation["loss"] == whole.evaluation["loss"]
    both = [pretrain.open_run(tmp_path / name).params for name in ("run", "killed")]
    jax.tree.map(np.testing.assert_array_equal, *both)
    losses = [r["loss"] for r in records.load(tmp_path / "run" / "records.jsonl") if r["kind"] == "eval"]
    assert len(losses) >= 2 and losses[-1] < losses[0]

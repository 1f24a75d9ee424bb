"""`evaluate --mesh`: the numbers of one device, with a part of the parameters on each."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.config import Execution
from jaxformer.data.batches import eval_batches
from jaxformer.data.corpus import open_corpus
from jaxformer.errors import ConfigError
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import param_shardings
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.specs import abstract_params
from jaxformer.training.step import compile_eval, device_put_batch

pytestmark = pytest.mark.slow

CONFIG = """
def get_config():
    return {
        "model": {"num_layers": 2, "width": 64, "context_length": 32, "attention": {"num_heads": 4}, "vocab_size": 256},
        "data": {"source": "markov", "language_symbols": 32, "language_tokens": 20_000, "cache_dir": CACHE},
        "optimizer": {"warmup_steps": 2}, "mesh": {"data": 1, "fsdp": 2, "tensor": 2, "context": 2},
        "train": {"steps": 4, "global_batch_size": 8, "eval_every_steps": 4, "eval_rows": 8},
        "compilation_cache": False,
    }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.py").write_text(CONFIG.replace("CACHE", repr(str(folder / "cache"))))
    pretrain.pretrain(
        parse_config(parser("", "pretrain"), [str(folder / "config.py"), f"--config.workdir={folder / 'run'}"])
    )
    return folder / "run"


def evaluate(run, mesh):
    return evaluation.evaluate(run, mesh=mesh, cache_dir=str(run.parent / "cache"), log=lambda _: None)


@pytest.mark.parametrize("mesh", ["data=1,fsdp=4", "run", "data=2,tensor=4"])
def test_as_on_one_device(run, mesh):
    one, spread = evaluate(run, None), evaluate(run, mesh)
    assert one.keys() == spread.keys() and one["step"] == spread["step"] == 4
    for name in one:
        np.testing.assert_allclose(spread[name], one[name], rtol=1e-5, err_msg=name)


def test_a_schedule_of_stages_is_the_run_s_alone(run, monkeypatch):
    """Two stages of a layer each evaluate what would have been trained in two parts of each stage."""
    config = pretrain.manifest.read_config(run)
    how = replace(config.execution, pipeline_repeats=2, remat="full", gradient_accumulation_steps=2)
    staged = replace(config, execution=how)
    monkeypatch.setattr(evaluation.manifest, "read_config", lambda workdir: staged)
    one = evaluate(run, None)
    np.testing.assert_allclose(evaluate(run, "stage=2,data=4")["loss"], one["loss"], rtol=1e-5)


def test_no_device_holds_all_parameters(run):
    """What XLA says that the evaluation's arguments take: a quarter, but for norms and biases."""
    config = pretrain.manifest.read_config(run)
    sizes = []
    for text in (None, "data=1,fsdp=4"):
        mesh = pretrain.mesh_of(run, text)
        model = make_model(config.model, config.loss, Execution())
        shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract_params(model.specs), param_shardings(model.specs, mesh),
        )  # fmt: skip
        batch = eval_batches(*corpus(config), config.data, rows=8, context_length=32)[0]
        with jax.set_mesh(mesh):
            lowered = compile_eval(model, mesh).lower(shapes, device_put_batch(batch, mesh), None)
            sizes.append(lowered.compile().memory_analysis().argument_size_in_bytes)
    assert sizes[1] < 0.28 * sizes[0]


def corpus(config):
    found = open_corpus(config.data, progress=False)
    return found.validation, found.tokenizer


@pytest.mark.parametrize(("mesh", "line"), [
    ("fspd=4", "--mesh: fspd: no such field; did you mean fsdp"),
    ("fsdp", "--mesh: fsdp: '' is "),
    ("data=1,fsdp=64", "--mesh: data 1 x fsdp 64 x "),
    ("data=1,fsdp=3", "global_batch_size: 8"),
])  # fmt: skip
def test_a_mesh_that_cannot_be_is_one_line(run, mesh, line):
    with pytest.raises(ConfigError, match=line):
        evaluate(run, mesh)


def test_text_from_a_mesh(run):
    """By the program, in a process of its own, because the mesh stays in use there."""
    words = [sys.executable, "-m", "jaxformer", "generate", f"--workdir={run}", "--prompt=", "--max-new-tokens=12"]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": ""}
    texts = [
        subprocess.run(
            [*words, *more], env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
        )
        for more in ([], ["--mesh=data=1,fsdp=2,tensor=2"])
    ]
    assert len({done.stdout for done in texts}) == 1 and texts[0].stdout.strip()

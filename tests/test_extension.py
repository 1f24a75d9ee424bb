"""What a config file brings by itself works in every program: a mixer, positions, a family, an objective with a source.

The files are in tests/extensions; CONTRIBUTING.md says how to write one. Nothing in the package knows them.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_runs import one_device

from jaxformer import AttentionConfig, Context, Execution, LossConfig, block, decoding, from_mapping, masks
from jaxformer.config import MeshConfig, PositionsConfig, load, registry
from jaxformer.data.objectives import OBJECTIVES
from jaxformer.data.sources import SOURCES
from jaxformer.errors import ConfigError
from jaxformer.functional.block import unstack
from jaxformer.functional.layer import norm
from jaxformer.functional.position_encodings import POSITIONS
from jaxformer.functional.sublayers import MIXERS
from jaxformer.models import gpt
from jaxformer.models.families import FAMILIES
from jaxformer.models.flops import count_parameters, flops_per_token
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan import measures, topology
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import Parsed, parse_config, parser
from jaxformer.scaling.ladder import LadderConfig, size_model
from jaxformer.specs import abstract_params, init_params
from jaxformer.training.gradients import gradients
from jaxformer.types import Batch

FOLDER = Path(__file__).parent / "extensions"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
TABLES = (MIXERS, POSITIONS, FAMILIES, OBJECTIVES, SOURCES, AttentionConfig.registered, PositionsConfig.registered,
          registry.FAMILIES, registry.OBJECTIVES, registry.SOURCES)  # fmt: skip
SMALL = [
    "--config.model.num_layers=2", "--config.model.width=32", "--config.model.context_length=32",
    "--config.train.global_batch_size=8", "--config.train.steps=6", "--config.train.eval_every_steps=6",
    "--config.execution.steps_per_dispatch=1", "--config.optimizer.warmup_steps=1", "--config.compilation_cache=false",
    "--config.checkpoint.save_every_steps=2", "--config.train.eval_rows=16",
]  # fmt: skip
MARKOV = ["--config.data.source=markov", "--config.data.language_tokens=4000"]


@pytest.fixture(autouse=True)
def tables_as_they_were():
    before = [dict(table) for table in TABLES]
    yield
    for table, entries in zip(TABLES, before, strict=True):
        for name in set(table) - set(entries):
            dict.pop(table, name)


def words(name, folder):
    own = [] if name == "replaced" else MARKOV
    places = [f"--config.workdir={folder / 'run'}", f"--config.data.cache_dir={folder / 'cache'}"]
    return [f"--config={FILES[name]}", *SMALL, *own, *places]


def parsed(name, folder) -> Parsed:
    return parse_config(parser("", "pretrain"), words(name, folder))


def test_they_are_short():
    lines = {name: sum(bool(line.strip()) for line in path.read_text().splitlines()) for name, path in FILES.items()}
    assert len(lines) == 4 and max(lines.values()) < 60


def made(cfg):
    """Parameters of a GPT."""
    return jax.jit(lambda key: init_params(gpt.specs(cfg), key))(jax.random.key(0))


def drawn(shape, size=20):
    return np.random.default_rng(0).integers(0, size, shape).astype(np.int32)


def test_a_run_of_a_kind_that_is_not_here_is_one_line(tmp_path, monkeypatch):
    """Which says what is needed."""
    workdir, began = tmp_path / "run", pretrain.loop.Result("interrupted", 0, None, None, 0.0)
    monkeypatch.setattr(pretrain.loop, "train", lambda *_, **__: began)
    pretrain.pretrain(parsed("gated_conv", tmp_path))
    AttentionConfig.registered.pop("gated_conv")
    with pytest.raises(
        ConfigError, match=r"'gated_conv' is not one of softmax, alignment, [a-z_, ]+$"
    ):  # the file was given
        pretrain.open_run(workdir)
    sys.modules.pop("config_file_gated_conv")
    with pytest.raises(
        ConfigError,
        match=r"'gated_conv' is not one of softmax, alignment, [a-z_, ]+; if .*gated_conv.py brings it, give",
    ):
        pretrain.open_run(workdir)


def check_frozen(asked, state):
    """What is frozen has the values it began with, what is not has others, and the loss sees the frozen tree."""
    model = make_model(
        replace(asked.config.model, vocab_size=64), asked.config.loss, freeze=asked.config.optimizer.freeze
    )
    before = jax.jit(model.init)(jax.random.split(jax.random.key(asked.config.seed))[0])["embedding"]
    after = state.params["embedding"]
    np.testing.assert_array_equal(before["positions"], after["positions"])
    assert not np.array_equal(before["tokens"], after["tokens"])
    assert state.frozen["reservoir"].shape == (64, 32)
    batch = Batch(*(jnp.ones((1, 32), int), jnp.ones((1, 32), int), jnp.ones((1, 32))), *(jnp.zeros((1, 32), int),) * 2)
    loss = jax.jit(lambda params, frozen: model.loss(params, batch, None, frozen)[0]["loss"][0])
    params, seen = jax.device_get((state.params, state.frozen))
    assert float(loss(params, seen)) != float(loss(params, jax.tree.map(np.zeros_like, seen)))


# "optimized": the frozen positions are compared bit for bit with those that a program of another shape makes.
MARKS = {"reservoir": pytest.mark.optimized}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in FILES])
def test_a_run_trains_goes_on_and_is_evaluated(name, tmp_path, monkeypatch):
    one_device(monkeypatch)
    asked = parsed(name, tmp_path)
    first = pretrain.pretrain(asked)
    assert first.step == 6 and np.isfinite(first.evaluation["loss"])
    found = evaluation.evaluate(tmp_path / "run", cache_dir=str(tmp_path / "cache"), log=lambda _: None)
    assert found["loss"] == pytest.approx(first.evaluation["loss"], rel=1e-5)
    assert pretrain.pretrain(asked).step == 6  # there is nothing more to do
    assert (first.state.frozen is not None) == (name == "reservoir")
    if name == "reservoir":
        check_frozen(asked, first.state)
    last = tmp_path / "run" / "checkpoints" / "6"
    whole = leaves(last)
    shutil.rmtree(last)
    pretrain.pretrain(asked)  # goes on from the one before
    assert leaves(last) == whole


def leaves(step):
    """Checksums of all arrays of a checkpoint."""
    return json.loads((step / "meta" / "metadata").read_text())["leaves"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_plan_counts_it(name, tmp_path):
    plan = measures.make_plan(parsed(name, tmp_path).config, topology.make("cpu:1"))
    assert plan["memory"]["activations"] > 0
    assert 0.5 < plan["flops"]["useful"] <= 1.5


def test_operations_of_the_mixer_are_those_that_xla_counts():
    load(str(FILES["gated_conv"]))
    sizes = {"num_layers": 2, "width": 512, "context_length": 128, "vocab_size": 4096}  # norms and sums are little here
    cfg = from_mapping({"model": {"attention": "gated_conv", "positions": "none", **sizes}}).model
    model = make_model(cfg, LossConfig(chunk_tokens=256))
    ids, weights = jax.ShapeDtypeStruct((2, 128), jnp.int32), jax.ShapeDtypeStruct((2, 128), jnp.float32)

    def loss(params, batch):
        return model.loss(params, batch, None)[0]["loss"][0]

    lowered = jax.jit(jax.grad(loss)).lower(abstract_params(model.specs), Batch(ids, ids, weights, ids, ids))
    counted = lowered.cost_analysis()["flops"] / 256
    assert counted == pytest.approx(flops_per_token(cfg).training, rel=0.02)


def check_decoding(cfg, params, tokens, lengths, steps):
    """Prefill and then a step for each token give the logits of the full forward pass."""
    size = tokens.shape[1]

    @jax.jit
    def begin(params):
        hidden, cache = decoding.prefill(params, tokens, jnp.asarray(lengths), cfg, size)
        return gpt.apply(params, tokens, cfg), decoding.logits(params, hidden), cache

    @jax.jit
    def add(params, token, cache):
        hidden, cache = decoding.step(params, token, cfg, cache)
        return decoding.logits(params, hidden), cache

    full, got, cache = begin(params)
    rows = np.arange(len(tokens))
    for step in range(steps):
        np.testing.assert_allclose(got, np.asarray(full)[rows, lengths + step - 1], rtol=1e-4, atol=1e-5)
        got, cache = add(params, tokens[rows, lengths + step], cache)


@pytest.mark.slow
def test_decoding_with_its_cache_is_the_full_forward_pass():
    load(str(FILES["gated_conv"]))
    cfg = from_mapping({"model": {"attention": "gated_conv", "positions": "none", "width": 32, "vocab_size": 20}}).model
    params = made(cfg)
    # lengths also shorter than what the convolution reaches
    check_decoding(cfg, params, drawn((3, 12)), np.array([5, 1, 3]), steps=7)
    out = decoding.generate(params, [[1, 2, 3], [4]], cfg, rng=jax.random.key(1), max_new_tokens=5)
    assert out.lengths.tolist() == [5, 5]


def test_the_mixer_sees_no_other_document():
    load(str(FILES["gated_conv"]))
    cfg = from_mapping({"model": {"attention": "gated_conv", "positions": "none", "width": 32, "vocab_size": 20}}).model
    params, tokens = made(cfg), drawn((1, 10))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 2]])
    apply = jax.jit(lambda tokens: gpt.apply(params, tokens, cfg, segments=segments))
    changed = tokens.copy()
    changed[:, :3] = (changed[:, :3] + 1) % 20
    one, other = np.asarray(apply(tokens)), np.asarray(apply(changed))
    np.testing.assert_array_equal(one[:, 3:], other[:, 3:])
    assert not np.array_equal(one[:, :3], other[:, :3])


def learned(**more):
    load(str(FILES["learned_alibi"]))
    sizes = {"num_layers": 2, "width": 32, "vocab_size": 20, "context_length": 16, "attention": {"num_heads": 4}}
    return from_mapping({"model": {**sizes, "positions": "learned_alibi", **more}}).model


@pytest.mark.slow
def test_positions_with_parameters_in_every_layer():
    """With the slopes of ALiBi they are ALiBi, in every implementation and on a mesh that shards rows; they learn."""
    cfg = learned()
    params = made(cfg)
    slopes = params["blocks"]["attention"]["positions"]["slopes"]
    alibi = learned(positions="alibi")
    assert slopes.shape == (2, 4) and count_parameters(cfg).total == count_parameters(alibi).total + 8
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (8, 16)))
    rows = {"segments": jnp.asarray(np.random.default_rng(1).integers(1, 3, (8, 16))).sort(axis=1)}

    def total(params, cfg, implementation):
        out = gpt.apply(params, tokens, cfg, execution=Execution(attention=implementation), **rows)
        return jnp.sum(jnp.sin(out)), out

    grad = jax.jit(jax.grad(total, has_aux=True), static_argnums=(1, 2))
    wanted, out = grad(params, alibi, "xla")
    found = {name: grad(params, cfg, name) for name in ("xla", "chunked")}
    with jax.set_mesh(make_mesh(MeshConfig(2, 1, 2, 2), jax.devices()[:8])):
        found["ring"] = jax.device_get(
            jax.jit(jax.grad(total, has_aux=True), static_argnums=(1, 2))(params, cfg, "auto")
        )
    for grads, logits in found.values():
        np.testing.assert_allclose(logits, out, rtol=1e-4, atol=1e-5)
        of_slopes = grads["blocks"]["attention"]["positions"]["slopes"]
        np.testing.assert_allclose(
            of_slopes, found["xla"][0]["blocks"]["attention"]["positions"]["slopes"], rtol=1e-3, atol=1e-4
        )
        assert (np.abs(of_slopes) > 1e-3).all()
        np.testing.assert_allclose(grads["embedding"]["tokens"], wanted["embedding"]["tokens"], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_decoding_with_positions_of_every_layer():
    cfg = learned()
    params = made(cfg)
    slopes = params["blocks"]["attention"]["positions"]["slopes"]
    params["blocks"]["attention"]["positions"]["slopes"] = np.asarray(slopes) * np.float32([[0.5], [3.0]])
    check_decoding(cfg, params, drawn((2, 12)), np.array([5, 2]), steps=6)


def test_positions_that_no_kernel_can_do_and_those_without_functions():
    with pytest.raises(ConfigError, match="splash cannot do a bias"):
        make_model(learned(context_length=128, width=256), LossConfig(), Execution(attention="splash"))
    dict.pop(POSITIONS, "learned_alibi")
    cfg = from_mapping({"model": {"positions": "learned_alibi", "vocab_size": 20}}).model
    with pytest.raises(
        ConfigError, match=r"model.positions.kind: 'learned_alibi' has no functions; accepted: learned, "
    ):
        make_model(cfg, LossConfig())


def test_freezing_what_is_not_there_is_one_line():
    line = (
        "^config.optimizer.freeze: 'embeding' names no parameters; accepted: embedding, blocks, final_norm, or a path"
    )
    with pytest.raises(ConfigError, match=line):
        make_model(from_mapping({"model": {"vocab_size": 64}}).model, LossConfig(), freeze=("embeding",))


def test_what_stands_in_a_table_is_not_replaced_without_a_word():
    """Not even by an entry that begins with the same functions."""
    with pytest.raises(ConfigError, match=r"^config.model.family: 'gpt' is taken by jaxformer.models.gpt.specs$"):
        FAMILIES["gpt"] = FAMILIES["gpt"]._replace(loss=lambda *arguments: None)
    with pytest.raises(ConfigError, match=r"^config.model.attention.kind: 'softmax' is taken by jaxformer"):
        MIXERS["softmax"] = MIXERS["softmax"]._replace(cost=lambda *arguments: None)
    FAMILIES["gpt"] = FAMILIES["gpt"]  # as a config file does that is read twice


def test_a_kind_without_functions_is_one_line():
    load(str(FILES["gated_conv"]))
    dict.pop(MIXERS, "gated_conv")
    cfg = from_mapping({"model": {"attention": "gated_conv", "positions": "none", "vocab_size": 64}}).model
    line = r"^config.model.attention.kind: 'gated_conv' has no functions; accepted: softmax, lstm, gru, alignment, .*"
    for use in (count_parameters, gpt.specs):
        with pytest.raises(ConfigError, match=line):
            use(cfg)


def test_it_grows_on_the_ladder():
    load(str(FILES["gated_conv"]))
    cfg = from_mapping({"model": {"attention": "gated_conv", "positions": "none", "vocab_size": 64}}).model
    small, large = (size_model(cfg, width, LadderConfig(tokens=(1000,))) for width in (64, 128))
    assert small.attention == large.attention == cfg.attention and (small.width, large.width) == (64, 128)
    assert count_parameters(large).non_embedding > 4 * count_parameters(small).non_embedding


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_terms_of_a_sublayer_are_a_part_of_the_objective(layers):
    """A mean over tokens and layers; the same by scan or unrolled, and in micro-batches."""
    load(str(FILES["gated_conv"]))
    plain = MIXERS["gated_conv"]

    def apply(params, x, cfg, context):
        out, cache, _ = plain.apply(params, x, cfg, context)
        return out, cache, {"energy": jnp.sum(jnp.square(out))}

    dict.__setitem__(MIXERS, "gated_conv", plain._replace(apply=apply, terms=("energy",)))
    cfg = from_mapping(
        {"model": {"attention": "gated_conv", "positions": "none", "width": 16, "num_layers": 3, "vocab_size": 20}}
    ).model
    model, rng = make_model(cfg, LossConfig(), Execution(layers=layers)), np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 20, (4, 8)))
    batch = Batch(ids, ids, jnp.ones(ids.shape), ids * 0 + jnp.arange(8)[None], ids * 0)
    params = init_params(model.specs, jax.random.key(0))
    total, weight = jax.jit(lambda params: model.loss(params, batch, None)[0]["energy"])(params)
    assert float(weight) == float(model.weights(batch)["energy"]) == 4 * 8 * 3

    mixed, x = 0.0, params["embedding"]["tokens"][ids]

    @jax.jit
    def step(layer, x):
        read, seen = norm(layer["attention_norm"], x, cfg), Context(mask=masks.causal())
        return jnp.sum(jnp.square(plain.apply(layer["attention"], read, cfg, seen)[0])), block(layer, x, cfg, seen)[0]

    for layer in unstack(params["blocks"], 3):
        energy, x = step(layer, x)
        mixed += float(energy)
    assert float(total) == pytest.approx(mixed, rel=1e-5)

    whole, parts = (
        jax.jit(functools.partial(gradients, model=model, micro_batches=n))(params, batch, jax.random.key(0))
        for n in (1, 2)
    )
    assert float(whole[0]) == pytest.approx(float(parts[0]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), whole[1], parts[1])


def program(name, *arguments, **options):
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return subprocess.Popen(command, cwd=FOLDER.parents[1], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=environment, **options)  # fmt: skip


def ended(process, seconds):
    """Its exit code, its pipes closed."""
    process.communicate(timeout=seconds)
    return process.returncode


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_bits(tmp_path):
    """With the programs; what the other files bring goes on in the test of their runs above."""
    name, more = "gated_conv", [f"--config.{field}" for field in (
        "train.steps=200", "train.eval_every_steps=200", "checkpoint.save_every_steps=20",
    )]  # fmt: skip
    whole, cut, last = tmp_path / "whole", tmp_path / "cut", "run/checkpoints/200"
    for folder in (whole, cut):
        folder.mkdir()
    assert ended(program("pretrain", *words(name, whole), *more), 300) == 0
    killed = program("pretrain", *words(name, cut), *more)
    until = time.monotonic() + 120
    while not (cut / "run/checkpoints/20").exists() and time.monotonic() < until:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    ended(killed, 30)
    assert not (cut / last).exists()
    assert ended(program("pretrain", *words(name, cut), *more), 300) == 0
    assert leaves(cut / last) == leaves(whole / last)
    flags = [f"--workdir={cut / 'run'}", f"--config={FILES[name]}"]
    text, _ = (made := program("generate", *flags, "--prompt=!", "--max-new-tokens=8")).communicate()
    assert made.returncode == 0 and text.startswith("!")
    assert ended(program("evaluate", *flags, "--json", f"--cache-dir={cut / 'cache'}"), 120) == 0

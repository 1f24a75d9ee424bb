"""Sparse kinds of attention in a model: who sees whom, decoding, packed rows, meshes, counts, refusals, and a run."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import decode, params_of

from jaxformer import masks
from jaxformer.config import Execution, MeshConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.layer import Context
from jaxformer.functional.sparse_layer import document_ends
from jaxformer.functional.sublayers import MIXERS
from jaxformer.kernels.attention import block_tables
from jaxformer.models import gpt
from jaxformer.models.attention_support import unsupported_by
from jaxformer.models.flops import flops_per_token
from jaxformer.parallel.mesh import check_context, make_mesh
from jaxformer.plan import measures, topology
from jaxformer.runs import pretrain
from jaxformer.runs.command_line import parse_config, parser

KINDS = {
    "longformer": {"attention_window": 6, "global_tokens": 2},
    "bigbird": {"block": 4, "random_blocks": 1, "seed": 3},
    "strided": {"stride": 4},
    "fixed": {"block": 4, "last": 1},
    "dilated": {"size": 2, "step": 3},
}
T = 16
EACH = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "longformer" else [pytest.mark.slow]) for kind in KINDS]
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_tables, "SMALLEST", 2)
    monkeypatch.setattr(block_tables, "LARGEST", 4)


def config(kind, **more):
    of = {"kind": kind, "num_heads": 2, "num_kv_heads": 1, **KINDS[kind]}
    given = {"num_layers": 2, "width": 16, "vocab_size": 20, "context_length": T, "positions": "rotary", **more}
    return ModelConfig(attention=of, **given)


def rule(kind, cfg, segments):
    """[T, T] bool by NumPy: which tokens a token sees by one of its heads."""
    t, s = np.arange(T)[:, None], np.arange(T)[None]
    ends = np.zeros(T, bool)
    for number in np.unique(segments):
        own = np.flatnonzero(segments == number)
        ends[own[: {"longformer": 2, "bigbird": 4}.get(kind, 0)]] = True
        ends[own[::-1][: 4 if kind == "bigbird" and not cfg.causal else 0]] = True
    pairs = {
        "longformer": abs(t - s) <= 3,
        "bigbird": abs(t // 4 - s // 4) <= 1,
        "strided": (abs(t - s) < 4) | ((t - s) % 4 == 0),
        "fixed": (t // 4 == s // 4) | (s % 4 == 3),
        "dilated": (abs(t - s) < 6) & ((t - s) % 3 == 0),
    }[kind]
    if kind == "bigbird":
        tables = cfg.attention.patterns(T, cfg.causal)[1].table
        pairs = pairs | [[any(j // 4 in table[i // 4] for table in tables) for j in range(T)] for i in range(T)]
    pairs = (pairs | ends[:, None] | ends[None]) & (segments[:, None] == segments[None])
    return pairs & (s <= t) if cfg.causal else pairs


@EACH
@pytest.mark.parametrize("family", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_token_reaches_those_of_its_pattern_alone(kind, family):
    """The gradient of an output by an input is exactly 0 unless the pattern has that pair; packed rows by both
    implementations, single documents by the one in blocks."""
    cfg = config(kind, family=family, num_layers=1)
    mixer = MIXERS[kind]
    params = params_of(mixer.specs(cfg))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, T, 16)), jnp.float32)
    segments = np.array([0] * 7 + [1] * 6 + [2] * 3)
    alone = masks.Mask(causal=cfg.causal)
    packed = alone & masks.segments(jnp.array(segments)[None])

    def outputs(x, mask, name):
        out = mixer.apply(params, x, cfg, Context(mask, execution=Execution(attention=name)))[0][0]
        return out @ jnp.arange(1.0, 17.0), out

    @jax.jit
    def all_three(x):
        cases = ((packed, "xla"), (packed, "chunked"), (alone, "chunked"))
        return [jax.jacrev(functools.partial(outputs, mask=mask, name=name), has_aux=True)(x) for mask, name in cases]

    found = jax.device_get(all_three(x))
    for (gradient, _), numbers in zip(found, (segments, segments, np.zeros(T, int)), strict=True):
        np.testing.assert_array_equal(np.any(gradient[:, 0] != 0, axis=-1), rule(kind, cfg, numbers))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found[:2])


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False], ids=["given", "following"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_is_the_full_forward_pass(kind, given):
    """Prompts of one token, and longer ones than the global tokens; sizes given, or following from the rows' length."""
    cfg = config(kind) if given else replace(config(kind), attention={"kind": kind, "num_heads": 2})
    params = params_of(gpt.specs(cfg))
    tokens, lengths = np.random.default_rng(0).integers(0, 20, (3, T)), np.array([5, 1, 9])
    full, found, _ = decode(params, tokens, lengths, cfg, steps=7)
    for step, logits in enumerate(found):
        np.testing.assert_allclose(logits, full[np.arange(3), lengths + step - 1], rtol=2e-4, atol=2e-5)


def test_ends_of_documents():
    segments = np.array([[3, 3, 3, 3, 3, 0, 0, 9], [1, 1, 1, 1, 1, 1, 1, 1]])
    found = np.asarray(document_ends(jnp.array(segments), 2, 1)).astype(int)
    assert found.tolist() == [[1, 1, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longformer", "bigbird", "strided"])
def test_on_eight_devices(kind):
    """Rows and heads divided, in rows of several documents."""
    cfg = config(kind, num_layers=1)
    params = params_of(gpt.specs(cfg))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (4, T)))
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (4, T))))

    def loss(params):
        out = gpt.apply(params, tokens, cfg, segments=segments, execution=Execution(attention="chunked"))
        return jnp.sum(jnp.sin(out))

    alone = jax.jit(jax.value_and_grad(loss))(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        spread = jax.jit(jax.value_and_grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), alone, spread)


@pytest.mark.slow
def test_dropout_draws_for_window_and_global_tokens_apart():
    cfg = config("longformer", num_layers=1)
    cfg = ModelConfig(**{**vars(cfg), "attention": {"kind": "longformer", **vars(cfg.attention), "dropout": 0.5}})
    mixer = MIXERS["longformer"]
    params, x = params_of(mixer.specs(cfg)), jnp.ones((1, T, 16))
    for name in ("xla", "chunked"):
        run = jax.jit(lambda rng, name=name: mixer.apply(
            params, x, cfg, Context(masks.causal(), rng=rng, execution=Execution(attention=name)))[0])  # fmt: skip
        first, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert np.any(first != other)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_and_kernels(kind):
    """Scores count by the keys that a token sees; of the platforms' kernels flash_gpu has patterns; rows are whole."""
    sizes = {"width": 128, "context_length": 1024}
    dense = ModelConfig(**{**vars(config(kind, **sizes)), "attention": {"num_heads": 2, "num_kv_heads": 1}})
    cfg = config(kind, **sizes)
    assert MIXERS[kind].cost(cfg, 1024, Execution()).scores < MIXERS["softmax"].cost(dense, 1024, Execution()).scores
    assert (flops_per_token(cfg) < flops_per_token(dense)) or kind == "longformer"  # which has more projections
    ends = kind in ("longformer", "bigbird")
    assert (unsupported_by("splash", cfg) or "").startswith("global tokens") == ends
    blocks = "random blocks of 4 tokens (multiples of 16)" if kind == "bigbird" else None
    assert unsupported_by("flash_gpu", cfg) == blocks
    with pytest.raises(ConfigError, match=rf"^config.mesh.context: 2; model.attention.kind={kind} needs whole rows; "):
        check_context(cfg, make_mesh(MeshConfig(data=4, context=2)))


def words_of(kind, tmp_path):
    """One override of gpt_tiny, and a small run."""
    return [
        "--config=configs/gpt_tiny.py", f"--config.model.attention={kind}",
        *(f"--config.model.attention.{name}={value}" for name, value in KINDS[kind].items()),
        "--config.model.num_layers=1", "--config.model.width=64", "--config.train.steps=50",
        "--config.model.attention.num_heads=2", "--config.data.source=markov", "--config.data.language_tokens=40000",
        "--config.compilation_cache=false", "--config.model.context_length=64", "--config.train.eval_rows=64",
        "--config.train.global_batch_size=16", "--config.optimizer.learning_rate=0.02",
        f"--config.workdir={tmp_path / 'run'}", f"--config.data.cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_override(kind, tmp_path):
    found = parse_config(parser("", "pretrain"), words_of(kind, tmp_path)).config.model.attention
    assert {name: getattr(found, name) for name in KINDS[kind]} == KINDS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longformer", "bigbird"])
def test_a_run(kind, tmp_path):
    """It learns more than how often each token comes. The other kinds are patterns alone, as BigBird is."""
    parsed = parse_config(parser("", "pretrain"), words_of(kind, tmp_path))
    found = pretrain.pretrain(parsed)
    assert found.step == 50 and found.evaluation["loss"] < 0.9 * np.log(64)
    assert measures.make_plan(parsed.config, topology.make("cpu:1"))["memory"]["activations"] > 0

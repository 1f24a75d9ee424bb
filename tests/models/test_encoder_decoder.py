"""Encoder-decoder: a target sees its own source and nothing beyond; logits and loss equal float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from flat_config import changed, model_config
from model_cases import float64, random_params

from jaxformer.config import Execution, LossConfig, MeshConfig, encoder_of
from jaxformer.models import encoder_decoder, gpt
from jaxformer.modules import Transformer
from jaxformer.parallel.mesh import make_mesh
from jaxformer.types import Batch

B, T, S = 2, 8, 12
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 2, 3]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 0]])
SOURCE_SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3]])
SOURCE_POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0], [0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
TOKENS, SOURCE = (np.random.default_rng(3).integers(0, 20, (B, n)) for n in (T, S))
PACKED = {
    "positions": jnp.array(POSITIONS), "segments": jnp.array(SEGMENTS), "source_positions": jnp.array(SOURCE_POSITIONS),
    "source_segments": jnp.array(SOURCE_SEGMENTS),
}  # fmt: skip
OWN = SEGMENTS[:, :, None] == SOURCE_SEGMENTS[:, None, :]  # [B, T, S]


def config(**fields):
    made = {"num_layers": 2, "width": 16, "num_heads": 4, "context_length": T, "vocab_size": 20}
    encoder = {"num_layers": 1, "source_length": S}
    return model_config(**{**made, "family": "encoder_decoder", "encoder": encoder, **fields})


def unscaled(**fields):
    """A config whose scores are not divided by anything, as T5's."""
    cfg = config(**fields)
    return dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, scale=1.0))


KINDS = {
    "2017": config(block="post_norm", positions="sinusoidal", activation="relu"),
    "t5_1_0": unscaled(norm="rms_norm", use_bias=False, positions="t5", activation="relu", scale_output=True),
    "t5_1_1": config(norm="rms_norm", use_bias=False, positions="t5", activation="geglu_tanh", tie_embeddings=False),
    "bart": config(block="post_norm", embedding_norm=True),
    "rotary": config(block="parallel", positions="rotary", num_kv_heads=2, qk_norm=True, attention_soft_cap=3.0),
}  # fmt: skip


def reference_logits(params, cfg):
    params = float64(params)
    own, stack = encoder_decoder.encoder_params(params), encoder_of(cfg)
    inside = {side: reference.allowed(len(s[0]), len(s[0]), causal=side == "target", segments=s)
              for side, s in (("source", SOURCE_SEGMENTS), ("target", SEGMENTS))}  # fmt: skip
    states = reference.hidden(own, SOURCE, stack, SOURCE_POSITIONS, inside["source"], **extras(own, stack))
    source = (states, OWN[:, None])
    x = reference.hidden(params, TOKENS, cfg, POSITIONS, inside["target"], source=source, **extras(params, cfg))
    x = x * cfg.width**-0.5 if cfg.scale_output else x
    return x @ params.get("head", {"table": params["embedding"]["tokens"]})["table"].T


def extras(params, cfg):
    if cfg.positions.kind == "rotary":
        return {"frequencies": 10_000.0 ** (-np.arange(0, cfg.head_size, 2) / cfg.head_size)}
    if cfg.positions.kind != "t5":
        return {}
    places = range(cfg.context_length)
    buckets = [[reference.t5_bucket(s - t, not cfg.causal) for s in places] for t in places]
    return {"bias": np.moveaxis(params["embedding"]["t5"][np.array(buckets)], -1, 0)}


def logits(params, cfg, **fields):
    return encoder_decoder.apply(params, TOKENS, cfg, source_tokens=SOURCE, **{**PACKED, **fields})


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in ("2017", "rotary", "t5_1_0") else ()) for kind in KINDS],
)
def test_logits_equal_the_reference(kind):
    cfg = KINDS[kind]
    params = random_params(encoder_decoder.specs(cfg))
    got = jax.jit(lambda p: logits(p, cfg))(params)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference_logits(params, cfg), rtol=2e-4, atol=2e-4)


def felt(cfg, mesh=None, **fields):
    """[B, T, B, T + S] bool: which tokens of targets and sources the logits of each position depend on."""
    cfg = changed(cfg, vocab_size=-(-B * (T + S) // 8) * 8, tie_embeddings=False)
    params = random_params(encoder_decoder.specs(cfg))
    tokens = np.arange(B * (T + S)).reshape(B, T + S)  # every token has a row of the table of its own
    weights = np.random.default_rng(7).normal(size=cfg.vocab_size).astype(np.float32)

    @jax.jit
    def by_row(params, table):
        def summed(table):
            p = params | {"embedding": params["embedding"] | {"tokens": table}}
            found = encoder_decoder.apply(p, tokens[:, :T], cfg, source_tokens=tokens[:, T:], **PACKED, **fields)
            return found @ weights

        _, backward = jax.vjp(summed, table)
        each = jnp.asarray(np.eye(B * T, dtype=np.float32).reshape(B * T, B, T))
        return jax.lax.map(lambda c: backward(c)[0], each)

    table = params["embedding"]["tokens"]
    if mesh is None:
        found = by_row(params, table)
    else:
        with jax.set_mesh(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))])):
            found = by_row(params, table)
    found = np.asarray(found)[:, : B * (T + S)]
    assert np.isfinite(found).all()
    return (found != 0).any(axis=-1).reshape(B, T, B, T + S)


def allowed():
    """What `felt` should be: the earlier tokens of a target's segment, and the source of that number."""
    causal = reference.allowed(T, T, causal=True, segments=SEGMENTS)[:, 0]
    inside = np.concatenate([causal, OWN], axis=2)
    return np.einsum("btx,bc->btcx", inside, np.eye(B, dtype=bool))


@pytest.mark.slow
@pytest.mark.parametrize("kind, attention", [
    ("bart", "xla"), ("t5_1_1", "chunked"), ("rotary", "xla"),
])  # fmt: skip
def test_exactly_the_own_source_and_the_earlier_target_are_felt(kind, attention):
    np.testing.assert_array_equal(felt(KINDS[kind], execution=Execution(attention=attention)), allowed())


@pytest.mark.slow
@pytest.mark.parametrize("kind, mesh, attention", [
    ("2017", (1, 1, 1, 2), "xla"), ("t5_1_1", (1, 1, 1, 2), "chunked"), ("bart", (1, 1, 1, 2), "xla"),
    ("2017", (1, 2, 2, 2), "chunked"), ("t5_1_1", (1, 2, 2, 2), "xla"), ("bart", (1, 2, 2, 2), "chunked"),
    ("2017", (2, 1, 4, 1), "xla"), ("t5_1_1", (2, 1, 4, 1), "chunked"), ("bart", (2, 1, 4, 1), "xla"),
])  # fmt: skip
def test_so_on_every_mesh(kind, mesh, attention):
    """Every two of the three options meet."""
    execution = Execution(attention=attention, layers="scan")
    np.testing.assert_array_equal(felt(KINDS[kind], mesh, execution=execution), allowed())


@pytest.mark.parametrize("side", ["source", pytest.param("target", marks=pytest.mark.slow)])
def test_another_pairs_tokens_change_nothing_bitwise(side):
    cfg = KINDS["t5_1_1"]
    params = jax.tree.map(jnp.array, random_params(encoder_decoder.specs(cfg)))
    apply = jax.jit(lambda t, s: encoder_decoder.apply(params, t, cfg, source_tokens=s, **PACKED))
    before = np.asarray(apply(TOKENS, SOURCE))
    other = {"source": SOURCE, "target": TOKENS}
    of = {"source": SOURCE_SEGMENTS, "target": SEGMENTS}[side]
    other[side] = np.where(of == 1, other[side], (other[side] + 7) % 20)
    after = np.asarray(apply(other["target"], other["source"]))
    np.testing.assert_array_equal(before[SEGMENTS == 1], after[SEGMENTS == 1])
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("kind", ["2017", pytest.param("t5_1_0", marks=pytest.mark.slow)])
def test_a_packed_pair_is_the_pair_alone(kind):
    cfg = KINDS[kind]
    params = random_params(encoder_decoder.specs(cfg))
    packed = jax.jit(lambda p: logits(p, cfg))(params)
    alone = jax.jit(lambda p: encoder_decoder.apply(p, TOKENS[:1, 3:7], cfg, source_tokens=SOURCE[:1, 5:10]))(params)
    np.testing.assert_allclose(packed[0, 3:7], alone[0], rtol=1e-4, atol=1e-4)


def make_batch():
    targets = np.roll(TOKENS, -1, axis=1)
    weights = np.where(SEGMENTS > 0, 0.5 + np.arange(T) / T, 0)
    arrays = (TOKENS, targets, weights.astype(np.float32), POSITIONS, SEGMENTS)
    inputs = {"source_tokens": SOURCE, "source_positions": SOURCE_POSITIONS, "source_segments": SOURCE_SEGMENTS}
    return Batch(*map(jnp.array, arrays), inputs=jax.tree.map(jnp.array, inputs))


def test_loss_equals_the_reference():
    cfg, loss_cfg = KINDS["t5_1_0"], LossConfig(label_smoothing=0.1, z_loss=1e-2, chunk_tokens=6)
    params, batch = random_params(encoder_decoder.specs(cfg)), make_batch()
    objective, metrics = jax.jit(lambda p: encoder_decoder.loss(p, batch, cfg, loss_cfg))(params)
    wanted, weights = reference_logits(params, cfg), np.asarray(batch.weights)
    loss, nll = reference.cross_entropy(wanted, np.asarray(batch.targets), 0.1, 1e-2)
    np.testing.assert_allclose(objective["loss"], ((loss * weights).sum(), weights.sum()), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], ((nll * weights).sum(axis=1), weights.sum(axis=1)), rtol=1e-4)
    assert encoder_decoder.weights(batch, cfg).keys() == objective.keys()
    assert float(encoder_decoder.weights(batch, cfg)["loss"]) == float(objective["loss"][1])


@pytest.mark.slow
def test_scan_and_unroll_drop_the_same():
    """With and without what the backward pass would compute again."""
    cfg = config(dropout=0.3, attention_dropout=0.3)

    @jax.jit
    def run(params, rng):
        ways = (("scan", "none", rng), ("unroll", "full", jax.random.clone(rng)), ("scan", "none", None))
        return [
            logits(params, cfg, rng=rng, execution=Execution(layers=layers, remat=remat)) for layers, remat, rng in ways
        ]

    scan, unroll, without = run(random_params(encoder_decoder.specs(cfg)), jax.random.key(1))
    np.testing.assert_allclose(scan, unroll, rtol=1e-4, atol=1e-4)
    assert not np.allclose(scan, without, atol=0.1)


@pytest.mark.slow
def test_the_shell_is_the_function():
    cfg = KINDS["bart"]
    params = jax.tree.map(jnp.array, random_params(encoder_decoder.specs(cfg)))
    inputs = {"source_tokens": jnp.array(SOURCE), **PACKED}
    batch = make_batch()

    @jax.jit
    def both(params):
        variables = {"params": params}
        shell = Transformer(cfg).apply(variables, jnp.array(TOKENS), **inputs)
        objective, _ = Transformer(cfg).apply(variables, batch, method="loss")
        plain = encoder_decoder.loss(params, batch, cfg, LossConfig())[0]
        return (shell, objective["loss"][0]), (logits(params, cfg), plain["loss"][0])

    jax.tree.map(np.testing.assert_array_equal, *both(params))


def test_a_fresh_t5_starts_at_scores_of_unit_size():
    from jaxformer.specs import init_params

    cfg = unscaled(norm="rms_norm", positions="t5", initializer="t5", tie_embeddings=False, width=64)
    specs = encoder_decoder.specs(cfg)
    drawn = {"cross": specs["blocks"]["cross"], "tokens": specs["embedding"]["tokens"]}
    params = init_params(drawn, jax.random.key(0))
    found = {name: float(np.std(params["cross"][f"w_{name}"])) for name in ("query", "key", "out")}
    assert found == pytest.approx({"query": (64 * 16) ** -0.5, "key": 64**-0.5, "out": 64**-0.5}, rel=0.05)
    assert float(np.std(params["tokens"])) == pytest.approx(1, rel=0.1)


def test_groups_follow_the_config():
    groups = {kind: encoder_decoder.specs(cfg) for kind, cfg in KINDS.items()}
    assert set(groups["2017"]) == {"embedding", "blocks", "encoder"}
    assert set(groups["2017"]["encoder"]) == {"blocks"}
    assert set(groups["t5_1_1"]) == {"embedding", "blocks", "final_norm", "head", "encoder"}
    assert set(groups["t5_1_1"]["encoder"]) == {"embedding", "blocks", "final_norm"}
    assert set(groups["bart"]["encoder"]) == {"embedding", "embedding_norm", "blocks"}
    assert groups["bart"]["encoder"]["embedding"]["positions"].shape == (S, 16)
    assert "cross" in groups["bart"]["blocks"] and "cross" not in groups["bart"]["encoder"]["blocks"]


def test_segments_on_one_side_only_are_refused():
    cfg = KINDS["bart"]
    params = random_params(encoder_decoder.specs(cfg))
    with pytest.raises(ValueError, match="segments: given for one of source and target; accepted: for both"):
        encoder_decoder.apply(params, TOKENS, cfg, source_tokens=SOURCE, segments=jnp.array(SEGMENTS))


def test_a_prefix_is_seen_by_its_own_document_only():
    """Prefix LM with packing, for decoder-only models."""
    cfg = model_config(num_layers=1, width=16, num_heads=4, context_length=T, vocab_size=B * T, positions="rotary",
                       tie_embeddings=False)  # fmt: skip
    prefix = np.array([[1, 1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 1]], bool)
    params = jax.tree.map(jnp.array, random_params(gpt.specs(cfg)))
    tokens = np.arange(B * T).reshape(B, T)
    batch = Batch(jnp.array(tokens), jnp.array(tokens), None, jnp.array(POSITIONS), jnp.array(SEGMENTS),
                  {"prefix": jnp.array(prefix)})  # fmt: skip

    def influence(table, weights):
        p = params | {"embedding": {"tokens": table}}
        return gpt.loss(p, batch._replace(weights=weights), cfg, LossConfig())[0]["loss"][0]

    each = jnp.asarray(np.eye(B * T, dtype=np.float32).reshape(B * T, B, T))
    of_each = jax.jit(lambda table: jax.lax.map(lambda weights: jax.grad(influence)(table, weights), each))
    found = np.asarray(of_each(params["embedding"]["tokens"]))
    seen = (found != 0).any(axis=-1).reshape(B, T, B, T)
    for row in range(B):
        for t in range(T):
            own = (SEGMENTS[row] == SEGMENTS[row, t]) & (prefix[row] | (np.arange(T) <= t))
            np.testing.assert_array_equal(seen[row, t, row], own)
            assert not seen[row, t, 1 - row].any()

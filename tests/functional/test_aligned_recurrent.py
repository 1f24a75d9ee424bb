"""Recurrent sequence-to-sequence models: against plain loops in float64; packed pairs, decoding, beams, refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding, from_mapping
from jaxformer.config import LossConfig, MeshConfig, encoder_of
from jaxformer.errors import ConfigError
from jaxformer.functional import aligned_decoder, aligned_recurrent
from jaxformer.functional.layer import Context
from jaxformer.masks import segments as in_segments
from jaxformer.models import encoder_decoder as model
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.specs import init_params, is_spec
from jaxformer.types import Batch

B, T, S, D, V = 2, 5, 7, 8, 20
KINDS = {
    "bahdanau": {},
    "bahdanau lstm general": {"cell": "lstm", "score": "general"},
    "luong": {"cell": "lstm", "decoder": "luong", "score": "general"},
    "luong fed": {"cell": "lstm", "decoder": "luong", "score": "dot", "input_feeding": True},
    "luong concat gru": {"decoder": "luong", "score": "concat"},
    "local-m": {"cell": "lstm", "decoder": "luong", "score": "general", "local": "monotonic", "local_width": 1},
    "local-p": {"decoder": "luong", "score": "concat", "local": "predicted", "local_width": 2},
    "no attention": {"score": "none"},
    "no attention lstm": {"cell": "lstm", "decoder": "luong", "score": "none"},
}
FAST = {"bahdanau", "luong fed"}
# Each cell, decoder, score, window and way of feeding is among these; all of the above are held against plain loops.
COVERING = ["bahdanau", "luong fed", "local-m", "local-p", "no attention lstm"]
SOME = pytest.mark.parametrize("name", COVERING)
EACH = pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in KINDS])


def config(name, **more):
    sizes = {"num_layers": 1, "width": D, "vocab_size": V, "context_length": T, "positions": "none", "block": "plain"}
    attention = {"kind": "alignment", **KINDS[name]}
    given = {"family": "recurrent_seq2seq", "encoder": {"source_length": S}, "attention": attention, **sizes, **more}
    return from_mapping({"model": given, "data": {"objective": "pairs", "source": "transduction"}}).model


def draw(tree, seed=0):
    """Numbers in the place of specs or arrays."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape)), tree, is_leaf=is_spec)


@pytest.fixture
def in_float64():
    with jax.enable_x64(True):
        yield


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def by_hand(p, x, source, kind):
    """One pair: x [T, D], source [S, D] -> [T, D] and weights."""
    p = {name: np.asarray(value) for name, value in p.items()}
    half = D // 2
    h, c, feed = np.tanh(source[0, half:] @ p["w_start"] + p["b_start"]), np.zeros(D), np.zeros(D)
    out, all_weights = [], []

    def read(state, place):
        if kind.score == "none":
            return np.concatenate([source[-1, :half], source[0, half:]]), None
        both = np.concatenate([p["w_target"], p["w_source"]]) if kind.score == "concat" else None
        score = {
            "additive": lambda s: np.tanh(state @ p["w_target"] + s @ p["w_source"]) @ p["v"],
            "concat": lambda s: np.tanh(np.concatenate([state, s]) @ both) @ p["v"],
            "dot": lambda s: state @ s,
            "general": lambda s: state @ p["w_score"] @ s,
        }[kind.score]
        centre = place
        if kind.local == "predicted":
            centre = len(source) * sigmoid(np.tanh(state @ p["w_place"]) @ p["v_place"])
        keep = np.array([kind.local == "none" or abs(i - centre) <= kind.local_width for i in range(len(source))])
        weights = np.zeros(len(source))
        if keep.any():
            weights[keep] = softmax(np.array([score(s) for s in source[keep]]))
        if kind.local == "predicted":
            weights = weights * np.exp(-((np.arange(len(source)) - centre) ** 2) / (2 * (kind.local_width / 2) ** 2))
        return weights @ source, weights

    for place, token in enumerate(x):
        before = h
        of_x = token @ p["w_input"] + (p["bias"] if kind.cell == "gru" else 0)
        if kind.decoder == "bahdanau":
            found, weights = read(h, place)
            of_x = of_x + found @ p["w_fed"]
        elif kind.input_feeding:
            of_x = of_x + feed @ p["w_fed"]
        of_h = h @ p["w_hidden"] + (p["bias_hidden"] if kind.cell == "gru" else p["bias"])
        if kind.cell == "lstm":
            i, f, g, o = np.split(of_x + of_h, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        else:
            r, z = sigmoid(of_x[:D] + of_h[:D]), sigmoid(of_x[D : 2 * D] + of_h[D : 2 * D])
            h = (1 - z) * np.tanh(of_x[2 * D :] + r * of_h[2 * D :]) + z * h
        if kind.decoder == "luong":
            found, weights = read(h, place)
            feed = np.tanh(np.concatenate([found, h]) @ p["w_out"])
            out.append(feed)
        else:
            wide = before @ p["w_out_state"] + token @ p["w_out_token"] + found @ p["w_out_context"] + p["b_out"]
            out.append(wide.reshape(-1, 2).max(-1))
        all_weights.append(weights)
    return np.stack(out), None if kind.score == "none" else np.stack(all_weights)


@EACH
def test_a_decoder_is_the_plain_loop(name, in_float64):
    cfg = config(name)
    params = draw(aligned_recurrent.specs(cfg))
    x, source = draw(np.zeros((B, T, D)), 1), draw(np.zeros((B, S, D)), 2)
    run = jax.jit(lambda params, x, source: aligned_decoder.decode(params, x, cfg, Context(source=source)))
    out, _, weights = run(params, x, source)
    for row in range(B):
        wanted, wanted_weights = by_hand(params, np.asarray(x[row]), np.asarray(source[row]), cfg.attention)
        np.testing.assert_allclose(out[row], wanted, atol=1e-12)
        if weights is None:
            assert wanted_weights is None
        else:
            np.testing.assert_allclose(weights[row], wanted_weights, atol=1e-12)


TARGETS = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 2]])
SOURCES = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3]])  # 3: padding, which no target sees


@pytest.mark.slow
@SOME
def test_packed_pairs_are_those_alone_and_see_no_other(name, in_float64):
    cfg = config(name)
    params = draw(aligned_recurrent.specs(cfg))
    x, source = draw(np.zeros((B, T, D)), 1), draw(np.zeros((B, S, D)), 2)

    @jax.jit
    def packed(x, source):
        mask, source_mask = in_segments(jnp.asarray(TARGETS)), in_segments(jnp.asarray(TARGETS), jnp.asarray(SOURCES))

        def run(x, source):
            context = Context(mask=mask, source=source, source_mask=source_mask)
            out = aligned_decoder.decode(params, x, cfg, context)[0]
            return jnp.sum(out, -1), out

        grads, out = jax.jacrev(run, (0, 1), has_aux=True)(x, source)
        return out, grads

    @jax.jit
    def alone(x, source):
        return aligned_decoder.decode(params, x, cfg, Context(source=source))[0]

    out, (to_x, to_source) = packed(x, source)  # the gradients: [B, T, B, T or S, D]
    for row, segment in itertools.product(range(B), (1, 2)):
        mine, read = TARGETS[row] == segment, SOURCES[row] == segment
        wanted = alone(x[row : row + 1, mine], source[row : row + 1, read])
        np.testing.assert_allclose(out[row, mine], wanted[0], atol=1e-13)
    for row in range(B):
        for found, theirs in ((to_x, TARGETS), (to_source, SOURCES)):
            assert not np.asarray(found[row, :, 1 - row]).any()
            strange = TARGETS[row][:, None] != theirs[row][None]
            assert not np.asarray(found[row, :, row])[strange].any()
    assert not np.triu(np.abs(np.asarray(to_x)).sum(-1)[0, :, 0], 1).any()  # nor a later token


@pytest.mark.slow
@SOME
def test_decoding_is_the_full_forward_pass(name):
    """The whole model: prompts of different lengths, sources of different lengths, one token at a time."""
    cfg = config(name, num_layers=2 if name == "bahdanau" else 1)
    params = draw(model.specs(cfg))
    rng = np.random.default_rng(0)
    tokens, sources = jnp.asarray(rng.integers(0, V, (3, T))), jnp.asarray(rng.integers(0, V, (3, S)))
    sizes, lengths = np.array([S, 3, S]), np.array([2, 1, 3])
    run = jax.jit(lambda params, tokens, sources: model.apply(params, tokens, cfg, source_tokens=sources))
    full = np.zeros((3, T, V))
    for size in (S, 3):
        full[sizes == size] = run(params, tokens[sizes == size], sources[sizes == size, :size])
    fill = jax.jit(decoding.prefill, static_argnums=(3, 4))
    hidden, cache = fill(params, tokens, jnp.asarray(lengths), cfg, T, source=(sources, jnp.asarray(sizes)))
    add, logits = jax.jit(decoding.step, static_argnums=2), jax.jit(decoding.logits)
    for step in range(2):
        at = np.arange(3), lengths + step
        np.testing.assert_allclose(logits(params, hidden), full[at[0], at[1] - 1], rtol=1e-4, atol=1e-5)
        hidden, cache = add(params, tokens[at], cfg, cache)


def batch_of(rows=8):
    rng = np.random.default_rng(0)
    ids, source = jnp.asarray(rng.integers(0, V, (rows, T))), jnp.asarray(rng.integers(0, V, (rows, S)))
    tiled = [jnp.asarray(np.tile(each, (rows // 2, 1))) for each in (TARGETS, SOURCES)]
    inputs = {"source_tokens": source, "source_positions": source * 0, "source_segments": tiled[1]}
    return Batch(ids, jnp.roll(ids, -1, 1), jnp.ones(ids.shape), ids * 0, tiled[0], inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERING[:-1])
def test_the_same_on_eight_devices_and_every_parameter_learns(name):
    cfg = config(name)
    params, batch = draw(model.specs(cfg)), batch_of()
    loss_of = make_model(cfg, LossConfig()).loss
    step = jax.jit(jax.value_and_grad(lambda params: loss_of(params, batch, None)[0]["loss"][0]))
    loss, grads = step(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])):
        on_eight = jax.device_get(jax.jit(step)(params))
    assert float(on_eight[0]) == pytest.approx(float(loss), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), on_eight[1], grads)
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    assert all(np.asarray(leaf).any() for leaf in flat.values()), [n for n, leaf in flat.items() if not leaf.any()]


@pytest.mark.slow
def test_beams_of_all_widths_find_the_best():
    """As wide as everything there is, beam search is exhaustive search."""
    cfg = config("bahdanau", vocab_size=4)
    params = draw(model.specs(cfg))
    source = [[1, 2, 3, 1]]
    found = decoding.beam_search(params, [[0]], cfg, beams=64, max_new_tokens=3, sources=source)
    every = list(itertools.product(range(4), repeat=3))
    rows = jnp.asarray([[0, *tokens] for tokens in every])
    run = jax.jit(lambda *x: jax.nn.log_softmax(model.apply(params, x[0], cfg, source_tokens=x[1])))
    logits = np.asarray(run(rows, jnp.asarray(source * len(every))))
    scored = {tokens: logits[n, range(3), tokens].sum() for n, tokens in enumerate(every)}
    best = max(scored, key=scored.get)
    assert np.asarray(found.tokens)[0, 0, :3].tolist() == list(best)


def test_what_does_not_fit_is_one_line():
    data = {"objective": "pairs", "source": "transduction"}
    for more, line in (
        ({"width": 9}, r"^config.model.width: 9 is odd; the encoder has half of it in each direction$"),
        (
            {"attention": {"kind": "alignment", "local_width": 0}},
            r"^config.model.attention.local_width: 0; accepted: at",
        ),
        (
            {"attention": {"kind": "alignment", "input_feeding": True}},
            r"^config.model.attention.input_feeding: True; accepted with decoder=luong, not bahdanau$",
        ),
        (
            {"attention": {"kind": "alignment", "score": "none", "local": "monotonic"}},
            r"^config.model.attention.local: monotonic; accepted with score=none: none$",
        ),
        (
            {"feed_forward": {"width": 7}},
            r"^config.model.feed_forward: .*; model.family=recurrent_seq2seq has no fe",
        ),
        (
            {"family": "gpt", "encoder": None},
            r"^config.model.attention.kind: alignment; accepted with model.family",
        ),
        (
            {"family": "encoder_decoder"},
            r"^config.model.attention.kind: alignment; accepted with model.family",
        ),
        ({"positions": "rotary"}, r"^config.model.positions.kind: rotary needs queries and keys of heads"),
        (
            {"attention": "lstm"},
            r"^config.model.attention.kind: lstm reads a row from left to right; accepted",
        ),
    ):
        given = {"family": "recurrent_seq2seq", "encoder": {"source_length": S}, "attention": "alignment", "width": D}
        with pytest.raises(ConfigError, match=line):
            from_mapping({"model": {**given, **more}, "data": data})
    with pytest.raises(ValueError, match="alignment: the Context has no source; accepted: an encoder's states"):
        cfg = config("bahdanau")
        params = init_params(aligned_recurrent.specs(cfg), jax.random.key(0))
        aligned_decoder.decode(params, jnp.ones((1, T, D)), cfg, Context())
    assert encoder_of(config("bahdanau")).causal is False

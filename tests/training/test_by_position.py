"""The loss by place in the document: against the logits of every token, for families with different losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import LossConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.models.families import family_of
from jaxformer.modules import make_model
from jaxformer.specs import init_params
from jaxformer.training import by_position, evaluate
from jaxformer.training.eval_step import eval_step
from jaxformer.types import Batch

B, T, M = 3, 11, 6
SEGMENTS = np.array([[1] * 4 + [2] * 7, [1] * 11, [1] * 9 + [0] * 2])
POSITIONS = np.array([[*range(4), *range(7)], range(11), [*range(9), 0, 0]])
SIZES = {"num_layers": 1, "width": 8, "context_length": T, "vocab_size": 13, "attention": {"num_heads": 2}}
MODELS = {
    "gpt": {},
    "bert": {"family": "bert"},
    "encoder_decoder": {"family": "encoder_decoder", "encoder": {"source_length": 5}},
    "transformer_xl": {"family": "transformer_xl", "positions": "relative", "memory": M},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_mean_of_the_tokens_there(name):
    cfg = ModelConfig(**SIZES, **MODELS[name])
    dice, params = np.random.default_rng(0), init_params(family_of(cfg).specs(cfg), jax.random.key(0))
    params = jax.tree.map(lambda x: 20 * x, params)
    tokens, targets = dice.integers(0, 13, (2, B, T))
    weights = np.where(SEGMENTS > 0, dice.integers(0, 2, (B, T)) if name == "bert" else 1, 0).astype(np.float32)
    inputs = None
    if name == "encoder_decoder":
        inputs = {
            "source_tokens": dice.integers(0, 13, (B, 5)),
            "source_positions": np.arange(5) + np.zeros((B, 1), int),
        }
        inputs["source_segments"] = np.array([[1, 1, 2, 2, 2], [1] * 5, [1] * 4 + [0]])
    memory, positions = 0, POSITIONS
    if name == "transformer_xl":  # the first document of a row begins in its memory
        memory, positions = M, POSITIONS + M * (SEGMENTS == 1)
        before = np.arange(M) + np.zeros((B, 1), int)
        inputs = {"memory_tokens": dice.integers(0, 13, (B, M)), "memory_positions": before,
                  "memory_segments": np.ones_like(before)}  # fmt: skip
    batch = Batch(tokens, targets, weights, positions, SEGMENTS, inputs)
    model, given = make_model(cfg, LossConfig()), jax.tree.map(jnp.asarray, batch)
    found = jax.device_get(jax.jit(lambda p, b: by_position.eval_by_position(p, b, model=model))(params, given))

    fields = {"positions": given.positions, "segments": given.segments, **(given.inputs or {})}
    logits = jax.jit(lambda params: family_of(cfg).apply(params, given.tokens, cfg, **fields))(params)
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], 2)[..., 0]
    places = by_position.buckets(T + memory)
    assert places == [(0, 0), (1, 1), (2, 3), (4, 7), *([(8, 15), (16, 16)] if memory else [(8, 10)])]
    for first, last in places:
        there = weights * ((first <= positions) & (last >= positions))
        sums, counts = found.pop(by_position.name_of(first, last))
        np.testing.assert_allclose(sums, (nll * there).sum(1), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(counts, there.sum(1))
    plain = jax.jit(lambda p, b: eval_step(p, b, model=model))(params, given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, plain)


def test_a_model_of_labels_is_refused():
    model = make_model(ModelConfig(**SIZES), LossConfig())._replace(predict=eval_step)
    with pytest.raises(
        ConfigError, match=r"^--by-position: the run predicts labels, and its loss is not one of tokens; "
    ):
        by_position.eval_by_position({}, Batch(np.zeros((1, 4)), *[None] * 4), model=model)


def test_buckets():
    """Every place is in one of them."""
    for length in range(1, 70):
        inside = [place for first, last in by_position.buckets(length) for place in range(first, last + 1)]
        assert inside == list(range(length))


def test_taken_out():
    """By the shares of two sources, whose other values stay; buckets without tokens are left out."""
    names = [by_position.name_of(*place) for place in by_position.buckets(4)]

    def sums(params, batch, frozen):
        return {name: (batch * (i + 1), np.ones(2) * (i < 3)) for i, name in enumerate([*names, "loss"][::-1])}

    def measured(*batch):
        return evaluate.evaluate(sums, lambda batch: batch, None, [np.array(batch)])

    found = {"a": measured(1.0, 2.0), "b": measured(1.0, 3.0)}
    rest, rows = by_position.taken_out(found, {"a": 0.5, "b": 0.5}, 4)
    assert [(row["first"], row["last"], row["loss"], row["weight"]) for row in rows] == [
        (1, 1, 5.25, 4),
        (2, 3, 3.5, 4),
    ]
    assert rest == {name: {"loss": means["loss"]} for name, means in found.items()}
    assert rows[0]["loss_stderr"] == pytest.approx(1.5 * rows[1]["loss_stderr"])

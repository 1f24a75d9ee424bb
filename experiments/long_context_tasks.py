"""The tasks of `experiments.long_context` that models are trained on: recall of needles, Reformer's duplication.

A batch is a pure function of (seed, step), made inside the compiled program.
"""

import functools
import time
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.config import LossConfig, ModelConfig, OptimizerConfig, from_mapping
from jaxformer.models import gpt
from jaxformer.specs import init_params, only_trained, with_trained
from jaxformer.training.optim import make_optimizer
from jaxformer.types import Array, Batch, Params

HELD_OUT = 2**20  # the first step whose batches no model is trained on
HELD_OUT_BATCHES = 10
FILLER, KEYS, VALUES, PAIRS = 16, 8, 8, 6  # of `Needles`: symbols, and pairs in a row
QUERY, PAIR = FILLER, FILLER + KEYS  # the first token that asks, and the first that is a pair
VALUE = PAIR + KEYS * VALUES  # the first token that is an answer
HEADS, WIDTH = 4, 64
ROWS, NEEDLE_STEPS, DUPLICATION_STEPS = 32, 500, 1500
LENGTHS = (128, 512, 2048)  # rows that needles are looked for in; models are trained on the first
EDGES = tuple(2**n for n in range(12))  # of the bins of distances
TRIED = 2**18  # tokens of the rows of each length
WORD, SYMBOLS, CHUNK, ROUNDS = 31, 16, 16, ("full", "8", "4", "2", "1")  # of the duplication
_SPARSE = {"num_heads": HEADS}
MIXERS: dict[str, dict[str, Any]] = {  # those that look for needles
    "dense": {"kind": "softmax", **_SPARSE},
    "window": {"kind": "softmax", "window": 32, **_SPARSE},
    "longformer": {"kind": "longformer", "attention_window": 64, **_SPARSE},
    "bigbird": {"kind": "bigbird", "block": 16, "random_blocks": 1, **_SPARSE},
    "lsh": {"kind": "lsh", "rounds": 4, "chunk": 32, "redraw": True, **_SPARSE},
    "linear": {"kind": "linear", **_SPARSE},
    "performer": {"kind": "performer", **_SPARSE},
    "lstm": {"kind": "lstm"},
}


class Task(Protocol):
    """What is trained on: hashable, and a pure function of (seed, step)."""

    def batch(self, seed: Array | int, step: Array | int) -> Batch:
        """Rows [B, T]; `weights` are 1 where an answer is asked for."""


class Needles(NamedTuple):
    """Rows of filler in which six tokens say "key k has value v". The last six tokens ask for the keys, in another
    order, and the model answers with the value of each. A pair is one token, so that one look-up by content is enough.

    Attributes:
      rows: B.
      length: T.
    """

    rows: int
    length: int

    def batch(self, seed: Array | int, step: Array | int) -> Batch:
        """See `Task`. `inputs` has `distances` [B, PAIRS] int: tokens from a pair to its question, in order."""
        rngs = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 5)
        body = self.length - PAIRS

        def order(rng: Array, count: int) -> Array:
            return jnp.argsort(jax.random.uniform(rng, (self.rows, count)), axis=1)[:, :PAIRS]

        keys, places, asked = order(rngs[0], KEYS), order(rngs[1], body), order(rngs[2], PAIRS)
        values = jax.random.randint(rngs[3], keys.shape, 0, VALUES)
        tokens = jax.random.randint(rngs[4], (self.rows, self.length), 0, FILLER)
        tokens = tokens.at[jnp.arange(self.rows)[:, None], places].set(PAIR + VALUES * keys + values)
        keys, values, places = (jnp.take_along_axis(each, asked, axis=1) for each in (keys, values, places))
        tokens = tokens.at[:, body:].set(QUERY + keys)
        targets = jnp.zeros_like(tokens).at[:, body:].set(VALUE + values)
        weights = jnp.zeros(tokens.shape).at[:, body:].set(1.0)
        distances = (body + jnp.arange(PAIRS))[None] - places
        return _batch(tokens, targets, weights)._replace(inputs={"distances": distances})


class Duplication(NamedTuple):
    """Rows 0w0w of a random w: the second w is to be said again (Kitaev et al. 2020, section 5).

    Attributes:
      rows: B.
      word: symbols of w; T = 2 (word + 1).
      symbols: to draw from, numbered from 1.
    """

    rows: int
    word: int
    symbols: int

    def batch(self, seed: Array | int, step: Array | int) -> Batch:
        """See `Task`: the targets are the next tokens, and the second w's count."""
        rng = jax.random.fold_in(jax.random.key(seed), step)
        half = jnp.pad(jax.random.randint(rng, (self.rows, self.word), 1, self.symbols + 1), ((0, 0), (1, 0)))
        tokens = jnp.concatenate([half, half], axis=1)
        places = jnp.arange(tokens.shape[1])
        asked = (places > self.word) & (places < tokens.shape[1] - 1)
        return _batch(tokens, jnp.roll(tokens, -1, axis=1), jnp.broadcast_to(asked, tokens.shape).astype(jnp.float32))


def _batch(tokens: Array, targets: Array, weights: Array) -> Batch:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return Batch(tokens, targets, weights, positions, jnp.zeros_like(tokens))


@functools.partial(jax.jit, static_argnames=("task", "cfg", "steps", "count", "rate"))
def updates(
    state: Any, start: Array | int, seed: Array | int, *, task: Task, cfg: ModelConfig, steps: int, count: int,
    rate: float,
) -> tuple[Any, Array]:  # fmt: skip
    """`count` updates of (params, optimizer's state) from update `start` on, of `steps` in all; and their losses."""
    specs = gpt.specs(cfg)
    optimizer = make_optimizer(_settings(rate), steps, specs)

    def update(state: Any, step: Array) -> tuple[Any, Array]:
        params, optimizer_state = state
        rng = jax.random.fold_in(jax.random.key(seed), HELD_OUT + step)

        def loss(trained: Params) -> Array:
            whole = with_trained(params, trained, specs)
            objective, _ = gpt.loss(whole, task.batch(seed, step), cfg, LossConfig(), rng)
            return sum((total / weight for total, weight in objective.values()), jnp.zeros(()))

        trained = only_trained(params, specs)
        value, gradients = jax.value_and_grad(loss)(trained)
        changes, optimizer_state = optimizer.update(gradients, optimizer_state, trained)
        params = with_trained(params, optax.apply_updates(trained, changes), specs)
        return (params, optimizer_state), value

    return jax.lax.scan(update, state, start + jnp.arange(count))


def _settings(rate: float) -> OptimizerConfig:
    return OptimizerConfig(learning_rate=rate, warmup_steps=50, weight_decay=0.01)


def train(task: Task, cfg: ModelConfig, seed: int, steps: int, rate: float, each: int = 100) -> tuple[Params, dict]:
    """A trained model, and what its record says of the training: the mean loss of each `each` updates, seconds of CPU.

    Args:
      task: of the rows.
      cfg: the model.
      seed: of its parameters, of its batches and of what is drawn anew in every update.
      steps: updates; a multiple of `each`.
      rate: the peak of the cosine schedule.
      each: updates of one dispatch.
    """
    began, losses = time.process_time(), []
    specs = gpt.specs(cfg)
    params = init_params(specs, jax.random.key(seed))
    state = params, make_optimizer(_settings(rate), steps, specs).init(only_trained(params, specs))
    for start in range(0, steps, each):
        state, found = updates(state, start, seed, task=task, cfg=cfg, steps=steps, count=each, rate=rate)
        losses.append(round(float(found.mean()), 4))
    about = {"steps": steps, "rate": rate, "losses": losses, "cpu_seconds": round(time.process_time() - began)}
    return state[0], about


@functools.partial(jax.jit, static_argnames=("task", "cfg"))
def answers(params: Params, seed: Array | int, step: Array | int, *, task: Task, cfg: ModelConfig) -> Any:
    """Whether each prediction is right [B, T], and the batch. Rotations and directions are new in each batch too."""
    batch, rng = task.batch(seed, step), jax.random.fold_in(jax.random.key(seed), HELD_OUT + step)
    return gpt.apply(params, batch.tokens, cfg, rng=rng).argmax(-1) == batch.targets, batch


def needle_model(mixer: str, length: int) -> ModelConfig:
    """Two layers without positions, so that rows of any length can be read."""
    mapping = {"num_layers": 2, "width": WIDTH, "vocab_size": VALUE + VALUES, "attention": MIXERS[mixer]}
    more = {"context_length": length, "positions": {"kind": "none"}, "tie_embeddings": False}
    return from_mapping({"model": mapping | more}).model


def needle(mixer: str, seed: int, steps: int = NEEDLE_STEPS, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """What the record of a mixer trained on rows of the first of `lengths` says: of each length, answers that are right
    and answers in all, by bins of the distance that begin at `EDGES`."""
    params, about = train(Needles(ROWS, lengths[0]), needle_model(mixer, lengths[0]), seed, steps, rate=5e-3)
    right, tried = {}, {}
    for length in lengths:
        task, cfg = Needles(max(1, 2**15 // length), length), needle_model(mixer, length)
        counts = np.zeros((2, len(EDGES)), int)
        for step in range(TRIED // (task.rows * length)):
            found, batch = answers(params, seed, HELD_OUT + step, task=task, cfg=cfg)
            bins = np.digitize(np.asarray(batch.inputs["distances"]), EDGES) - 1
            np.add.at(counts, (1, bins), 1)
            np.add.at(counts, (0, bins), np.asarray(found)[:, -PAIRS:])
        right[str(length)], tried[str(length)] = counts.tolist()
    return {**about, "right": right, "tried": tried}


def duplication_model(rounds: str, word: int = WORD) -> ModelConfig:
    """One layer, as in the paper, with so many rounds of hashing; "full": every token sees every earlier one, by
    queries that are the keys as well, so that models of either kind can be read as the other."""
    length, full = 2 * (word + 1), rounds == "full"
    attention = {
        "kind": "lsh", "num_heads": HEADS, "redraw": True, "across_buckets": full,
        "rounds": 1 if full else int(rounds), "chunk": length if full else CHUNK,
    }  # fmt: skip
    mapping = {"num_layers": 1, "width": WIDTH, "vocab_size": 64, "attention": attention, "context_length": length}
    return from_mapping({"model": mapping}).model


def duplication(trained: str, seed: int, steps: int = DUPLICATION_STEPS, word: int = WORD) -> dict[str, Any]:
    """What the record of a model trained with so many rounds says: the share of the second w that is right when it is
    read with each number of rounds, and with all keys."""
    task = Duplication(ROWS, word, SYMBOLS)
    params, about = train(task, duplication_model(trained, word), seed, steps, rate=1e-2)
    right: dict[str, float] = {}
    for rounds in ROUNDS:
        shares = []
        for step in range(HELD_OUT_BATCHES):
            found, batch = answers(params, seed, HELD_OUT + step, task=task, cfg=duplication_model(rounds, word))
            shares.append(float(np.asarray(found)[np.asarray(batch.weights) > 0].mean()))
        right[rounds] = round(float(np.mean(shares)), 4)
    return {**about, "right": right}

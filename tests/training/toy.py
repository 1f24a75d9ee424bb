"""A model small enough to check by hand, its batches, and a program that trains it (for tests that kill it)."""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import Config, from_mapping
from jaxformer.parallel.mesh import host_rows, make_mesh
from jaxformer.specs import ParamSpec, init_params, is_spec, normal, zeros
from jaxformer.types import Batch, Model

V, D, F, L, T = 16, 8, 16, 2, 4


def specs():
    return {
        "embedding": {"tokens": ParamSpec((V, D), ("vocab", "embed"), normal(1.0), "input")},
        "blocks": {
            "w_up": ParamSpec((L, D, F), ("layers", "embed", "mlp"), normal(0.3), "hidden"),
            "b_up": ParamSpec((L, F), ("layers", "mlp"), zeros, "bias"),
            "w_down": ParamSpec((L, F, D), ("layers", "mlp", "embed"), normal(0.3), "hidden"),
        },
    }


def logits(params, tokens, xp=jnp, keep=None):
    """[B, T, V]; `keep` multiplies the hidden layer. The same lines for jax and for numpy."""
    x = params["embedding"]["tokens"][tokens]
    for layer in range(L):
        block = {k: v[layer] for k, v in params["blocks"].items()}
        h = xp.tanh(x @ block["w_up"] + block["b_up"][None, None])
        x = x + (h if keep is None else h * keep) @ block["w_down"]
    return x @ params["embedding"]["tokens"].T


def make_model(dropout: float = 0.0) -> Model:
    """Next-token loss, and a second term over rows where batches carry labels."""

    def loss(params, batch, rng, frozen=None):
        keep = None
        if dropout and rng is not None:
            keep = jax.random.bernoulli(rng, 1 - dropout, (*batch.tokens.shape, F)) / (1 - dropout)
        scores = logits(params, batch.tokens, keep=keep)
        nll = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, batch.targets[..., None], -1)[..., 0]
        right = (jnp.argmax(scores, axis=-1) == batch.targets).astype(nll.dtype)
        rows = batch.weights.sum(axis=1)
        objective = {"loss": (jnp.sum(nll * batch.weights), jnp.sum(batch.weights))}
        metrics = {
            "loss": (jnp.sum(nll * batch.weights, axis=1), rows),
            "accuracy": (jnp.sum(right * batch.weights, axis=1), rows),
        }
        if batch.inputs is not None:
            first = jnp.square(scores[:, 0, 0] - batch.inputs["labels"])
            objective["pairs"] = (jnp.sum(first), jnp.asarray(first.shape[0], first.dtype))
        return objective, metrics

    def weights(batch):
        out = {"loss": jnp.sum(batch.weights)}
        if batch.inputs is not None:
            out["pairs"] = jnp.asarray(batch.inputs["labels"].shape[0], batch.weights.dtype)
        return out

    return Model(specs(), lambda rng: init_params(specs(), rng), loss, weights)


def numpy_params(tree=None, seed: int = 0, dtype=np.float32):
    """Normal numbers in the shapes of `tree` (the toy's specs), without compiling anything."""
    rng = np.random.default_rng(seed)
    tree = specs() if tree is None else tree
    return jax.tree.map(lambda s: rng.normal(0, 0.5, s.shape).astype(dtype), tree, is_leaf=is_spec)


def make_batch(seed: int, rows: int, pairs: bool = False, dtype=np.float32) -> Batch:
    """Random tokens; targets follow a fixed rule, so that there is something to learn; weights are unequal."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (rows, T), dtype=np.int32)
    weights = rng.integers(0, 3, (rows, T)).astype(dtype)
    weights[0] = 0
    inputs = {"labels": rng.integers(0, 2, rows).astype(np.int32)} if pairs else None
    positions = np.tile(np.arange(T, dtype=np.int32), (rows, 1))
    targets = (5 * tokens + 3) % V
    return Batch(tokens, targets, weights, positions, np.zeros((rows, T), np.int32), inputs)


class ToyBatches:
    """batches[step], a pure function of the step; NaN weights at the steps in `bad`; only the rows in `rows`."""

    def __init__(
        self, rows: int, length: int = 3, seed: int = 0, bad: tuple[int, ...] = (), delay: float = 0.0, own=None
    ):
        self.announce = False
        self.rows, self.length, self.seed, self.bad, self.delay, self.own = rows, length, seed, bad, delay, own

    def __len__(self):
        return self.length

    def __getitem__(self, step):
        if step:  # every run reads batch 0 first, to see its shapes
            time.sleep(self.delay)
        elif self.announce:
            print("READY", flush=True)
            self.announce = False
        batch = make_batch(self.seed + 1000 * step, self.rows)
        if step in self.bad:
            batch = batch._replace(weights=np.full_like(batch.weights, np.nan))
        return batch if self.own is None else jax.tree.map(lambda x: x[self.own], batch)


def make_config(**sections) -> Config:
    base = {
        "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2},
        "train": {"steps": 12, "batch_rows": 8, "steps_per_dispatch": 3, "log_every_steps": 3, "eval_every_steps": 6},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return from_mapping(base)


def batch_sources(config: Config, mesh, delay: float = 0.0, bad: tuple[int, ...] = ()):
    own = host_rows(config.train.global_batch_size, mesh)
    rows = config.train.global_batch_size
    return ToyBatches(rows, delay=delay, bad=bad, own=own), ToyBatches(rows, seed=7, own=own)


def main() -> int:
    """toy.py WORKDIR CONFIG_JSON [DELAY [PROCESS PORT]]: trains and prints the status and a hash of the parameters."""
    from jaxformer.training.checkpoint.checksum import checksums
    from jaxformer.training.loop import train

    workdir, config = Path(sys.argv[1]), make_config(**json.loads(sys.argv[2]))
    delay = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    if len(sys.argv) > 4:
        jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=2, process_id=int(sys.argv[4]))
    mesh = make_mesh(config.mesh)
    batches, held_out = batch_sources(config, mesh, delay)
    batches.announce = True
    result = train(
        make_model(dropout=0.2), batches, held_out, config, workdir=workdir, mesh=mesh, resume_command="make resume"
    )
    print("RESULT", result.status, result.step, json.dumps(checksums(result.state.params), sort_keys=True), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

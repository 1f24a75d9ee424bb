"""Coordinate check: how far outputs move in a few updates, at growing widths and depths, under each parametrisation.

    python -m experiments.coordinates --out=experiments/results/coordinates

Under muP the mean change of the logits and of every layer's output does not depend on the width; under the standard
parametrisation it grows with it. So a wrong multiplier shows, in minutes. The check is necessary and not sufficient:
what muP claims is that learning rates transfer, which only runs of several sizes show. What has been measured is in
records.jsonl of the results; the same command goes on with the rest, and makes figure and page anew each time.

Source: Yang et al. 2022, appendix D.1.
"""

import functools
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.coordinates_page import figure, page
from jaxformer.config import ModelConfig, MuP, OptimizerConfig, Rotary, Softmax, Standard
from jaxformer.functional.block import block
from jaxformer.models import backbone, embedding, gpt
from jaxformer.runs.command_line import file_path, parser
from jaxformer.runtime.program import program
from jaxformer.scaling import plotting
from jaxformer.specs import init_params
from jaxformer.storage import files
from jaxformer.training.optim import make_optimizer
from jaxformer.types import Array, Params

BASE_WIDTH, BASE_LAYERS, HEAD_WIDTH, VOCABULARY = 64, 2, 32, 64
WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 4, 8, 16)
RATES = {"adamw": 1e-2, "lion": 3e-3, "muon": 1e-2}
KINDS = {"standard": Standard(), "mup": MuP(base_width=BASE_WIDTH, base_layers=BASE_LAYERS)}
SEEDS, STEPS, ROWS, LENGTH = 3, 4, 8, 32
OUTPUTS = ("logits", "first", "last")  # the last hidden states' logits, and the residual stream after two layers


class Point(NamedTuple):
    """One model that is measured."""

    optimizer: str
    kind: str
    width: int
    layers: int
    seed: int


def points(optimizers: Sequence[str]) -> Iterator[Point]:
    """All of them, small sizes first; the base belongs to both sweeps and comes once."""
    sizes = [(width, BASE_LAYERS) for width in WIDTHS] + [(BASE_WIDTH, layers) for layers in DEPTHS[1:]]
    for width, layers in sorted(sizes, key=math.prod):
        for optimizer, kind in itertools.product(optimizers, KINDS):
            yield from (Point(optimizer, kind, width, layers, seed) for seed in range(SEEDS))


def model(point: Point) -> ModelConfig:
    """A GPT of the size and parametrisation of a point, with heads of the same width at every size."""
    return ModelConfig(
        num_layers=point.layers,
        width=point.width,
        attention=Softmax(num_heads=point.width // HEAD_WIDTH),
        positions=Rotary(),
        context_length=LENGTH,
        vocab_size=VOCABULARY,
        tie_embeddings=False,
        parametrization=KINDS[point.kind],
    )


def outputs(params: Params, tokens: Array, cfg: ModelConfig) -> dict[str, Array]:
    """The logits [B, T, V] and the residual stream [B, T, D] after the first and the last layer."""
    streams: list[Array] = []

    def recorded(blocks: Params, x: Array, cfg: ModelConfig, contexts: Any) -> Any:
        def layer(x, params):
            x, _, _ = block(params, x, cfg, contexts[0])
            return x, x

        x, each = jax.lax.scan(layer, x, blocks)
        streams.extend((each[0], each[-1]))
        return x, None, {}

    rows = embedding.shard_rows(tokens, None, None, cfg)
    hidden, _ = backbone.over_rows(params, rows, cfg, None, backbone.DEFAULT_EXECUTION, layers=recorded)
    return dict(zip(OUTPUTS, (hidden @ gpt.output_table(params).T, *streams), strict=True))


@functools.cache
def compiled(point: Point) -> Any:
    """(rng, tokens [B, T + 1]) -> mean absolute change of each output after each update [steps], as one program."""
    cfg = model(point)
    rates = {"learning_rate": RATES[point.optimizer], "schedule": "constant", "warmup_steps": 0, "clip_norm": None}
    settings = OptimizerConfig(**{"name": point.optimizer, **rates})  # type: ignore[arg-type]
    optimizer = make_optimizer(settings, STEPS, gpt.specs(cfg))

    def loss(params: Params, tokens: Array) -> tuple[Array, dict[str, Array]]:
        found = outputs(params, tokens[:, :-1], cfg)
        return optax.softmax_cross_entropy_with_integer_labels(found["logits"], tokens[:, 1:]).mean(), found

    def run(rng: Array, tokens: Array) -> dict[str, Array]:
        params = init_params(gpt.specs(cfg), rng)

        def update(state: Any, _: None) -> Any:
            params, opt_state = state
            grads, found = jax.grad(loss, has_aux=True)(params, tokens)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), found

        # One update more than is looked at: each reports the outputs before it.
        _, found = jax.lax.scan(update, (params, optimizer.init(params)), length=STEPS + 1)
        return {name: jnp.mean(jnp.abs(x[1:] - x[:1]), axis=range(1, x.ndim)) for name, x in found.items()}

    return jax.jit(run)


def text(seed: int) -> np.ndarray:
    """[B, T + 1] tokens of a Zipf distribution, where each is often followed by the next number."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, VOCABULARY + 1)
    tokens = rng.choice(VOCABULARY, (ROWS, LENGTH + 1), p=chances / chances.sum())
    for place in range(1, LENGTH + 1):
        follows = rng.random(ROWS) < 0.5
        tokens[:, place] = np.where(follows, (tokens[:, place - 1] + 1) % VOCABULARY, tokens[:, place])
    return tokens


def measure(point: Point) -> dict[str, Any]:
    """The record of a point: mean absolute change of each output after each update, against the initial values."""
    begin = time.perf_counter()
    found = compiled(point._replace(seed=0))(jax.random.key(point.seed), jnp.asarray(text(point.seed)))
    changes = {name: found[name].tolist() for name in OUTPUTS}
    return {**point._asdict(), "changes": changes, "seconds": round(time.perf_counter() - begin, 2)}


def load(out: Path) -> list[dict[str, Any]]:
    """The records that there are."""
    path = out / "records.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main() -> None:
    """Measures what is missing, and writes records, figure and page."""
    arguments = parser(__doc__, "coordinates")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of records and page")
    arguments.add_argument("--only", choices=tuple(RATES), help="one optimizer alone (default: all)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = load(options.out)
    done = {Point(*(each[name] for name in Point._fields)) for each in found}
    for point in points(tuple(RATES) if options.only is None else (options.only,)):
        if point not in done:
            found.append(measure(point))
            lines = "".join(json.dumps(each) + "\n" for each in found)
            files.write_atomically(options.out / "records.jsonl", lines.encode())
            print(json.dumps(found[-1]), flush=True)
    files.write_atomically(options.out / "coordinates.svg", plotting.encoded(figure(found), "svg"))
    files.write_atomically(options.out / "README.md", page(found).encode())
    print(options.out / "README.md")


if __name__ == "__main__":
    program(main)

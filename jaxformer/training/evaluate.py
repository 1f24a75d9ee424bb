"""Evaluation on a held-out split, and what a run decides from it."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from jaxformer import records
from jaxformer.training import metrics
from jaxformer.types import Batch, Params, Sums

SPLIT = "validation"
K = TypeVar("K")
V = TypeVar("V")


class TrainBatches(Protocol):
    """Random access to batches: `batches[step]` holds this host's rows as numpy arrays."""

    def __getitem__(self, step: int, /) -> Batch:
        """The batch of a step."""


class EvalBatches(TrainBatches, Protocol):
    """A held-out split: as many batches as it takes, rows beyond its end having weight 0."""

    def __len__(self) -> int:
        """Number of batches."""


def read_ahead(pool: Executor, read: Callable[[K], V], keys: Iterable[K]) -> Iterator[V]:
    """read(key) for each key; `pool` reads the next while the caller uses one.

    >>> with ThreadPoolExecutor(1) as pool:
    ...     list(read_ahead(pool, abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    coming = None
    for key in keys:
        now, coming = coming, pool.submit(read, key)
        if now is not None:
            yield now.result()
    if coming is not None:
        yield coming.result()


def evaluate(
    evaluate_batch: Callable[[Params, Batch, Any], Sums],
    device_put_batch: Callable[[Batch], Batch],
    params: Params,
    batches: EvalBatches,
    count: int | None = None,
    frozen: Any = None,
) -> dict[str, metrics.WeightedMean]:
    """The model's metrics over the first `count` batches (None: all), with standard errors over rows.

    Args:
      evaluate_batch, device_put_batch: of `step.CompiledSteps`, or `step.compile_eval` and `step.device_put_batch`.
      params: the parameters.
      batches: the held-out split.
      count: how many batches.
      frozen: as in `TrainState`.
    """
    count = len(batches) if count is None else min(count, len(batches))
    found: list[Sums] = []

    with ThreadPoolExecutor(1) as pool:
        for batch in read_ahead(pool, lambda index: device_put_batch(batches[index]), range(count)):
            found.append(evaluate_batch(params, batch, frozen))
            # One batch behind, so that the device never waits and batches do not pile up on it.
            found[-2:-1] = jax.device_get(found[-2:-1])
    return metrics.collect(jax.device_get(found))


def evaluations_before(path: Path, step: int, fingerprint: str = "") -> dict[int, float]:
    """step -> loss of the evaluations that a run had made when it stood at `step`.

    Raises RecordError if the records are of another run than that of `fingerprint`.
    """
    if not path.exists():
        return {}
    found = records.load(path)
    records.check_run(path, found, fingerprint)
    evals = [r for r in records.latest(found) if r["kind"] == "eval"]
    return {r["step"]: float(r["loss"]) for r in evals if r["step"] <= step and r["split"] == SPLIT}


def stops_early(losses: list[float], patience: int | None) -> bool:
    """True if none of the last `patience` losses is better than the best before them.

    >>> stops_early([3.0, 2.0, 2.5, 2.1], 2), stops_early([3.0, 2.0, 2.5, 1.9], 2)
    (True, False)
    """
    if patience is None or len(losses) <= patience:
        return False
    return not np.nanmin([np.inf, *losses[-patience:]]) < np.nanmin([np.inf, *losses[:-patience]])

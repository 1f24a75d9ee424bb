"""Evaluation on a held-out split, and what a run decides from it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from jaxformer import records
from jaxformer.training import metrics
from jaxformer.types import Batch, Params

SPLIT = "validation"
Score = Callable[[dict[str, np.ndarray]], dict[str, metrics.WeightedMean]]
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


class HeldOut(NamedTuple):
    """What is held out of one source of text.

    Attributes:
      batches: in batches of one shape.
      share: of this source in the training rows; those of all sources add up to 1.
      bytes_per_token: bytes of the text / tokens predicted in it; None: no bits per byte.
      sample: the rows, spread over the whole text, that evaluations on the way use; None: `batches`.
      score: predictions of all rows, by name -> more estimates, of metrics that are no means over tokens; None: none.
    """

    batches: EvalBatches
    share: float = 1.0
    bytes_per_token: float | None = None
    sample: EvalBatches | None = None
    score: Score | None = None


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
      values: of all sources by their shares, see `metrics.evaluation`.
      sources: name -> values of one source of a mixture; empty if there is only one, without a name.
    """

    values: dict[str, float]
    sources: dict[str, dict[str, float]]


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
    evaluate_batch: Callable[[Params, Batch, Any], Any],
    device_put_batch: Callable[[Batch], Batch],
    params: Params,
    batches: EvalBatches,
    frozen: Any = None,
    score: Score | None = None,
) -> dict[str, metrics.WeightedMean]:
    """The model's metrics over all batches, with standard errors over rows.

    Args:
      evaluate_batch, device_put_batch: of `step.CompiledSteps`, or `compile_eval` and `step.device_put_batch`.
      params: the parameters.
      batches: the held-out split.
      frozen: as in `TrainState`.
      score: of `HeldOut`.
    """
    found: list[Any] = []

    with ThreadPoolExecutor(1) as pool:
        for batch in read_ahead(pool, lambda index: device_put_batch(batches[index]), range(len(batches))):
            found.append(evaluate_batch(params, batch, frozen))
            # One batch behind, so that the device never waits and batches do not pile up on it.
            found[-2:-1] = jax.device_get(found[-2:-1])
    found = jax.device_get(found)
    if not found or isinstance(found[0], dict):
        return metrics.collect(found)
    estimates = metrics.collect([sums for sums, _ in found])
    every = [predictions for _, predictions in found]
    return estimates | ({} if score is None else score({n: np.concatenate([p[n] for p in every]) for n in every[0]}))


def sources_of(
    held_out: EvalBatches | Mapping[str, HeldOut], bytes_per_token: float | None = None
) -> Mapping[str, HeldOut]:
    """What is held out, by name of the source; of batches that are not said to be of one, under the name ""."""
    return held_out if isinstance(held_out, Mapping) else {"": HeldOut(held_out, 1.0, bytes_per_token)}


def evaluate_sources(
    evaluate_batch: Callable[[Params, Batch, Any], Any],
    device_put_batch: Callable[[Batch], Batch],
    params: Params,
    held_out: Mapping[str, HeldOut],
    frozen: Any = None,
    sample: bool = False,
) -> Evaluation:
    """Each source's metrics, and the mean of them by the shares of the sources.

    Args:
      held_out: by name of the source; the only one may have the name "".
      evaluate_batch, device_put_batch, params, frozen: as of `evaluate`.
      sample: of each source only its sample.
    """
    read = {
        name: part.sample if sample and part.sample is not None else part.batches for name, part in held_out.items()
    }
    found = {
        name: evaluate(evaluate_batch, device_put_batch, params, each, frozen, held_out[name].score)
        for name, each in read.items()
    }
    return evaluation_of(found, held_out)


def evaluation_of(
    found: Mapping[str, Mapping[str, metrics.WeightedMean]], held_out: Mapping[str, HeldOut]
) -> Evaluation:
    """What `evaluate` found of each source, and the mean of it by their shares."""
    sizes = {name: part.bytes_per_token for name, part in held_out.items()}
    known = [part.share * part.bytes_per_token for part in held_out.values() if part.bytes_per_token is not None]
    whole = metrics.combined(found, {name: part.share for name, part in held_out.items()})
    code = all(part.score is None for part in held_out.values())
    return Evaluation(
        metrics.evaluation(whole, sum(known) if len(known) == len(found) else None, code=code),
        {name: metrics.evaluation(estimates, sizes[name], code=code) for name, estimates in found.items() if name},
    )


def criterion(values: Mapping[str, Any], metric: str | None) -> float:
    """What early stopping looks at, less being better: the loss, or a metric with its sign turned."""
    return float(values["loss"]) if metric is None else -float(values[metric])


def evaluations_before(
    path: Path, step: int, fingerprint: str = "", metric: str | None = None
) -> dict[int, float]:  # fmt: skip
    """step -> `criterion` of the evaluations that a run had made when it stood at `step`.

    Raises RecordError if the records are of another run than that of `fingerprint`.
    """
    if not path.exists():
        return {}
    found = records.load(path)
    records.check_run(path, found, fingerprint)
    evals = [r for r in records.latest(found) if r["kind"] == "eval"]
    return {r["step"]: criterion(r, metric) for r in evals if r["step"] <= step and r["split"] == SPLIT}


def stops_early(losses: list[float], patience: int | None) -> bool:
    """True if none of the last `patience` losses is better than the best before them.

    >>> stops_early([3.0, 2.0, 2.5, 2.1], 2), stops_early([3.0, 2.0, 2.5, 1.9], 2)
    (True, False)
    """
    if patience is None or len(losses) <= patience:
        return False
    return not np.nanmin([np.inf, *losses[-patience:]]) < np.nanmin([np.inf, *losses[:-patience]])

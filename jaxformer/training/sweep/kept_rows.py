"""Keeps the loss of each held-out row while a run is evaluated, so that two runs can be compared row by row."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxformer.scaling.arms import ROWS, TARGETS, pack_rows


class KeptRows:
    """An evaluation of batches that remembers the losses of their rows.

    >>> from jaxformer.types import Batch
    >>> def loss(params, batch, frozen):
    ...     return {"loss": ((batch.weights * params).sum(1), batch.weights.sum(1))}
    >>> kept, targets = KeptRows(loss), np.array([[7, 8], [9, 9], [5, 5]])
    >>> _ = kept(1.5, Batch(targets, targets, np.array([[1.0, 1], [0, 1], [0, 0]]), targets, targets), None)
    >>> from jaxformer.scaling.arms import unpack_rows
    >>> unpack_rows(kept.packed()["row_losses"])[0].tolist()
    [1.5, 1.5]
    """

    def __init__(self, evaluate_batch: Callable[[Any, Any, Any], Any]):
        """`evaluate_batch`: (params, batch, frozen) -> what `training.eval_step` returns."""
        self._evaluate, self._found, self._targets = evaluate_batch, list[Any](), list[bytes]()

    def __call__(self, params: Any, batch: Any, frozen: Any) -> Any:
        """What it returns for a batch."""
        out = self._evaluate(params, batch, frozen)
        self._targets += targets_of(*jax.device_get((batch.targets, batch.weights)))
        self._found.append((out if isinstance(out, dict) else out[0])["loss"])
        return out

    def packed(self) -> dict[str, str]:
        """The fields of a final record that hold them, and a digest of what the rows ask for; rows of no weight are
        left out."""
        pairs = [jax.device_get(pair) for pair in self._found]
        sums, weights = (np.concatenate([np.ravel(pair[i]) for pair in pairs]).astype(np.float64) for i in (0, 1))
        counted = weights > 0
        digest = hashlib.blake2b(b"".join(self._targets), digest_size=8).hexdigest()
        return {ROWS: pack_rows(sums[counted] / weights[counted], weights[counted]), TARGETS: digest}


def targets_of(targets: Any, weights: Any) -> list[bytes]:
    """What each row of a batch [B, T] asks for, whatever stands around it: the number of its targets, and they. Rows
    that ask for nothing are left out."""
    asked = [row[weight > 0] for row, weight in zip(targets, weights, strict=True)]
    return [len(each).to_bytes(4, "little") + np.asarray(each, "<i4").tobytes() for each in asked if len(each)]

"""Keeps the loss of each held-out row while a run is evaluated, so that two runs can be compared row by row."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxformer.scaling.arms import ROWS, pack_rows


class KeptRows:
    """An evaluation of batches that remembers the losses of their rows.

    >>> kept = KeptRows(lambda params, batch, frozen: {"loss": (batch * params, np.array([2.0, 2.0, 0.0]))})
    >>> _ = kept(1.0, np.array([3.0, 5.0, 0.0]), None)
    >>> from jaxformer.scaling.arms import unpack_rows
    >>> unpack_rows(kept.packed()["row_losses"])[0].tolist()
    [1.5, 2.5]
    """

    def __init__(self, evaluate_batch: Callable[[Any, Any, Any], Any]):
        """`evaluate_batch`: (params, batch, frozen) -> what `training.eval_step` returns."""
        self._evaluate, self._found = evaluate_batch, list[Any]()

    def __call__(self, params: Any, batch: Any, frozen: Any) -> Any:
        """What it returns for a batch."""
        out = self._evaluate(params, batch, frozen)
        self._found.append((out if isinstance(out, dict) else out[0])["loss"])
        return out

    def packed(self) -> dict[str, str]:
        """The field of a final record that holds them; rows of no weight are left out."""
        pairs = [jax.device_get(pair) for pair in self._found]
        sums, weights = (np.concatenate([np.ravel(pair[i]) for pair in pairs]).astype(np.float64) for i in (0, 1))
        counted = weights > 0
        return {ROWS: pack_rows(sums[counted] / weights[counted], weights[counted])}

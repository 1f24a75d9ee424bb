"""Next tokens behind a memory: each row brings the tokens before it, which a Transformer-XL reads and does not predict.

Source: Dai et al. 2019, section 3.2.
"""

import functools

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.corpus import Split
from jaxformer.data.rows import HostBatch, Lengths, documents
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.windows import WindowRows, Windows
from jaxformer.errors import ConfigError
from jaxformer.types import Batch


class RecurrentRows(WindowRows):
    """Rows of `Lengths.target` tokens, as next_token has them, with the `Lengths.source` before them as inputs."""

    def __init__(self, split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool):
        """Arguments as of `Objective.rows`. Raises ConfigError: as `Windows`, or there is no memory."""
        if lengths.source is None:
            raise ConfigError(f"config.model.memory: None; data.objective={data.objective} needs a length")
        self._memory = lengths.source
        windows = Windows(split, lengths.target, ahead=1, covering=covering, before=self._memory)
        ask = functools.partial(behind_memory, memory=self._memory, separator_id=tokenizer.separator_id)
        super().__init__(windows, lambda tokens, bits: ask(tokens), tokenizer.pad_id, words=0)

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """The rows of some windows."""
        return divided(super().batch(index, seed, epoch, bits), self._memory)


def behind_memory(windows: np.ndarray, *, memory: int, separator_id: int) -> Batch:
    """Predict each token but the first `memory` ones from those before it in its document.

    Args:
      windows: [R, M + T + 1] integers.
      memory: M.
      separator_id: opens a document.

    Returns:
      Batch of [R, M + T], weights 0 on the memory.
    """
    windows = windows.astype(np.int32)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    segments, positions = documents(tokens, separator_id)
    weights = np.broadcast_to(np.arange(tokens.shape[1]) >= memory, tokens.shape).astype(np.float32)
    return HostBatch(tokens, targets, weights, positions, segments)


def divided(batch: Batch, memory: int) -> Batch:
    """A batch of [R, M + T] as one of [R, T] with memory_tokens, memory_positions and memory_segments [R, M].

    >>> batch = divided(behind_memory(np.array([[0, 5, 6, 0, 7, 8]]), memory=2, separator_id=0), 2)
    >>> batch.tokens.tolist(), batch.inputs["memory_tokens"].tolist(), batch.segments.tolist()
    ([[6, 0, 7]], [[0, 5]], [[1, 2, 2]])
    """
    names = ("tokens", "positions", "segments")
    inputs = {f"memory_{name}": np.asarray(getattr(batch, name))[:, :memory] for name in names}
    return HostBatch(*(np.asarray(x)[:, memory:] for x in batch[:5]), inputs)

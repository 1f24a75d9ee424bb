"""Batches by number: `batches[step]` is a pure function of (seed, step), any step, in any order, on any host.

>>> from jaxformer.data import tokenizers
>>> tokenizer = tokenizers.train("bytes", [], None)
>>> ids = np.concatenate([[tokenizer.separator_id], tokenizer.encode("to be or not to be")]).astype(np.uint16)
>>> split = Split(ids, np.array([0]), 18, 0, {})
>>> batches = Batches(split, tokenizer, DataConfig(), rows=2, context_length=4, seed=0)
>>> batches.rows_per_epoch, batches[7].tokens.shape
(3, (2, 4))
>>> [batch.weights.sum() for batch in eval_batches(split, tokenizer, DataConfig(), rows=2, context_length=4)]
[np.float32(8.0), np.float32(8.0), np.float32(2.0)]
"""

from collections.abc import Sequence

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.corpus import Split
from jaxformer.data.objectives import rows_of
from jaxformer.data.rows import Lengths, SplitRows, blanked
from jaxformer.data.shuffle import keys, noise, permuted
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch

_ORDER = 0  # stream of `shuffle.keys`; windows and pairs have their own
_EVAL_SEED = 2**32  # held-out noise is the same in every run, and that of no training seed


class Batches:
    """The training batches of one host.

    Each epoch cuts the split into windows of context_length tokens at a fresh random offset and goes through them in a
    fresh order. Tokens near either end of the text are read less often, and at most context_length at its end never
    (`Windows` says how many). Global row `step * rows + r` is row `r` of step `step` over all hosts, and does not
    depend on who asks.

    Attributes:
      rows_per_epoch: rows in which no token is read twice.
      tokens_per_epoch: rows_per_epoch * context_length.
    """

    def __init__(
        self,
        split: Split,
        tokenizer: Tokenizer,
        data: DataConfig,
        *,
        rows: int,
        context_length: int,
        seed: int,
        source_length: int | None = None,
        host_row_indices: np.ndarray | None = None,
    ):
        """Looks only at sizes.

        Args:
          split: tokens to train on.
          tokenizer: what made them.
          data: the objective and its settings.
          rows: rows of a batch, all hosts together.
          context_length: tokens of a row.
          seed: order, offsets and noise.
          source_length: source tokens of a row, for objectives that have a source.
          host_row_indices: [R] the rows (0 to rows - 1) of each batch that this host loads, in this order; None: all.

        Raises:
          ConfigError: the split is shorter than one row.
          ValueError: `host_row_indices` names a row that is not there.
        """
        self._rows = rows_of(split, tokenizer, data, Lengths(context_length, source_length), False)
        self._host_rows = host_rows(host_row_indices, rows)
        self._global_rows, self._seed = rows, seed
        self.rows_per_epoch = self._rows.per_epoch
        self.tokens_per_epoch = self.rows_per_epoch * context_length

    def __getitem__(self, step: int) -> Batch:
        """The rows of this host in step `step` (from 0): numpy arrays as in `Batch`."""
        if step < 0:
            raise IndexError(f"step {step}; steps count from 0")
        return self.rows(step * self._global_rows + self._host_rows)

    def rows(self, numbers: np.ndarray) -> Batch:
        """Some rows by their global numbers, [R]: numpy arrays as in `Batch`."""
        epoch, index = np.divmod(numbers, self.rows_per_epoch)
        index = permuted(index, self.rows_per_epoch, keys(self._seed, _ORDER, epoch))
        return self._rows.batch(index, self._seed, epoch, _noise(self._seed, numbers, self._rows.words))

    def notes(self, steps: int | None = None) -> list[str]:
        """What these rows leave out, a line each: text that no row reaches, rows without a label; often nothing."""
        return self._rows.notes()

    def epochs(self, steps: int) -> float:
        """How often `steps` steps go through the split."""
        return steps * self._global_rows / self.rows_per_epoch

    def reading(self, steps: int) -> str:
        """What `steps` steps read, in words."""
        return f"{self.epochs(steps):.2f} epochs"


def eval_batches(
    split: Split,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    rows: int,
    context_length: int,
    source_length: int | None = None,
    host_row_indices: np.ndarray | None = None,
    max_rows: int | None = None,
) -> Sequence[Batch]:
    """The whole split once, in order, in batches of one shape, with the same noise every time.

    Every token but the first (a separator, which stands for no text) is a target of `next_token` exactly once, so the
    losses add up to the nats of the split's `num_bytes` bytes. What fills the last window and the last batch has weight
    0, segment 0 and the padding token; a row that is nothing but filling has the pair label -1.

    Args:
      split: tokens to evaluate on.
      tokenizer: what made them.
      data: the objective and its settings.
      rows: rows of a batch, all hosts together.
      context_length: tokens of a row.
      source_length: as of `Batches`.
      host_row_indices: [R] the rows (0 to rows - 1) of each batch that this host loads, in this order; None: all.
      max_rows: no more than so many rows, evenly spread over the split; None: all.

    Raises:
      ConfigError: the split is too short to hold a target.
      ValueError: `host_row_indices` names a row that is not there.
    """
    source = rows_of(split, tokenizer, data, Lengths(context_length, source_length), True)
    total = source.per_epoch
    chosen = np.arange(total) if max_rows is None else np.arange(min(max_rows, total)) * total // min(max_rows, total)
    return _EvalBatches(source, chosen, rows, host_rows(host_row_indices, rows), tokenizer.pad_id)


class _EvalBatches(Sequence):
    def __init__(self, source: SplitRows, chosen: np.ndarray, rows: int, host_row_indices: np.ndarray, pad_id: int):
        self._source, self._chosen, self._rows, self._pad_id = source, chosen, rows, pad_id
        self._host_rows = host_row_indices

    def __len__(self) -> int:
        return -(-len(self._chosen) // self._rows)

    def __iter__(self):
        return (self[number] for number in range(len(self)))  # Sequence's own takes any IndexError for the end

    def __getitem__(self, number):
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]  # IndexError past the end, negative numbers from the end
        ordinal = number * self._rows + self._host_rows
        filler = ordinal >= len(self._chosen)
        index = self._chosen[np.minimum(ordinal, len(self._chosen) - 1)]
        bits = _noise(_EVAL_SEED, ordinal, self._source.words)
        batch = self._source.batch(index, _EVAL_SEED, np.zeros_like(index), bits)
        return blanked(batch, filler[:, None] | np.zeros(batch.tokens.shape, bool), self._pad_id)


def host_rows(found: np.ndarray | None, rows: int) -> np.ndarray:
    """[R] int64: the rows of a batch that one host loads."""
    found = np.arange(rows) if found is None else np.asarray(found, np.int64)
    if found.ndim != 1 or ((found < 0) | (found >= rows)).any():
        raise ValueError(f"host_row_indices: {found}; accepted: one axis of row numbers from 0 to {rows - 1}")
    return found


def _noise(seed: int, numbers: np.ndarray, words: int) -> np.ndarray:
    """[R, words] random bits of the global rows `numbers`, by runs of consecutive ones."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return np.concatenate([noise(seed, int(run[0]) if len(run) else 0, len(run), words) for run in runs])

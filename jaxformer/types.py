"""The shape alphabet, and the types that every part of the library shares.

Local arrays carry their shape as a suffix, in these letters (einsums use the same ones):

  B  batch row          T  query position     S  key position      D  model width
  H  query head         G  key/value head     K  head width        F  hidden width of the MLP
  V  vocabulary entry   L  layer              N  token (B and T flattened)

Public arguments have plain names; their docstrings give the shape in the same letters. PRNG keys are
called ``rng``, because ``key`` belongs to attention.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Array = jax.Array
Params = dict[str, Any]  # a nested dict whose leaves are arrays
Sums = dict[str, tuple[Array, Array]]  # name -> (sum, weight); divide once, at the very end


class Batch(NamedTuple):
    """One batch of packed rows. The objective lives here, not in the train step.

    A GPT batch carries targets shifted by one; a BERT batch carries corrupted tokens, the originals as
    targets, and weight 1 on the selected tokens only.

    Attributes:
      tokens: [B, T] int32, what the model reads.
      targets: [B, T] int32, what it should predict at each position.
      weights: [B, T] float32, how much each position counts in the loss; 0: not at all.
      positions: [B, T] int32, position inside the document (restarts at every document).
      segments: [B, T] int32, which document of the row a token belongs to; no token sees another segment.
      inputs: what only some families have, by name; None: nothing. Every array has the rows first. In rows that only
        fill the last batch, and at padding, those of [B, T, ...] are 0 and those of [B] are -1. BERT has

          token_types  [B, T] int32, sentence A (0) or B (1)
          pair_labels  [B] int32, next-sentence label: 0 "B follows A", 1 "B is random", -1 "no label" (a row that
                       only fills the last batch, or one for which no other document was drawn)

        an encoder-decoder, whose other arrays are the target's (tokens: a start token, then the targets shifted right),

          source_tokens, source_positions, source_segments  [B, S] int32, as the target's; a target sees the source of
                       its own segment number

        and a GPT with prefixes (prefix LM)

          prefix       [B, T] bool, tokens that all tokens of their segment see
    """

    tokens: Array
    targets: Array
    weights: Array
    positions: Array
    segments: Array
    inputs: Mapping[str, Any] | None = None


class Model(NamedTuple):
    """What the training loop knows of a model: how to make its parameters, and its loss on a batch.

    Attributes:
      specs: tree of ``ParamSpec``, one per parameter; shardings, counts and the optimizer derive from it.
      init: ``rng -> params``.
      loss: ``(params, batch, rng, frozen) -> (objective, metrics)``, both ``Sums``. ``rng`` is None when nothing
        is dropped (evaluation), and [M] keys, one for each micro-batch, on a mesh with stages; ``frozen`` has the
        values of the specs below. The objective to minimise is the sum over ``objective`` of sum / weight, scalars.
        ``metrics`` hold a sum and a weight for each row, [B]: rows are the sampling unit of a standard error. Always
        there: "loss" (nats of negative log-likelihood over tokens) and "accuracy".
      weights: ``batch -> {name: weight}``: the weights of ``objective`` without running the model, so that
        micro-batches of unequal weight add up to exactly the whole batch.
      frozen: tree of ``ParamSpec`` of arrays that the loss sees and nobody updates, or None.
      predict: ``(params, batch, frozen) -> (metrics, predictions)``, without dropout: arrays with the rows first, by
        name, of which metrics are made that are no means over tokens; None: there are no such metrics.
      measured: names in ``objective`` that are not minimised: training records them among its metrics.
    """

    specs: Any
    init: Callable[[Array], Params]
    loss: Callable[[Params, Batch, Array | None, Any], tuple[Sums, Sums]]
    weights: Callable[[Batch], dict[str, Array]]
    frozen: Any = None
    predict: Callable[[Params, Batch, Any], tuple[Sums, dict[str, Array]]] | None = None
    measured: tuple[str, ...] = ()

"""Log-probabilities of continuations under a model that predicts the next token.

A continuation is scored as training scores text: through the family's own loss, of a batch whose weights are 1 on its
tokens and 0 on its context. So logits of a whole batch never exist at once, and every mesh does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Execution, LossConfig, MeshConfig, ModelConfig
from jaxformer.decoding.request import round_up
from jaxformer.errors import ConfigError
from jaxformer.models.families import FAMILIES, family_of
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import batch_shards, check_context, check_experts, check_without_stages, make_mesh
from jaxformer.training.eval_step import compile_eval
from jaxformer.training.step import device_put_batch
from jaxformer.types import Array, Batch, Model, Params

Ids = Sequence[int]


class Continuation(NamedTuple):
    """How likely a continuation is.

    Attributes:
      log_prob: nats, summed over its tokens.
      greedy: True if each of its tokens is the likeliest one where it stands.
    """

    log_prob: float
    greedy: bool


def score_step(params: Params, batch: Batch, frozen: Any = None, *, model: Model) -> tuple[Array, Array]:
    """[B] log-probabilities of the tokens with weight 1, and [B] whether each of them is the likeliest."""
    metrics = model.loss(params, batch, None, frozen)[1]
    (nll, weight), (hits, _) = metrics["loss"], metrics["accuracy"]
    return -nll, hits >= weight


def language_model(cfg: ModelConfig, where: str = "config.model.family") -> ModelConfig:
    """The model with its family's own head, whose parameters are the same.

    Args:
      cfg: of a model.
      where: what an error names.

    Raises:
      ConfigError: it predicts no next token: it sees later tokens, reads a source, or has another head.
    """
    able = [name for name, family in FAMILIES.items() if family.traits.causal and not family.traits.reads_source]
    if cfg.family not in able:
        raise ConfigError(f"{where}: {cfg.family} predicts no next token of a text; accepted: {', '.join(able)}")
    own = replace(cfg, head=None)
    if cfg.head is not None and family_of(own).specs(own).keys() != family_of(cfg).specs(cfg).keys():
        raise ConfigError(f"{where}: {cfg.family} with a head for {cfg.head.task}; accepted: one that predicts tokens")
    return own


class Scorer:
    """Scores continuations with one model, in batches of like length and of few shapes, each compiled once.

    Attributes:
      cfg: the model.
      mesh: where it is.

    >>> from jaxformer.models import gpt
    >>> from jaxformer.specs import init_params
    >>> cfg = ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64)
    >>> scorer = Scorer(init_params(gpt.specs(cfg), jax.random.key(0)), cfg)
    >>> right, longer = scorer([([1, 2], [3]), ([1, 2], [3, 4])])
    >>> right.log_prob > longer.log_prob
    True
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        *,
        mesh: Mesh | None = None,
        rows: int = 8,
        execution: Execution | None = None,
        loss: LossConfig | None = None,
        frozen: Any = None,
        prefix_lm: bool = False,
    ):
        """Compiles nothing yet.

        Args:
          params: as the family's specs say, on `mesh`.
          cfg: the model, vocabulary size filled in.
          mesh: what the parameters are split over; None: one device.
          rows: of a batch, if they are as long as the context; of shorter ones there are as many more.
          execution: how it is computed; None: the defaults.
          loss: whose chunk_tokens limit the logits that exist at once.
          frozen: arrays of families that have some, as in `TrainState`.
          prefix_lm: True for models that were trained on data.objective=prefix_lm: a context is read from both sides.

        Raises:
          ConfigError: the model predicts no next token, or the mesh cannot cut its rows.
        """
        self.cfg = language_model(cfg)
        self.mesh = make_mesh(MeshConfig(1), jax.devices()[:1]) if mesh is None else mesh
        check_without_stages(self.mesh, "scoring")
        check_context(self.cfg, self.mesh)
        check_experts(self.cfg, self.mesh)
        how = replace(Execution() if execution is None else execution, feed_forward_chunks=1)  # would have to divide T
        model = make_model(self.cfg, LossConfig() if loss is None else loss, how)
        self._params, self._frozen, self._prefix_lm = params, frozen, prefix_lm
        self._tokens = rows * self.cfg.context_length
        self._step = compile_eval(model, self.mesh, score_step)

    def __call__(
        self, pairs: Sequence[tuple[Ids, Ids]], tell: Callable[[int], Any] = lambda number: None
    ) -> list[Continuation]:
        """Scores each continuation after its context; what is asked twice is computed once.

        Args:
          pairs: contexts and continuations, token ids of at least one each. Where both together do not fit the model's
            context, the first tokens of the context are left out.
          tell: is told how many more are done, now and then.

        Raises:
          ConfigError: an empty context or continuation, or a continuation longer than the model's context.
        """
        asked: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            asked.setdefault((tuple(context), tuple(continuation)), []).append(number)
        for context, continuation in asked:
            self._check(context, continuation)
        out: list[Continuation] = [Continuation(0.0, True)] * len(pairs)
        waiting: list[tuple[Any, list]] = []
        with jax.set_mesh(self.mesh):
            for batch, members in self._batches(list(asked)):
                step = self._step(self._params, device_put_batch(batch, self.mesh), self._frozen)
                waiting.append((step, members))
                if len(waiting) > 1:  # one batch behind, so that the device never waits
                    self._take(*waiting.pop(0), asked, out, tell)
        for found, members in waiting:
            self._take(found, members, asked, out, tell)
        return out

    def _check(self, context: Ids, continuation: Ids) -> None:
        most = self.cfg.context_length
        if not context or not continuation:
            what = "continuation" if context else "context"
            raise ConfigError(f"{what}: no tokens; accepted: at least one")
        if len(continuation) > most:
            raise ConfigError(
                f"continuation: {len(continuation)} tokens; accepted: at most model.context_length, {most}"
            )

    def _take(self, found: Any, members: list, asked: Any, out: list[Continuation], tell: Callable[[int], Any]) -> None:
        for pair, log_prob, greedy in zip(members, *jax.device_get(found), strict=False):
            for number in asked[pair]:
                out[number] = Continuation(float(log_prob), bool(greedy))
        tell(sum(len(asked[pair]) for pair in members))

    def _batches(self, pairs: list) -> Iterator[tuple[Batch, list]]:
        """Batches, the longest first, and the pairs of their rows; rows beyond those are empty."""
        groups: dict[int, list] = {}
        for pair in sorted(pairs, key=lambda pair: -self._size(pair)):
            groups.setdefault(self._padded(self._size(pair)), []).append(pair)
        for length, group in groups.items():
            shards = batch_shards(self.mesh)
            rows = min(self._tokens // length, 1 << (len(group) - 1).bit_length())
            rows = max(1, -(-rows // shards)) * shards
            for start in range(0, len(group), rows):
                members = group[start : start + rows]
                yield self._batch(members, rows, length), members

    def _size(self, pair: tuple[Ids, Ids]) -> int:
        """Tokens that the model reads of a pair: all but the last."""
        return min(len(pair[0]) + len(pair[1]) - 1, self.cfg.context_length)

    def _padded(self, size: int) -> int:
        """One of few lengths; each divides over the mesh's context axis."""
        step = 2 * self.mesh.shape["context"]
        return min(-(-round_up(size) // step) * step, self.cfg.context_length)

    def _batch(self, members: list, rows: int, length: int) -> Batch:
        tokens, targets, segments = (np.zeros((rows, length), np.int32) for _ in range(3))
        weights, prefix = np.zeros((rows, length), np.float32), np.zeros((rows, length), bool)
        for row, (context, continuation) in enumerate(members):
            size, new = self._size((context, continuation)), len(continuation)
            ids = np.array([*context, *continuation][-size - 1 :], np.int32)
            tokens[row, :size], targets[row, :size] = ids[:-1], ids[1:]
            weights[row, size - new : size], segments[row, :size] = 1, 1  # padding is a document of its own
            prefix[row, : size - new + 1] = True
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        inputs = {"prefix": prefix} if self._prefix_lm else None
        fields: Any = (tokens, targets, weights, positions, segments, inputs)  # of NumPy, until they are on the mesh
        return Batch(*fields)

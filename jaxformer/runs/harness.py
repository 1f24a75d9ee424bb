"""A model as lm-eval, EleutherAI's evaluation harness, asks it: log-probabilities and greedy continuations of text.

Contexts and continuations are taken apart by the harness's own rules (`TemplateLM`), so that numbers are comparable
with those of its other backends. Each text is tokenised once, all of a task at once.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import decoding
from jaxformer.config import Config, ModelConfig
from jaxformer.data.decoding_text import template_start
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.models.attention_support import fallback_to_auto
from jaxformer.models.lora import plain_params
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import batch_shards, param_shardings
from jaxformer.runs import manifest
from jaxformer.runs.continuations import Scorer, language_model
from jaxformer.runs.pretrain import laid_out, mesh_of, params_of, tokenizer_of
from jaxformer.types import Params

try:
    from lm_eval.api.model import TemplateLM
except ImportError:
    TemplateLM: Any = object  # type: ignore[no-redef]

MAX_GEN_TOKS = 256  # unless the task says how many, as in the harness's other backends
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
IGNORED = {"do_sample", "until", "max_gen_toks", *SAMPLING}


def check_installed() -> None:
    """Raises ConfigError: the extra is missing."""
    if TemplateLM is object:
        raise ConfigError("lm-eval: needs the lm_eval extra: pip install 'jaxformer[lm_eval]'")


class HarnessModel(TemplateLM):
    """An `LM` of lm-eval, for `lm_eval.evaluator.simple_evaluate(model=...)`.

    Attributes:
      max_length: tokens of the model's context; of longer texts the last ones are read.
      max_gen_toks: new tokens at most, where a task does not say.
    """

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        tokenizer: Tokenizer,
        *,
        mesh: Mesh | None = None,
        batch_size: int = 8,
        start: Sequence[int] | None = None,
        seed: int = 0,
        prefix_lm: bool = False,
        **more: Any,
    ):
        """A model from anywhere; `of_run` makes one of a run's directory.

        Args:
          params, cfg, mesh, prefix_lm: as of `Scorer`.
          tokenizer: the model's.
          batch_size: rows that are as long as the context, in a batch; of shorter ones there are as many more.
          start: ids before every text; None: what the tokenizer's own template puts there.
          seed: of sampling, where a task asks for it.
          more: as of `Scorer`.

        Raises:
          ConfigError: the extra is missing, or the model predicts no next token.
        """
        check_installed()
        super().__init__()
        self._score = Scorer(params, cfg, mesh=mesh, rows=batch_size, prefix_lm=prefix_lm, **more)
        self._params, self._text, self._batch_size = params, tokenizer, batch_size
        self._seed, self._calls, self._prefix_lm = seed, 0, prefix_lm
        self._predicts_start = start is None  # the other backends count it in a text's log-probability
        self._start = template_start(tokenizer) if start is None else list(start)
        self._ids: dict[str, np.ndarray] = {}  # of the texts that are asked for now
        self.max_length = cfg.context_length
        self.max_gen_toks = min(MAX_GEN_TOKS, self.max_length // 2)

    @classmethod
    def of_run(cls, workdir: str | Path, *, mesh: str | None = None, batch_size: int = 8, seed: int = 0) -> Any:
        """The newest valid checkpoint of a run.

        Args:
          workdir: of the run. Before every text stands what stood before each document that it was trained on; of an
            imported model, what its tokenizer's template says.
          mesh: as `pretrain.mesh_of` reads it.
          batch_size, seed: see above.

        Raises:
          ConfigError: as above, or there is no run; CheckpointError: it has no valid checkpoint.
        """
        config: Config = manifest.read_config(workdir)
        cfg = language_model(config.model, f"--workdir: {workdir}")
        check_installed()
        tokenizer, devices = tokenizer_of(workdir), mesh_of(workdir, mesh)
        execution = fallback_to_auto(config.execution)
        model = make_model(cfg, config.loss, execution)
        specs = make_model(cfg, config.loss, execution, tune=config.tune.of_weights).specs  # with adapters, if any
        params, step = params_of(workdir, laid_out(specs, devices))
        params = plain_params(params, config.tune, param_shardings(model.specs, devices))
        frozen = None
        if model.frozen is not None:
            frozen = params_of(workdir, laid_out(model.frozen, devices), step, "frozen")[0]
        start = None if "imported" in manifest.read(workdir) else [tokenizer.separator_id]
        made = cls(
            params, cfg, tokenizer, mesh=devices, batch_size=batch_size, start=start, seed=seed, frozen=frozen,
            prefix_lm=config.data.objective == "prefix_lm", execution=execution, loss=config.loss,
        )  # fmt: skip
        made.step = step
        return made

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self._text.stop_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        return self._text.separator_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; without `add_special_tokens=False` with what stands before every text."""
        ids = self._ids[string] if string in self._ids else self._text.encode(string)
        return [*([] if add_special_tokens is False else self._start), *ids.tolist()]

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, greedy) of each continuation; args: (context, continuation)."""
        pairs = [request.args for request in requests]
        self._encode([text for context, more in pairs for text in (context.rstrip(), context + more)])
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **kwargs: Any) -> list:
        found = []
        for (context, continuation), before, ids in requests:
            if not ids:
                line = f"{continuation!r} has no token of its own after {context[-20:]!r}"
                raise ConfigError(f"continuation: {line}; accepted: one that the tokenizer keeps apart")
            found.append((before or [self.prefix_token_id], ids))  # of a context that is nothing but space
        with _bar("log-probabilities", len(found)) as bar:
            answers = [tuple(each) for each in self._score(found, bar.update)]
        for (asked, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", asked, answer)
        return answers

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in nats; args: (text,). Each token is predicted once; where a text is
        longer than the context, those of the next window see one token of the window before, and more in the last."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        texts = [request.args[0] for request in requests]
        self._encode(texts)
        windows, counts = [], []
        for text in texts:
            ids = self.tok_encode(text, add_special_tokens=None if self._predicts_start else False)
            found = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            windows += (mine := list(map(make_disjoint_window, found)))
            counts.append(len(mine))
        with _bar("log-probabilities", len(windows)) as bar:
            scores = [each.log_prob for each in self._score(windows, bar.update)]
        ends = np.cumsum(counts).tolist()
        totals = [sum(scores[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to a stop text or the end of the document; args: (context, settings)."""
        from lm_eval.models.utils import normalize_gen_kwargs

        self._encode([request.args[0] for request in requests])
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        out = [""] * len(requests)
        with _bar("continuations", len(requests)) as bar:
            for group in groups.values():
                settings = dict(normalize_gen_kwargs(requests[group[0]].args[1], self.max_gen_toks))
                for number, text in self._continued([(n, requests[n].args[0]) for n in group], settings):
                    out[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(1)
        return out

    def _continued(self, contexts: list[tuple[int, str]], settings: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Continuations of numbered contexts with the same settings, in batches of like length."""
        new, sampling = settings["max_gen_toks"], _sampling(settings)
        room = self.max_length - new
        if room < 1:
            raise ConfigError(
                f"max_gen_toks: {new} new tokens of a context of {self.max_length}; accepted: less, as by "
                f"--gen-kwargs=max_gen_toks={self.max_gen_toks}"
            )
        end = self._text.decode([self.eot_token_id], skip_specials=False)
        until = [text for text in (*settings["until"], end) if text]
        ids = [(number, (self.tok_encode(text) or [self.prefix_token_id])[-room:]) for number, text in contexts]
        ids.sort(key=lambda each: -len(each[1]))
        shards = batch_shards(self._score.mesh)
        rows = -(-min(self._batch_size, 1 << (len(ids) - 1).bit_length()) // shards) * shards  # of few numbers
        for first in range(0, len(ids), rows):
            batch = ids[first : first + rows]
            prompts = [prompt for _, prompt in batch] + [batch[-1][1]] * (rows - len(batch))
            texts = self._generated(prompts, len(batch), new, sampling, until)
            yield from zip((number for number, _ in batch), texts, strict=True)

    def _generated(
        self, prompts: list[list[int]], count: int, new: int, sampling: decoding.Sampling, until: list[str]
    ) -> list[str]:
        """The first `count` continuations. A stop text may be split into tokens in any way, so the text is searched."""
        self._calls += 1
        cfg, text = self._score.cfg, self._text
        named = np.intersect1d(text.ids_of([(name,) for name in until]), text.special_ids)
        tokens: list[list[int]] = [[] for _ in range(count)]
        ended = [False] * count
        with jax.set_mesh(self._score.mesh):
            for block in decoding.stream(
                self._params, prompts, cfg, max_new_tokens=new, sampling=sampling, prefix_lm=self._prefix_lm,
                rng=jax.random.fold_in(jax.random.key(self._seed), self._calls),
                stop=sorted({self.eot_token_id, *named.tolist()}),
                suppress=range(text.vocab_size, cfg.vocab_size or 0),
            ):  # fmt: skip
                for row in range(count):
                    tokens[row] += block.tokens[row, : block.lengths[row]].tolist()
                    ended[row] |= bool(block.stopped[row]) or _cut(whole := text.decode(tokens[row]), until) != whole
                if all(ended):
                    break
        return [_cut(text.decode(each), until) for each in tokens]

    def _encode(self, texts: Sequence[str]) -> None:
        """Tokenises all texts at once, each once, for the calls that follow."""
        each = list(dict.fromkeys(texts))
        self._ids = dict(zip(each, self._text.encode_batch(each), strict=True))


def _cut(text: str, until: Sequence[str]) -> str:
    return text[: min((text.index(stop) for stop in until if stop in text), default=len(text))]


def _sampling(settings: dict[str, Any]) -> decoding.Sampling:
    """How tokens are chosen. Raises ConfigError: a setting that means something we cannot do."""
    for name in sorted(settings.keys() - IGNORED):
        raise ConfigError(f"generation_kwargs.{name}: {settings[name]!r}; accepted: {', '.join(sorted(IGNORED))}")
    given = {name: settings[name] for name in SAMPLING if settings.get(name) is not None}
    if not settings.get("do_sample"):
        given = {name: value for name, value in given.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    return decoding.Sampling(**given)


def _bar(about: str, total: int) -> Any:
    """A progress bar on standard error, where that is a terminal."""
    from tqdm import tqdm

    return tqdm(desc=about, total=total, disable=not sys.stderr.isatty())

"""Continue a prompt with a trained GPT, or answer a source with a trained encoder-decoder.

    jaxformer generate --workdir=runs/gpt_tiny --prompt='def '
    jaxformer generate --workdir=runs/gpt_tiny --prompt='import ' --temperature=0 --stream
    jaxformer generate --workdir=runs/gpt_tiny --prompt='class ' --beam=4
    jaxformer generate --workdir=runs/gpt_tiny --prompt='def ' --prompt='class '
    jaxformer generate --workdir=runs/t5_tiny --source='import <extra_id_0>' --beam=4

Several prompts are continued at once and printed one after the other, each as if it were alone. A sample ends
when the model ends the document, before a --stop text, or after --max-new-tokens. With --source, a --prompt is the
beginning of the answer.
"""

import argparse
import codecs
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import add_workdir, finite, integer, parser
from jaxformer.runtime.program import keep_compiled_programs

if TYPE_CHECKING:
    from jaxformer.config import ModelConfig
    from jaxformer.data.decoding_text import DecodingText
    from jaxformer.decoding import Generated, Sampling
    from jaxformer.runs.pretrain import Run


def main() -> None:
    """Prints each sample: the prompt and its continuation."""
    arguments = parser(__doc__, "generate")
    add_workdir(arguments)
    arguments.add_argument(
        "--prompt", action="append", help="text to continue; repeatable; empty: the beginning of a document"
    )
    arguments.add_argument(
        "--source", action="append", default=[], metavar="TEXT", help="text that an encoder-decoder reads; repeatable"
    )
    arguments.add_argument("--max-new-tokens", type=integer(1), default=128, metavar="N", help="at most so many (128)")
    arguments.add_argument("--num-samples", type=integer(1), default=1, metavar="N", help="of each prompt (1)")
    arguments.add_argument("--seed", type=integer(0, 2**31 - 1), default=0, help="of the samples (0)")
    arguments.add_argument("--temperature", type=finite, help="0: always the likeliest token (default 0.8)")
    arguments.add_argument("--top-k", type=integer(1), metavar="K", help="only the K likeliest tokens")
    arguments.add_argument("--top-p", type=finite, metavar="P", help="only the likeliest tokens of total probability P")
    arguments.add_argument("--min-p", type=finite, metavar="P", help="only tokens P times as likely as the likeliest")
    arguments.add_argument(
        "--repetition-penalty", type=finite, metavar="F", help="above 1: discourages repetition (default 1)"
    )
    arguments.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    arguments.add_argument("--beam", type=integer(1), metavar="N", help="beam search with N beams instead of sampling")
    arguments.add_argument("--length-penalty", type=finite, help="of the beam search; above 0: prefers longer texts")
    arguments.add_argument("--stream", action="store_true", help="print the text as it comes (one sample)")
    options = arguments.parse_args()
    options.prompt = options.prompt or [""]
    if len(options.source) > 1 and len(options.prompt) == 1:
        options.prompt = options.prompt * len(options.source)

    from jaxformer import decoding
    from jaxformer.data.decoding_text import decoding_text
    from jaxformer.runs.pretrain import open_run

    check(options)
    sampling = decoding.Sampling(
        temperature=0.8 if options.temperature is None else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
    )
    run = open_run(options.workdir, options.mesh)
    if run.config.compilation_cache:
        keep_compiled_programs()
    text = decoding_text(run.tokenizer, run.config)
    parts = generated(run, text, sampling, options)
    if options.stream:
        print(options.prompt[0], end="", flush=True)
    prompts = [prompt for prompt in options.prompt for _ in range(options.num_samples)]
    texts = [Text(text.pieces, options.stop) for _ in prompts]
    for _ in taken(parts, texts):
        if options.stream:
            print(texts[0].news(), end="", flush=True)
    exist = [(prompt, each) for prompt, each in zip(prompts, texts, strict=True) if each.tokens]  # not all beams do
    for number, (prompt, each) in enumerate(exist, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(exist)}")
        print(each.news() if options.stream else prompt + each.news())
    full = [each for _, each in exist if not each.ended and each.tokens < options.max_new_tokens]
    if full:
        context = f"the context of {run.config.model.context_length} tokens"
        print(f"note: {context} is full; learned positions cannot extend it", file=sys.stderr)


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that contradict each other, before anything is loaded."""
    samples, beam = options.num_samples, options.beam
    if options.stream and (samples > 1 or beam is not None):
        raise ConfigError("--stream: prints one sample; leave out --num-samples and --beam")
    if options.stream and len(options.prompt) > 1:
        raise ConfigError(f"--stream: prints one sample; accepted: one --prompt, not {len(options.prompt)}")
    if beam is not None and beam < samples:
        raise ConfigError(f"--beam: {beam}; accepted: at least --num-samples, {samples}")
    if "" in options.stop:
        raise ConfigError("--stop: ''; accepted: a text")
    # Beam search does not sample, and sampling has no length penalty.
    sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    why = "without --beam; accepted: beside --beam" if beam is None else "with --beam; accepted: leave out one of them"
    for name in ("length_penalty",) if beam is None else sampling:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(options, name):g} has no effect {why}")


def generated(
    run: "Run", text: "DecodingText", sampling: "Sampling", options: argparse.Namespace
) -> "Iterator[Generated]":
    """The new tokens of all samples, all at once or in blocks.

    Raises:
      ConfigError: the run cannot generate, or the prompt or the sources do not fit it.
    """
    import jax
    import numpy as np

    from jaxformer import decoding
    from jaxformer.decoding.request import check_task
    from jaxformer.functional.position_encodings import encoding_of
    from jaxformer.models.families import families_for
    from jaxformer.runs import memory_check

    cfg = run.config.model
    if cfg.family not in (able := families_for("generate")):
        raise ConfigError(f"--workdir: {options.workdir} holds a {cfg.family}; generate needs a {' or '.join(able)}")
    check_task("generate", cfg)
    check_sources(cfg, options)
    ids, sources = list(map(text.prompt, options.prompt)), list(map(text.source, options.source))
    tokens = max(map(len, ids)) + options.max_new_tokens
    if not encoding_of(cfg).extends:
        tokens = min(tokens, cfg.context_length)
    flags = "--num-samples and --max-new-tokens" if options.beam is None else "--beam and --max-new-tokens"
    rows, kept = len(ids) * (options.beam or options.num_samples), len(ids) if options.beam else None
    memory_check.check_decoding(cfg, rows, tokens, flags, kept)
    common: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens, "stop": [text.end], "suppress": text.suppress,
        "prefix_lm": run.config.data.objective == "prefix_lm",
    }  # fmt: skip
    if options.beam is not None:
        found = decoding.beam_search(
            run.params, ids, cfg, beams=options.beam, length_penalty=options.length_penalty or 0.0,
            sources=sources or None, **common,
        )  # fmt: skip
        best = [x[:, : options.num_samples] for x in (found.tokens, found.lengths, found.log_probs, found.stopped)]
        return iter([decoding.Generated(*(x.reshape(-1, *x.shape[2:]) for x in best))])
    prompts = [prompt for prompt in ids for _ in range(options.num_samples)]
    samples = np.arange(len(prompts)) % options.num_samples  # a prompt gets the keys that it would get alone
    rngs = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(options.seed), samples)
    repeated = [source for source in sources for _ in range(options.num_samples)]
    common |= {"sampling": sampling, "rng": rngs, "sources": repeated or None}
    # A stop text may be split into tokens in any way, so the text is searched, block by block.
    if options.stream or options.stop:
        return decoding.stream(run.params, prompts, cfg, **common)
    return iter([decoding.generate(run.params, prompts, cfg, **common)])


def check_sources(cfg: "ModelConfig", options: argparse.Namespace) -> None:
    """Raises ConfigError: a source that the family does not read, or none where it reads one; not one prompt each."""
    prompts, sources = len(options.prompt), len(options.source)
    if cfg.encoder is None and sources:
        raise ConfigError(f"--source: model.family={cfg.family} of {options.workdir} reads none; accepted: --prompt")
    if cfg.encoder is not None and not sources:
        raise ConfigError(f"--source: model.family={cfg.family} of {options.workdir} reads one; accepted: a text")
    if sources and prompts != sources:
        raise ConfigError(f"--prompt: {prompts} beside {sources} of --source; accepted: none, one, or one for each")


def taken(parts: "Iterable[Generated]", texts: "Sequence[Text]") -> "Iterator[Generated]":
    """Appends each part's tokens to the texts, until all of them have ended."""
    for part in parts:
        for text, tokens, count, stopped in zip(texts, part.tokens, part.lengths, part.stopped, strict=True):
            text.add(tokens[:count], ended=bool(stopped))
        yield part
        if all(text.ended for text in texts):
            break
    for text in texts:
        text.add([], ended=text.ended, final=True)


class Text:
    """Decodes tokens incrementally into whole characters, up to the first stop text.

    Attributes:
      tokens: number of tokens so far.
      ended: True after a stop text or the end of the document.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()):
        """`pieces`: the bytes of each token; `stops`: texts to stop before."""
        self._pieces, self._stops = pieces, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._news, self._cut = "", "", False
        self.tokens, self.ended = 0, False

    def add(self, tokens: Sequence[int], *, ended: bool = False, final: bool = False) -> None:
        """Appends tokens; `final`: they are the last ones."""
        self.tokens, self.ended = self.tokens + len(tokens), self.ended or ended
        if self._cut:
            return
        # A character's bytes may be split between tokens; a possible beginning of a stop text is held back.
        text = self._held + self._decoder.decode(b"".join(self._pieces[i] for i in tokens), final=final)
        found = [text.index(stop) for stop in self._stops if stop in text]
        if found:
            self._cut = self.ended = True
        sure = min(found) if found else len(text) if final else len(text) - self._open(text)
        self._news, self._held = self._news + text[:sure], text[sure:]

    def _open(self, text: str) -> int:
        """Number of characters at the end of `text` that may be the beginning of a stop text."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        ends = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops))
        return next(ends, 0)

    def news(self) -> str:
        """The text that became final since the last call."""
        news, self._news = self._news, ""
        return news

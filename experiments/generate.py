"""Continue a prompt with a trained GPT.

    python -m experiments.generate --workdir=runs/gpt_tiny --prompt='def '
    python -m experiments.generate --workdir=runs/gpt_tiny --prompt='import ' --temperature=0 --stream
    python -m experiments.generate --workdir=runs/gpt_tiny --prompt='class ' --beam=4

A sample ends with its document (the model says so), before a --stop text, or after --max-new-tokens.
"""

import argparse
import codecs
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxformer.runs.command_line import add_workdir, finite, integer, parser
from jaxformer.runtime.program import keep_compiled_programs, program

if TYPE_CHECKING:
    from jaxformer.decoding import Generated, Sampling
    from jaxformer.runs.pretrain import Run


def main() -> None:
    """Prints each sample: the prompt and what follows it."""
    arguments = parser(__doc__, "generate")
    add_workdir(arguments)
    arguments.add_argument("--prompt", default="", help="text to continue; empty: the beginning of a document")
    arguments.add_argument("--max-new-tokens", type=integer(1), default=128, metavar="N")
    arguments.add_argument("--num-samples", type=integer(1), default=1, metavar="N")
    arguments.add_argument("--seed", type=integer(0, 2**31 - 1), default=0)
    arguments.add_argument("--temperature", type=finite, help="0: always the likeliest token (default 0.8)")
    arguments.add_argument("--top-k", type=integer(1), metavar="K", help="only the K likeliest tokens")
    arguments.add_argument("--top-p", type=finite, metavar="P", help="only the likeliest tokens that make up P")
    arguments.add_argument("--min-p", type=finite, metavar="P", help="only tokens P times as likely as the likeliest")
    arguments.add_argument(
        "--repetition-penalty", type=finite, metavar="F", help="above 1: against repetition (default 1)"
    )
    arguments.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    arguments.add_argument("--beam", type=integer(1), metavar="N", help="no sampling: the likeliest texts N beams find")
    arguments.add_argument("--length-penalty", type=finite, help="of the beam search; above 0: longer texts")
    arguments.add_argument("--stream", action="store_true", help="print the text as it comes (one sample)")
    options = arguments.parse_args()

    from jaxformer import decoding
    from jaxformer.runs.pretrain import open_run

    check(options)
    sampling = decoding.Sampling(
        temperature=0.8 if options.temperature is None else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
    )
    run = open_run(options.workdir)
    if run.config.compilation_cache:
        keep_compiled_programs()
    parts = generated(run, sampling, options)
    if options.stream:
        print(options.prompt, end="", flush=True)
    texts = [Text(run.tokenizer.pieces, options.stop) for _ in range(options.num_samples)]
    for _ in taken(parts, texts):
        if options.stream:
            print(texts[0].news(), end="", flush=True)
    for number, text in enumerate(texts, 1):
        if options.num_samples > 1:
            print(f"--- {number} of {options.num_samples}")
        print(text.news() if options.stream else options.prompt + text.news())
    full = [text for text in texts if not text.ended and text.tokens < options.max_new_tokens]
    if full:
        context = f"the context of {run.config.model.context_length} tokens"
        print(f"note: {context} is full; learned positions cannot extend it", file=sys.stderr)


def check(options: argparse.Namespace) -> None:
    """Refuses flags that contradict each other, before anything is loaded."""
    from jaxformer.errors import ConfigError

    samples, beam = options.num_samples, options.beam
    if options.stream and (samples > 1 or beam is not None):
        raise ConfigError("--stream: prints one sample; leave out --num-samples and --beam")
    if beam is not None and beam < samples:
        raise ConfigError(f"--beam: {beam}; accepted: at least --num-samples, {samples}")
    if "" in options.stop:
        raise ConfigError("--stop: ''; accepted: a text")
    # A beam search draws no numbers, and sampling ranks no texts.
    alone = {False: ("length_penalty",), True: ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    for name in alone[beam is not None]:
        if getattr(options, name) is not None:
            accepted = "leave out one of them" if beam is not None else "beside --beam"
            raise ConfigError(
                f"--{name.replace('_', '-')}: {getattr(options, name):g} means nothing "
                f"{'with' if beam is not None else 'without'} --beam; accepted: {accepted}"
            )


def generated(run: "Run", sampling: "Sampling", options: argparse.Namespace) -> "Iterator[Generated]":
    """The new tokens of all samples, in one part or in blocks.

    Raises:
      ConfigError: the run holds no GPT, or the prompt does not fit it.
    """
    import jax

    from jaxformer import decoding
    from jaxformer.config import Learned
    from jaxformer.errors import ConfigError
    from jaxformer.models.families import families_for
    from jaxformer.runs import memory_check

    tokenizer, cfg = run.tokenizer, run.config.model
    if cfg.family not in (able := families_for("generate")):
        raise ConfigError(f"--workdir: {options.workdir} holds a {cfg.family}; generate needs a {' or '.join(able)}")
    # Documents began with the separator in training, so the prompt does here; the next separator is their end.
    ids = [tokenizer.separator_id, *tokenizer.encode(options.prompt, strict=True).tolist()]
    never = set(tokenizer.special_ids.tolist()) | set(range(tokenizer.vocab_size, cfg.vocab_size or 0))
    tokens = len(ids) + options.max_new_tokens
    if isinstance(cfg.positions, Learned):
        tokens = min(tokens, cfg.context_length)
    flags = "--num-samples and --max-new-tokens" if options.beam is None else "--beam and --max-new-tokens"
    memory_check.check_decoding(cfg, options.beam or options.num_samples, tokens, flags)
    common = {
        "max_new_tokens": options.max_new_tokens,
        "stop": [tokenizer.separator_id],
        "suppress": sorted(never - {tokenizer.separator_id}),
    }
    if options.beam is not None:
        found = decoding.beam_search(
            run.params, [ids], cfg, beams=options.beam, length_penalty=options.length_penalty or 0.0, **common
        )
        first = [x[0, : options.num_samples] for x in (found.tokens, found.lengths, found.log_probs, found.stopped)]
        return iter([decoding.Generated(*first)])
    common |= {"sampling": sampling, "rng": jax.random.key(options.seed)}
    prompts = [ids] * options.num_samples
    # A stop text may lie in tokens of any kind, so it is looked for in the text, block by block.
    if options.stream or options.stop:
        return decoding.stream(run.params, prompts, cfg, **common)
    return iter([decoding.generate(run.params, prompts, cfg, **common)])


def taken(parts: "Iterable[Generated]", texts: "Sequence[Text]") -> "Iterator[Generated]":
    """Hands each part's tokens to the texts, until all of them have ended."""
    for part in parts:
        for text, tokens, count, stopped in zip(texts, part.tokens, part.lengths, part.stopped, strict=True):
            text.add(tokens[:count], ended=bool(stopped))
        yield part
        if all(text.ended for text in texts):
            break
    for text in texts:
        text.add([], ended=text.ended, final=True)


class Text:
    """The text of tokens that come bit by bit: whole characters only, and nothing from the first stop text on.

    Attributes:
      tokens: number of them so far.
      ended: True if a stop text, or the document's end, came.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()):
        """`pieces`: the bytes each token stands for; `stops`: texts to end before."""
        self._pieces, self._stops = pieces, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._news, self._cut = "", "", False
        self.tokens, self.ended = 0, False

    def add(self, tokens: Sequence[int], *, ended: bool = False, final: bool = False) -> None:
        """Takes in more tokens; `final`: there will be no more."""
        self.tokens, self.ended = self.tokens + len(tokens), self.ended or ended
        if self._cut:
            return
        # A character's bytes may lie in two tokens; what may be the beginning of a stop text is held back.
        text = self._held + self._decoder.decode(b"".join(self._pieces[i] for i in tokens), final=final)
        found = [text.index(stop) for stop in self._stops if stop in text]
        if found:
            self._cut = self.ended = True
        sure = min(found) if found else len(text) if final else len(text) - self._open(text)
        self._news, self._held = self._news + text[:sure], text[sure:]

    def _open(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop text."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        ends = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops))
        return next(ends, 0)

    def news(self) -> str:
        """What has become certain since the last call."""
        news, self._news = self._news, ""
        return news


if __name__ == "__main__":
    program(main)

"""Continue a prompt with a trained GPT.

    python -m experiments.generate --workdir=runs/gpt_tiny --prompt='def '
    python -m experiments.generate --workdir=runs/gpt_tiny --prompt='import ' --temperature=0 --num-samples=1
    python -m experiments.generate --workdir=runs/gpt_tiny --prompt='class ' --beam=4

A sample ends with its document (the model says so) or after --max-new-tokens.
"""

import codecs
import sys

from jaxformer.command_line import parser
from jaxformer.process import keep_compiled_programs, program


def main() -> None:
    """Prints each sample: the prompt and what follows it."""
    arguments = parser(__doc__, "generate")
    arguments.add_argument("--workdir", required=True, help="directory of the run")
    arguments.add_argument("--prompt", default="", help="text to continue; empty: the beginning of a document")
    arguments.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    arguments.add_argument("--num-samples", type=int, default=1, metavar="N")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    arguments.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    arguments.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that make up P")
    arguments.add_argument("--min-p", type=float, metavar="P", help="only tokens P times as likely as the likeliest")
    arguments.add_argument("--repetition-penalty", type=float, default=1.0, metavar="F", help="above 1: against repetition")
    arguments.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    arguments.add_argument("--beam", type=int, metavar="N", help="search with N beams instead of sampling")
    arguments.add_argument("--length-penalty", type=float, default=0.0, help="of the beam search")
    arguments.add_argument("--stream", action="store_true", help="print the text as it comes (one sample)")
    options = arguments.parse_args()

    import jax
    import numpy as np

    from jaxformer import decoding
    from jaxformer.config import ConfigError
    from jaxformer.main import open_run

    if options.num_samples < 1:
        raise ConfigError(f"--num-samples: {options.num_samples}; accepted: at least 1")
    if options.stream and (options.num_samples > 1 or options.beam is not None):
        raise ConfigError("--stream: prints one sample; leave out --num-samples and --beam")
    run = open_run(options.workdir)
    if run.config.model.family != "gpt":
        raise ConfigError(f"--workdir: {options.workdir} holds a {run.config.model.family}; generate needs a gpt")
    if run.config.compilation_cache:
        keep_compiled_programs()
    tokenizer, cfg = run.tokenizer, run.config.model
    # Documents began with the separator in training, so the prompt does here; the next separator is their end.
    ids = [tokenizer.separator_id, *tokenizer.encode(options.prompt, strict=True).tolist()]
    never = set(tokenizer.special_ids.tolist()) | set(range(tokenizer.vocab_size, cfg.vocab_size or 0))
    common = {
        "max_new_tokens": options.max_new_tokens,
        "stop": [tokenizer.separator_id, *(tokenizer.encode(text, strict=True).tolist() for text in options.stop)],
        "suppress": sorted(never - {tokenizer.separator_id}),
    }
    if options.beam is not None:
        beams = decoding.beam_search(
            run.params, [ids], cfg, beams=options.beam, length_penalty=options.length_penalty, **common
        )
        tokens, lengths = np.asarray(beams.tokens)[0], np.asarray(beams.lengths)[0]
        for number in range(min(options.num_samples, len(lengths))):
            show(options.prompt, tokenizer.decode(tokens[number, : lengths[number]]), number, options.num_samples)
        return
    sampling = decoding.Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    rng = jax.random.key(options.seed)
    if options.stream:
        # A character's bytes may lie in two tokens, and in two blocks.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        print(options.prompt, end="", flush=True)
        for part in decoding.stream(run.params, [ids], cfg, sampling=sampling, rng=rng, **common):
            new = part.tokens[0, : part.lengths[0]]
            print(decoder.decode(b"".join(tokenizer.pieces[i] for i in new)), end="", flush=True)
        print(decoder.decode(b"", final=True))
        return
    rngs = jax.random.split(rng, options.num_samples)
    out = decoding.generate(run.params, [ids] * options.num_samples, cfg, sampling=sampling, rng=rngs, **common)
    for number in range(options.num_samples):
        text = tokenizer.decode(out.tokens[number, : out.lengths[number]])
        show(options.prompt, text, number, options.num_samples)


def show(prompt: str, text: str, number: int, samples: int) -> None:
    """One sample; a line before it where there are several."""
    if samples > 1:
        print(f"--- {number + 1} of {samples}")
    sys.stdout.write(prompt + text + "\n")


if __name__ == "__main__":
    program(main)

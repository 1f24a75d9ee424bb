"""Fill in each [MASK] of a text with a trained BERT or Funnel-Transformer.

    jaxformer fill-mask --workdir=runs/bert_tiny --text='for i in [MASK](10):'

A mask stands for one token, including the space before it; words of several tokens cannot be predicted.
"""

from jaxformer.runs.command_line import add_workdir, integer, parser
from jaxformer.runtime.program import keep_compiled_programs


def main() -> None:
    """Prints the most probable tokens for each mask, with their probabilities."""
    arguments = parser(__doc__, "fill-mask")
    add_workdir(arguments)
    arguments.add_argument("--text", required=True, action="append", help="text with [MASK] in it; repeatable")
    arguments.add_argument("--top-k", type=integer(1), default=5, metavar="K", help="tokens shown for each mask")
    options = arguments.parse_args()

    import numpy as np

    from jaxformer import decoding
    from jaxformer.errors import ConfigError
    from jaxformer.models.families import families_for
    from jaxformer.runs.pretrain import open_run

    run = open_run(options.workdir, options.mesh)
    family, able = run.config.model.family, families_for("fill_mask")
    if family not in able:
        raise ConfigError(f"--workdir: {options.workdir} holds a {family}; fill_mask needs a {' or '.join(able)}")
    for text in options.text:
        if "[MASK]" not in text:
            raise ConfigError(f"--text: {text!r} holds no [MASK]")
    if run.config.compilation_cache:
        keep_compiled_programs()
    tokenizer, cfg = run.tokenizer, run.config.model
    inside = [tokenizer.encode(text, strict=True, specials=True).tolist() for text in options.text]
    # As in training: rows of pairs are [CLS] A [SEP]; all others are documents, which start with the separator, and end
    # in a token of their own if the model came from elsewhere.
    end = [] if tokenizer.stop_id == tokenizer.separator_id else [tokenizer.stop_id]
    pairs = run.config.data.pairs
    ids = [[tokenizer.cls_id, *x, tokenizer.sep_id] if pairs else [tokenizer.separator_id, *x, *end] for x in inside]
    never = sorted(set(tokenizer.special_ids.tolist()) | set(range(tokenizer.vocab_size, cfg.vocab_size or 0)))
    top_k = min(options.top_k, tokenizer.vocab_size - len(tokenizer.special_ids))
    out = decoding.fill_mask(run.params, ids, cfg, tokenizer.mask_id, top_k=top_k, suppress=never)
    for row, text in enumerate(options.text):
        print(text)
        for number, at in enumerate(np.flatnonzero(out.rows == row), 1):
            shown = [
                f"{tokenizer.decode([token])!r} {100 * chance:.1f} %"
                for token, chance in zip(out.tokens[at], out.probabilities[at], strict=True)
            ]
            print(f"mask {number}: {', '.join(shown)}")

"""The programs generate and fill_mask: what they print for a (stubbed) run, and one line for what they refuse."""

import re

import jax
import numpy as np
import pytest

from jaxformer.config import from_mapping
from jaxformer.data import tokenizers
from jaxformer.models import bert, gpt
from jaxformer.programs import fill_mask, generate
from jaxformer.runs import pretrain as jaxformer_main
from jaxformer.runtime.program import program
from jaxformer.specs import is_spec

BYTES = tokenizers.train("bytes", [], None)
CHARS = tokenizers.train("chars", ["abcdefgh "], None)
TINY = {"num_layers": 1, "width": 32, "num_heads": 2, "context_length": 48, "positions": "learned"}


def run_of(tokenizer=BYTES, pairs=False, **changes):
    """A run whose model predicts with conviction, mostly by the last token."""
    bert_like = changes.get("family") == "bert"
    extra = {"token_types": 2, "next_sentence": True} if pairs else {}
    config = from_mapping({
        "compilation_cache": False,
        "model": {**TINY, "vocab_size": -(-tokenizer.vocab_size // 64) * 64, **extra, **changes},
        "data": {"objective": "masked" if bert_like else "next_token", "pairs": pairs},
    })  # fmt: skip
    rng = np.random.default_rng(5)
    specs = (bert if bert_like else gpt).specs(config.model)
    params = jax.tree.map(lambda s: rng.normal(0, 0.5, s.shape).astype(np.float32), specs, is_leaf=is_spec)
    return jaxformer_main.Run(config, jax.device_put(params), tokenizer, 7)


@pytest.fixture
def play(monkeypatch, capsys):
    """play(module, run, *flags): exit code, standard output, standard error."""

    def play(module, run, *flags):
        if run is not None:
            monkeypatch.setattr(jaxformer_main, "open_run", lambda workdir, mesh: run)
        monkeypatch.setattr("sys.argv", ["program", "--workdir=runs/x", *flags])
        with pytest.raises(SystemExit) as end:
            program(module.main)
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return play


@pytest.mark.slow
def test_samples_continue_the_prompt_and_repeat_with_the_seed(play):
    run = run_of()
    code, out, err = play(generate, run, "--prompt=ab", "--max-new-tokens=12")
    assert (code, err) == (0, "") and out.startswith("ab") and out.endswith("\n") and len(out) > 3
    assert play(generate, run, "--prompt=ab", "--max-new-tokens=12")[1] == out
    assert play(generate, run, "--prompt=ab", "--max-new-tokens=12", "--seed=1")[1] != out
    # The first of several is the only one of one.
    several = play(generate, run, "--prompt=ab", "--max-new-tokens=12", "--num-samples=3")[1]
    parts = several.split("--- ")
    assert [part.split("\n")[0] for part in parts[1:]] == ["1 of 3", "2 of 3", "3 of 3"]
    assert parts[1] == "1 of 3\n" + out and len(set(parts[1:])) == 3
    assert play(generate, run, "--prompt=ab", "--max-new-tokens=12", "--stream") == (0, out, "")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--beam=2", "--num-samples=2"], ["--num-samples=2", "--stop=e"]], ids=str)
def test_several_prompts_are_continued_as_each_alone(play, flags):
    """Only the last of them was."""
    run, prompts = run_of(positions="rotary"), ("abc de", "")
    flags = ["--max-new-tokens=6", *flags]
    each = [play(generate, run, f"--prompt={prompt}", *flags)[1] for prompt in prompts]
    code, out, err = play(generate, run, *(f"--prompt={prompt}" for prompt in prompts), *flags)
    alone = [re.sub(r"^--- \d of 2\n", "", text) for one in each for text in re.split(r"(?m)^(?=--- \d of 2$)", one)]
    alone = [text for text in alone if text]
    assert (code, err) == (0, "") and len(alone) in (2, 4)
    assert out == "".join(f"--- {i} of {len(alone)}\n{text}" for i, text in enumerate(alone, 1))


@pytest.mark.slow
def test_only_beams_that_exist_are_printed(play, monkeypatch):
    """Two tokens that may come, one new token: the third and fourth beam were texts of probability 0."""
    from jaxformer import decoding

    search, run = decoding.beam_search, run_of(CHARS)
    keep = CHARS.encode("ab").tolist()
    never = [i for i in range(run.config.model.vocab_size) if i not in keep]
    monkeypatch.setattr(decoding, "beam_search", lambda *a, **k: search(*a, **{**k, "suppress": never}))
    code, out, _ = play(generate, run, "--prompt=c", "--max-new-tokens=1", "--beam=4", "--num-samples=4")
    assert code == 0 and re.fullmatch(r"--- 1 of 2\nc[ab]\n--- 2 of 2\nc[ab]\n", out)


@pytest.mark.slow
def test_an_empty_prompt_begins_a_document_and_a_beam_prints_the_likeliest_texts(play):
    run = run_of(positions="rotary")
    code, out, _ = play(generate, run, "--max-new-tokens=5", "--temperature=0")
    assert code == 0 and len(out) > 1
    assert play(generate, run, "--max-new-tokens=5", "--beam=1")[1] == out
    assert play(generate, run, "--max-new-tokens=5", "--beam=3", "--num-samples=2")[1].count("--- ") == 2


@pytest.mark.slow
def test_the_full_context_is_noted_on_standard_error(play):
    code, out, err = play(generate, run_of(), "--prompt=ab", "--max-new-tokens=200")
    assert code == 0 and err == "note: the context of 48 tokens is full; learned positions cannot extend it\n"
    assert len(out.encode(errors="surrogateescape")) <= 200
    code, _, err = play(generate, run_of(positions="alibi"), "--prompt=ab", "--max-new-tokens=70")
    assert (code, err) == (0, "")


@pytest.mark.slow
def test_a_stop_text_ends_each_sample_before_it(play):
    run = run_of(CHARS)
    flags = ["--prompt=ab", "--max-new-tokens=40", "--num-samples=3"]
    whole = [part.split("\n", 1)[1].rstrip("\n") for part in play(generate, run, *flags)[1].split("--- ")[1:]]
    stop = whole[0][12:15]
    cut = [part.split("\n", 1)[1][:-1] for part in play(generate, run, *flags, f"--stop={stop}")[1].split("--- ")[1:]]
    assert cut == [text[: 2 + (text[2:] + stop).index(stop)] for text in whole] and cut[0] != whole[0]
    one = play(generate, run, *flags[:2], "--stream", f"--stop={stop}")[1]
    assert one == cut[0] + "\n"


def test_streamed_text_has_whole_characters_and_holds_back_what_may_be_a_stop():
    pieces = [b"", b"\xc3", b"\xa9", b"a", b"\n", b"\xf0\x9f", b"\x98\x80b"]
    text = generate.Text(pieces, ["\n\n", "xyz"])
    seen = []
    for token in (3, 1, 2, 5, 6, 4, 3, 4, 4, 3):
        text.add([token])
        seen.append(text.news())
    assert seen == ["a", "", "é", "", "😀b", "", "\na", "", "", ""]
    assert text.ended and text.tokens == 10
    open_end = generate.Text(pieces, ["\n\n"])
    open_end.add([3, 4, 1])
    assert open_end.news() == "a"
    open_end.add([], final=True)
    assert open_end.news() == "\n\ufffd" and not open_end.ended  # half a character is shown as one that is none


@pytest.mark.parametrize(
    ("flags", "changes", "line"),
    [
        (["--prompt=" + "x" * 60], {}, "prompt: 61 tokens are more than config.model.context_length 48"),
        (["--prompt=aXb"], {"tokenizer": CHARS}, "text: 'X' not in the vocabulary"),
        ([], {"family": "bert"}, "--workdir: runs/x holds a bert; generate needs a gpt"),
        (["--temperature=-1"], {}, "sampling.temperature: -1.0; accepted: 0 (greedy), or 1e-6 up"),
        (["--top-p=2"], {}, "sampling.top_p: 2.0; accepted: above 0, up to 1"),
        (["--max-new-tokens=0"], {}, "--max-new-tokens: 0; accepted: at least 1"),
        (["--num-samples=0"], {}, "--num-samples: 0; accepted: at least 1"),
        (["--beam=2", "--num-samples=3"], {}, "--beam: 2; accepted: at least --num-samples, 3"),
        (["--stream", "--num-samples=2"], {}, "--stream: prints one sample"),
        (["--stream", "--prompt=a", "--prompt=b"], {}, "--stream: prints one sample; accepted: one --prompt, not 2"),
        (["--stop="], {}, "--stop: ''; accepted: a text"),
        (["--seed=-1"], {}, "--seed: -1; accepted: 0 to 2147483647"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generate_refuses_in_one_line(play, flags, changes, line):
    code, out, err = play(generate, run_of(**changes), *flags)
    assert code == 2 and out == "" and err.startswith(f"error: {line}") and err.count("\n") == 1


@pytest.mark.parametrize("pairs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_masks_are_filled_with_what_the_model_says(play, pairs):
    run = run_of(family="bert", pairs=pairs, tokenizer=CHARS)
    code, out, err = play(fill_mask, run, "--text=ab[MASK]d[MASK]", "--top-k=3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "ab[MASK]d[MASK]" and len(lines) == 3
    a, b, d = CHARS.encode("abd").tolist()
    inside = [a, b, CHARS.mask_id, d, CHARS.mask_id]
    # As in training: pairs are [CLS] A [SEP], other rows begin with the separator.
    row = [CHARS.cls_id, *inside, CHARS.sep_id] if pairs else [CHARS.separator_id, *inside]
    logits = np.array(jax.jit(bert.apply, static_argnums=2)(run.params, np.array([row]), run.config.model)[0])
    logits[:, CHARS.special_ids] = logits[:, CHARS.vocab_size :] = -np.inf
    for line, position in zip(lines[1:], (3, 5), strict=True):
        chances = np.exp(logits[position] - logits[position].max())
        chances /= chances.sum()
        best = np.argsort(-chances)[:3]
        shown = ", ".join(f"{CHARS.decode([token])!r} {100 * chances[token]:.1f} %" for token in best)
        assert line == f"mask {1 if position == 3 else 2}: {shown}"


def test_several_texts_are_filled_in_as_each_alone(play):
    run, texts = run_of(family="bert", tokenizer=CHARS), ("--text=ab[MASK]d[MASK]", "--text=[MASK]ab cd")
    each = [play(fill_mask, run, text)[1] for text in texts]
    assert play(fill_mask, run, *texts) == (0, "".join(each), "")


@pytest.mark.parametrize(
    ("flags", "changes", "line"),
    [
        (["--text=abc"], {}, "--text: 'abc' holds no [MASK]"),
        (["--text=[MASK]", "--text=abc"], {}, "--text: 'abc' holds no [MASK]"),
        (["--text=[MASK]" + "a" * 60], {}, "text: 62 tokens are more than config.model.context_length 48"),
        (["--text=[MASK]X"], {}, "text: 'X' not in the vocabulary"),
        (["--text=[MASK]", "--top-k=0"], {}, "--top-k: 0; accepted: at least 1"),
        (["--text=[MASK]"], {"family": "gpt"}, "--workdir: runs/x holds a gpt; fill_mask needs a bert or funnel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fill_mask_refuses_in_one_line(play, flags, changes, line):
    code, out, err = play(fill_mask, run_of(**{"family": "bert", "tokenizer": CHARS, **changes}), *flags)
    assert code == 2 and out == "" and err.startswith(f"error: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(("module", "flag"), [(generate, "--prompt=a"), (fill_mask, "--text=[MASK]")])
def test_a_missing_run_is_one_line(play, module, flag):
    code, out, err = play(module, None, flag)
    assert code == 2 and out == "" and err.startswith("error: ") and "runs/x" in err and err.count("\n") == 1

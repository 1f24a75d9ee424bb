"""`generate --source` and `translate`: what they print and write for a (stubbed) run, resumption, refusals."""

import json
import os

import jax
import numpy as np
import pytest

from jaxformer import decoding
from jaxformer.config import from_mapping
from jaxformer.data import tokenizers
from jaxformer.data.decoding_text import decoding_text, text_of
from jaxformer.models.families import family_of
from jaxformer.programs import generate, translate
from jaxformer.runs import pretrain, translation
from jaxformer.runtime.program import program
from jaxformer.specs import is_spec

CHARS = tokenizers.train("chars", ["abcdefgh "], None)
LINES = ["abc", "", "hgfe dcba", "a", "bad cab", "face", "deaf"]


def run_of(objective="pairs", family="encoder_decoder", **model):
    tokenizer = CHARS
    source = {"source": "files", "files": ["a.tsv"]} if objective == "pairs" else {}
    config = from_mapping({
        "compilation_cache": False,
        "model": {"family": family, "num_layers": 1, "width": 32, "num_heads": 2, "context_length": 48,
                  **({"encoder": {"source_length": 12}} if family == "encoder_decoder" else {}), **model},
        "data": {"objective": objective, **source},
    })  # fmt: skip
    from jaxformer.config.registry import special_tokens

    tokenizer = tokenizer.with_tokens(special_tokens(config.data))
    vocab = -(-tokenizer.vocab_size // 64) * 64
    config = from_mapping({**vars(config), "model": {**vars(config.model), "vocab_size": vocab}})
    rng = np.random.default_rng(5)
    specs = family_of(config.model).specs(config.model)
    params = jax.tree.map(lambda s: rng.normal(0, 0.5, s.shape).astype(np.float32), specs, is_leaf=is_spec)
    return pretrain.Run(config, jax.device_put(params), tokenizer, 7)


@pytest.fixture
def play(monkeypatch, capsys):
    """play(module, run, *flags): exit code, standard output, standard error."""

    def play(module, run, *flags):
        monkeypatch.setattr(pretrain, "open_run", lambda workdir, mesh: run)
        monkeypatch.setattr("sys.argv", ["program", "--workdir=runs/x", *flags])
        with pytest.raises(SystemExit) as end:
            program(module.main)
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return play


@pytest.mark.slow
def test_a_source_is_answered_as_the_functions_do(play):
    run = run_of()
    text = decoding_text(run.tokenizer, run.config)
    code, out, _ = play(generate, run, "--source=abc", "--temperature=0", "--max-new-tokens=9")
    found = decoding.generate(
        run.params, [[CHARS.cls_id]], run.config.model, sources=[[*CHARS.encode("abc").tolist(), CHARS.sep_id]],
        sampling=decoding.Sampling(temperature=0), max_new_tokens=9, stop=[CHARS.sep_id], suppress=text.suppress,
    )  # fmt: skip
    assert code == 0 and out == text_of(text.pieces, found.tokens[0, : found.lengths[0]]) + "\n"
    flags = ["--temperature=0", "--max-new-tokens=9", "--prompt=ab"]
    each = [play(generate, run, f"--source={source}", *flags)[1] for source in ("abc", "face")]
    both = play(generate, run, "--source=abc", "--source=face", *flags)[1]
    assert both == f"--- 1 of 2\n{each[0]}--- 2 of 2\n{each[1]}" and each[0].startswith("ab")
    code, out, _ = play(generate, run, "--source=abc", "--beam=3", "--num-samples=2", "--max-new-tokens=5")
    assert code == 0 and out.count("--- ") == 2


def test_sentinels_are_typed_and_shown_by_their_names():
    run = run_of("span_corruption")
    text = decoding_text(run.tokenizer, run.config)
    first, second = run.tokenizer.ids_of([("<extra_id_0>",), ("<extra_id_1>",)]).tolist()
    a, b, space = CHARS.encode("ab ").tolist()
    assert text.source("a<extra_id_0> b<extra_id_1>") == [a, first, space, b, second, CHARS.sep_id]
    assert text_of(text.pieces, np.array([first, a, second])) == "<extra_id_0>a<extra_id_1>"
    assert first not in text.suppress and CHARS.mask_id in text.suppress and CHARS.sep_id not in text.suppress
    plain = decoding_text(run_of().tokenizer, run_of().config)
    assert plain.source("a b") == [a, space, b, CHARS.sep_id] and plain.named == {}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


FLAGS = ["--beam=2", "--rows=2", "--more-tokens=3"]


@pytest.mark.slow
def test_a_file_is_translated_line_by_line(play, file, tmp_path):
    run, out = run_of(), tmp_path / "out.txt"
    code, printed, err = play(translate, run, f"--file={file}", f"--output={out}", *FLAGS)
    assert code == 0 and printed == f"{out}: 7 lines translated\n" and "7 lines to translate" in err
    found = out.read_text().split("\n")
    assert len(found) == 8 and found[1] == found[7] == ""
    text = decoding_text(run.tokenizer, run.config)
    for number in (0, 2, 6):
        ids = text.source(LINES[number])
        best = decoding.beam_search(
            run.params, [[text.start]], run.config.model, beams=2, length_penalty=0.6, sources=[ids],
            max_new_tokens=len(ids) + 3, stop=[text.end], suppress=text.suppress,
        )  # fmt: skip
        assert found[number] == text_of(text.pieces, best.tokens[0, 0, : best.lengths[0, 0]]).strip()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]


@pytest.mark.slow
def test_what_was_killed_goes_on_where_it_was(play, file, tmp_path, monkeypatch):
    run, whole, out = run_of(), tmp_path / "whole.txt", tmp_path / "out.txt"
    assert play(translate, run, f"--file={file}", f"--output={whole}", *FLAGS)[0] == 0
    monkeypatch.setattr(translation, "BATCHES", 1)
    search, calls = decoding.beam_search, []

    def killed(*args, **options):
        calls.append(len(calls))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return search(*args, **options)

    monkeypatch.setattr(decoding, "beam_search", killed)
    assert play(translate, run, f"--file={file}", f"--output={out}", *FLAGS)[0] != 0
    partial = tmp_path / "out.txt.partial"
    lines = partial.read_text().count("\n")
    assert 0 < lines < 7 and not out.exists()
    with partial.open("a") as half:
        half.write("half a li")
    before = dict(json.loads((tmp_path / "out.txt.partial.json").read_text()))
    code, _, err = play(translate, run, f"--file={file}", f"--output={out}", "--beam=3", *FLAGS[1:])
    assert code == 2 and err.strip().endswith(
        f"error: --output: {partial} was begun with beams: 2 -> 3; accepted: another name, or remove it"
    )
    assert before["beams"] == 2 and before["lines"] == lines and partial.read_text().endswith("half a li")
    other = run._replace(params=jax.tree.map(lambda x: x + 1, run.params))  # the same step of another training
    code, _, err = play(translate, other, f"--file={file}", f"--output={out}", *FLAGS)
    assert code == 2 and f"{partial} was begun with weights: " in err
    written = partial.read_text()
    partial.write_text("x" + written[1:])
    code, _, err = play(translate, run, f"--file={file}", f"--output={out}", *FLAGS)
    assert code == 2 and f"{partial} is not what was written there; accepted: another name, or remove it" in err
    partial.write_text(written + "garbage\n" * 9)
    code, printed, err = play(translate, run, f"--file={file}", f"--output={out}", *FLAGS)
    assert code == 0 and f"{7 - lines} lines translated" in printed and f"{lines} of them are there" in err
    assert out.read_text() == whole.read_text()


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_finished(play, file, tmp_path, monkeypatch):
    run, out, sync = run_of(), tmp_path / "out.txt", os.fsync
    partial, freed = tmp_path / "out.txt.partial", tmp_path / "freed"
    monkeypatch.setattr(translation, "BATCHES", 1)

    def full(number):
        sync(number)
        if partial.exists() and partial.read_bytes() and not freed.exists():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = play(translate, run, f"--file={file}", f"--output={out}", *FLAGS)
    assert code == 2 and err.strip().endswith(
        f"error: --output: {out}: No space left on device; what is finished is kept in out.txt.partial, where the same "
        "command goes on"
    )
    freed.touch()
    assert play(translate, run, f"--file={file}", f"--output={out}", *FLAGS)[0] == 0
    assert out.read_text().count("\n") == 7


@pytest.mark.parametrize("module, flags, changes, line", [
    (generate, ["--prompt=a"], {}, "--source: model.family=encoder_decoder of runs/x reads one; accepted: a text"),
    (generate, ["--source=a"], {"family": "gpt", "objective": "next_token"},
     "--source: model.family=gpt of runs/x reads none; accepted: --prompt"),
    (generate, ["--source=a", "--prompt=a", "--prompt=b"], {},
     "--prompt: 2 beside 1 of --source; accepted: none, one, or one for each"),
    (generate, ["--source=abcdefghabcdefgh"], {},
     "source: 17 tokens are more than config.model.encoder.source_length 12, which learned positions cannot extend; "
     "accepted: at most 12"),
    (translate, ["--file=none.txt", "--output=x"], {}, "--file: none.txt: No such file or directory"),
    (translate, ["--file=FILE", "--output=FILE"], {}, "--output: FILE is there; accepted: another name"),
    (translate, ["--file=LONG", "--output=x"], {},
     "--file: LONG:2: source: 17 tokens are more than config.model.encoder.source_length 12, which learned positions "
     "cannot extend; accepted: at most 12"),
    (translate, ["--file=FOREIGN", "--output=x"], {}, "--file: FOREIGN:1: text: 'X' not in the vocabulary of this"),
    (translate, ["--file=BYTES", "--output=x"], {}, "--file: BYTES:1: is not UTF-8 text"),
    (translate, ["--file=EMPTY", "--output=x"], {}, "--file: EMPTY is empty; accepted: a text in each line"),
    (translate, ["--file=FILE", "--output=none/x"], {}, "--output: none/x: No such file or directory"),
    (translate, ["--file=FILE", "--output=x", "--beam=100000000"], {},
     "--rows (32) x --beam (100000000) and --more-tokens: 3200000000 x "),
    (translate, ["--file=FILE", "--output=x", "--length-penalty=-1"], {}, "--length-penalty: -1; accepted: at least 0"),
    (translate, ["--file=FILE", "--output=x"], {"family": "gpt", "objective": "next_token"},
     "--workdir: holds a gpt, which reads no source; translate needs encoder_decoder"),
])  # fmt: skip
def test_refusals_are_one_line(play, file, tmp_path, module, flags, changes, line):
    made = {
        "LONG": b"a\nabcdefghabcdefgh\n", "FOREIGN": b"aX\n", "BYTES": b"\xff\n", "EMPTY": b"", "FILE": b"a\n",
    }  # fmt: skip
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
        flags = [flag.replace(f"={name}", f"={tmp_path / name}") for flag in flags]
    flags = [flag.replace("output=x", f"output={tmp_path / 'x'}") for flag in flags]
    code, out, err = play(module, run_of(**changes), *flags)
    wanted = line
    for name in made:
        wanted = wanted.replace(f" {name}", f" {tmp_path / name}")
    assert code == 2 and out == "" and err.startswith(f"error: {wanted}") and err.count("\n") == 1
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.partial").exists()


@pytest.mark.slow
def test_bleu_is_sacrebleus(play, file, tmp_path):
    pytest.importorskip("sacrebleu")
    out = tmp_path / "out.txt"
    code, printed, _ = play(translate, run_of(), f"--file={file}", f"--output={out}", f"--reference={file}", *FLAGS)
    assert code == 0 and printed.splitlines()[1].startswith("BLEU ") and printed.splitlines()[2].startswith("chrF2 ")
    same = translation.scores(["the cat sat on the mat"], ["the cat sat on the mat"]).splitlines()
    assert [line.split(" (")[0] for line in same] == ["BLEU 100.0", "chrF2 100.0"]


def test_bleu_without_its_extra_is_one_line(play, file, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu.metrics", None)
    code, _, err = play(translate, run_of(), f"--file={file}", f"--output={tmp_path / 'x'}", f"--reference={file}")
    assert (code, err) == (2, "error: --reference: needs the bleu extra: pip install 'jaxformer[bleu]'\n")

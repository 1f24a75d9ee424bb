"""An imported folder is a run: opened, exported again byte by byte, the start of another; its vocabulary stays."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers as hf
from foreign_folders import SPECIALS, folder_of, word_tokenizer

from jaxformer.config import from_mapping, load
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.interchange.tokenizer_files import read_about, read_tokenizer, write_tokenizer
from jaxformer.programs import export
from jaxformer.runs import evaluation, imported_run, manifest
from jaxformer.runs.imported_run import import_run
from jaxformer.runs.pretrain import open_run


def exported(run, out, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jaxformer export", str(run), f"--out={out}"])
    export.main()
    return out


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_import_and_export_keep_every_byte(dtype, tmp_path, monkeypatch, capsys):
    theirs, run = folder_of(tmp_path / "theirs", dtype=dtype), tmp_path / "run"
    import_run(theirs, str(run), log=lambda line: None)
    opened = open_run(run)
    assert (opened.step, opened.config.model.vocab_size, opened.tokenizer.vocab_size) == (0, 6, 6)  # no row is appended
    assert opened.params["embedding"]["tokens"].shape == (6, 16)
    out = exported(run, tmp_path / "ours", monkeypatch)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (theirs / name).read_bytes() == (out / name).read_bytes(), name
    assert dtype in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"was imported, and has no text of its own; accepted: --files$"):
        evaluation.evaluate(run, log=lambda line: None)
    after = from_mapping(load(str(run / "config.py")))
    assert after.model == opened.config.model and after.init_from == str(run)
    assert Path(manifest.read(run)["imported"]["directory"]) == theirs


class Killed(BaseException):
    """Nothing in the library catches this."""


@pytest.mark.parametrize("point", ["write_atomically", "save", "write"])
def test_an_import_that_was_stopped_begins_anew(point, tmp_path, monkeypatch):
    """Whatever it had written; but not in a folder of files like those that no import wrote."""

    def killed(*args, **kwargs):
        raise Killed

    theirs, run = folder_of(tmp_path / "theirs"), tmp_path / "run"
    at = {"write_atomically": imported_run.files, "save": imported_run.Checkpoints, "write": manifest}[point]
    with monkeypatch.context() as patched:
        if point == "write_atomically":  # of config.py: the mark comes first
            real, seen = at.write_atomically, []
            patched.setattr(at, point, lambda *a: killed() if seen.append(a) or len(seen) > 1 else real(*a))
        else:
            patched.setattr(at, point, killed)
        with pytest.raises(Killed):
            import_run(theirs, str(run), log=lambda line: None)
    assert {path.name for path in run.iterdir()} >= {".import"} and not (run / "manifest.json").exists()
    import_run(theirs, str(run), log=lambda line: None)
    assert open_run(run).step == 0 and not (run / ".import").exists()
    with pytest.raises(
        ConfigError, match=r"run is not empty \(checkpoints, config.py, manifest.json\); accepted: a new"
    ):
        import_run(theirs, str(run), log=lambda line: None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine is not empty \(config.py\); accepted: a new or empty folder"):
        import_run(theirs, str(tmp_path / "mine"), log=lambda line: None)


def test_a_tokenizer_that_frames_texts_already_does_so_once(tmp_path):
    """As BERT's own do: the run that was tuned from one has it."""
    made = word_tokenizer(SPECIALS["bert"])
    ends = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    framed = hf.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    task = {"objective": "sequence_classification", "labelled": {"labels": ("no", "yes")}}
    model = {"family": "bert", "block": "post_norm", "head": {"outputs": 2}, "bert": {"token_types": 2}}
    config = from_mapping({"data": task, "model": {**model, "vocab_size": 9}})
    for before in (framed, hf.processors.ByteLevel(trim_offsets=False), None):
        if before is not None:
            made.post_processor = before
        write_tokenizer(tmp_path, Tokenizer(made), config.model, config.data)
        found = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert found.encode("the fox").tokens == ["[CLS]", "the", "fox", "[SEP]"]
        pair = found.encode("the", "fox")
        assert (pair.tokens, pair.type_ids) == (["[CLS]", "the", "[SEP]", "fox", "[SEP]"], [0, 0, 0, 1, 1])


def test_roles_of_a_tokenizer_that_may_not_grow(tmp_path):
    word_tokenizer(SPECIALS["gpt"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    ours = read_tokenizer(tmp_path / "tokenizer.json", {"eos_token_id": [1, 0]}, "gpt")
    assert (ours.separator_id, ours.stop_id, ours.end_id) == (0, 1, 1)
    assert ours.mask_id == 0 and not ours.has("mask") and ours.has("separator")
    assert ours.encode("the fox").tolist() == [2, 5] and ours.special_ids.tolist() == [0, 1]
    again = Tokenizer.parse(ours.content().decode(), tmp_path)
    assert again.content() == ours.content() and again.fingerprint == ours.fingerprint
    assert hf.Tokenizer.from_str(ours.content().decode()).get_vocab_size() == 6  # the library reads it as well
    assert ours.with_tokens([("<x>",)]).vocab_size == 7  # an objective may ask for more
    plain = Tokenizer(word_tokenizer(SPECIALS["gpt"]))  # any other tokenizer.json gets what it lacks, as ever
    assert plain.vocab_size > 6 and plain.fingerprint != ours.fingerprint


@pytest.mark.slow
def test_a_bert_fills_masks_between_its_own_tokens(tmp_path, monkeypatch, capsys):
    from jaxformer.programs import fill_mask

    import_run(folder_of(tmp_path / "bert", "bert"), str(tmp_path / "run"), log=lambda line: None)
    seen = []
    monkeypatch.setattr("jaxformer.decoding.fill_mask", lambda params, ids, *a, **k: seen.extend(ids) or _nothing())
    monkeypatch.setattr("sys.argv", ["jaxformer fill-mask", str(tmp_path / "run"), "--text=the [MASK] fox"])
    fill_mask.main()
    assert seen == [[2, 5, 4, 8, 3]]  # [CLS] the [MASK] fox [SEP]


def _nothing():
    from jaxformer.decoding.fill import Filled

    return Filled(*(np.zeros((0,), np.int32) for _ in range(2)), np.zeros((0, 1)), np.zeros((0, 1)))


def test_the_template_of_conversations_is_kept(tmp_path):
    assert read_about(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert read_about(tmp_path) == {"bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert read_about(tmp_path) == {"bos_token": "<s>", "chat_template": "{{ messages }}"}


def test_a_word_piece_tokenizer_gives_the_ids_that_its_library_gives(tmp_path):
    theirs = hf.Tokenizer(hf.models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer, theirs.decoder = hf.normalizers.BertNormalizer(), hf.decoders.WordPiece()
    theirs.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    text = "Every unhappy family is unhappy in its own way. Ça va, naïve?"
    trainer = hf.trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIALS["bert"], show_progress=False)
    theirs.train_from_iterator([text] * 3, trainer)
    theirs.save(str(tmp_path / "tokenizer.json"), pretty=True)
    ours = read_tokenizer(tmp_path / "tokenizer.json", {}, "bert")
    for each in (text, "an unseen ☃ word", "[MASK] is text"):
        if "[MASK]" not in each:
            assert ours.encode(each).tolist() == theirs.encode(each, add_special_tokens=False).ids
        else:
            assert ours.mask_id not in ours.encode(each)  # text never becomes a special token
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.content(plain=True) == (tmp_path / "tokenizer.json").read_bytes()
    assert (ours.separator_id, ours.stop_id) == (theirs.token_to_id("[CLS]"), theirs.token_to_id("[SEP]"))


@pytest.mark.slow
def test_training_goes_on_from_it_on_a_mesh(tmp_path):
    from jaxformer.runs import pretrain
    from jaxformer.runs.command_line import parse_config, parser

    run = tmp_path / "run"
    import_run(folder_of(tmp_path / "theirs"), str(run), mesh="fsdp=4,tensor=2", log=lambda line: None)
    (tmp_path / "text.txt").write_text("the quick brown fox the fox " * 200)
    words = [
        str(run / "config.py"), f"--config.data.files={tmp_path / 'text.txt'}", "--config.train.steps=2",
        "--config.optimizer.warmup_steps=0", "--config.mesh.fsdp=4", "--config.mesh.tensor=2",
        f"--config.workdir={tmp_path / 'after'}", f"--config.data.cache_dir={tmp_path / 'cache'}",
        "--config.compilation_cache=false", "--config.optimizer.learning_rate=1e-12",
    ]  # fmt: skip
    pretrain.pretrain(parse_config(parser("", "pretrain"), words))
    before, after = open_run(run), open_run(tmp_path / "after")
    assert after.step == 2 and after.tokenizer.fingerprint == before.tokenizer.fingerprint
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), before.params, after.params)

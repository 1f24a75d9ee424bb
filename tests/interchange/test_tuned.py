"""Runs that were tuned for a task, as folders that the library transformers opens: it says what ours says."""

import json

import numpy as np
import pytest

from jaxformer.programs import export
from jaxformer.runs import prediction
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.runs.imported_run import import_run
from jaxformer.runs.pretrain import pretrain

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings
WORDS = ["red", "blue", "one", "two"]
TEXTS = [" ".join(WORDS[number // 4**i % 4] for i in range(3)) for number in range(64)]
CONFIG = """
def get_config(family, objective):
    model = {"num_layers": 1, "width": 32, "attention": {"num_heads": 2}, "context_length": 32, "family": family,
             "positions": "learned"}
    if family == "bert":
        model |= {"block": "post_norm", "bert": {"token_types": 2}}
    else:
        model |= {"head": {"use_bias": False}, "feed_forward": {"activation": "gelu_tanh"}}
    return {
        "model": model,
        "data": {"files": ("DIR/examples.jsonl",), "objective": objective, "tokenizer": "bpe", "tokenizer_vocab": 300,
                 "cache_dir": "DIR/cache"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5, "weight_decay": 0.0},
        "train": {"steps": 80, "global_batch_size": 8, "eval_rows": 8},
        "workdir": "DIR/run", "compilation_cache": False,
    }
"""


def tuned(folder, family, objective, label):
    rows = [{"text": text, "label": label(text)} for text in TEXTS]
    (folder / "examples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = CONFIG.replace("DIR", str(folder)).replace(
        "(family, objective)", f"(family={family!r}, objective={objective!r})"
    )
    (folder / "mine.py").write_text(text)
    pretrain(parse_config(parser("", "pretrain"), [f"--config={folder / 'mine.py'}"]))
    return folder / "run"


def exported(run, out, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jaxformer export", str(run), f"--out={out}"])
    export.main()
    return str(out)


def said(run, folder, field):
    return [each[field] for each in prediction.predict(run, (str(folder / "examples.jsonl"),))]


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_a_classifier(family, tmp_path, monkeypatch):
    """By their pipeline, in batches; and read again."""
    import transformers
    from safetensors.numpy import load_file

    run = tuned(tmp_path, family, "sequence_classification", lambda text: "yes" if "red" in text else "no")
    theirs = exported(run, tmp_path / "hf", monkeypatch)
    pipeline = transformers.pipeline("text-classification", model=theirs)
    found = pipeline(TEXTS, batch_size=5)
    labels = said(run, tmp_path, "label")
    assert [each["label"] for each in found] == labels and {*labels} == {"yes", "no"}
    np.testing.assert_allclose([each["score"] for each in found], said(run, tmp_path, "probability"), atol=1e-4)
    import_run(theirs, str(tmp_path / "back"), log=lambda line: None)
    assert said(tmp_path / "back", tmp_path, "label") == labels
    again = exported(tmp_path / "back", tmp_path / "again", monkeypatch)
    a, b = (load_file(f"{each}/model.safetensors") for each in (theirs, again))
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    assert transformers.AutoConfig.from_pretrained(again).id2label == {0: "no", 1: "yes"}


def test_a_number(tmp_path, monkeypatch):
    import torch
    import transformers

    run = tuned(tmp_path, "bert", "regression", lambda text: text.count("red"))
    theirs = exported(run, tmp_path / "hf", monkeypatch)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(theirs).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    with torch.no_grad():
        found = model(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits[:, 0].numpy()
    np.testing.assert_allclose(found, said(run, tmp_path, "value"), atol=1e-4)
    assert model.config.problem_type == "regression" and np.ptp(found) > 0.5

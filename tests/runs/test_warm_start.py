"""A run that starts from another's weights has them, says so, and needs the other no more once it has begun."""

import shutil

import jax
import numpy as np
import pytest
from quick_runs import one_device
from test_changes import CONFIG

from jaxformer.data import tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch, request):
    """All but the first test, and the run that they start from."""
    if request.function is not test_it_begins_with_the_weights_of_the_other:
        one_device(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two texts, a config and another tokenizer; `base` in it is a run on the first."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "text.txt").write_text("All happy families are alike; each is unhappy in its own way. " * 60)
    (folder / "other.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    text = CONFIG.replace("TEXT", repr(str(folder / "text.txt"))).replace("CACHE", repr(str(folder / "cache")))
    (folder / "config.py").write_text(text)
    start(folder, "base", "optimizer.ema_decay=0.5")
    tokenizers.train("bpe", ["All happy families are alike; each is unhappy in its own way. "] * 9, 280).save(folder)
    return folder


def start(place, name, *fields):
    flags = [f"--config.{field}" for field in fields]
    return pretrain.pretrain(
        parse_config(parser("", "pretrain"), [str(place / "config.py"), f"--config.workdir={place / name}", *flags])
    )


def params(place, name):
    return jax.device_get(pretrain.open_run(place / name).params)


# A rate so low that float32 adds nothing: what a run ends with is what it began with.
STILL = ["optimizer.learning_rate=1e-30", "train.steps=2", "optimizer.warmup_steps=0", "optimizer.decay_steps=1"]


def test_it_begins_with_the_weights_of_the_other(place, capsys):
    (place / "moved").mkdir(exist_ok=True)
    source = place / "moved" / "base"
    shutil.copytree(place / "base", source)
    text = f"data.files={place / 'other.txt'}"
    capsys.readouterr()
    start(place, "tuned", *STILL, f"init_from={source}", text)
    said = capsys.readouterr().out
    count = len(jax.tree.leaves(params(place, "base")))
    assert f"init_from: {count} of {count} parameters are those of {source} at step 12\n" in said
    jax.tree.map(np.testing.assert_array_equal, params(place, "tuned"), params(place, "base"))  # of the average
    shutil.rmtree(source)
    found = evaluation.evaluate(place / "tuned", cache_dir=str(place / "cache"), log=lambda _: None)
    assert np.isfinite(found["loss"])
    again = start(place, "tuned", *STILL, f"init_from={source}", text)  # goes on without the other
    assert again.step == 2 and "\ninit_from: " not in capsys.readouterr().out


def test_a_shorter_and_a_longer_context(place, capsys):
    base = params(place, "base")["embedding"]["positions"]
    for length, tokenizer in ((8, "chars"), (24, "bytes")):
        fields = [f"init_from={place / 'base'}", f"model.context_length={length}", f"data.tokenizer={tokenizer}"]
        capsys.readouterr()
        start(place, f"context{length}", *STILL, *fields)
        unused = "init_from: data.tokenizer chars is not used: a run keeps the tokenizer of the one that it starts from"
        assert (unused in capsys.readouterr().out) == (tokenizer == "chars")  # the other's is bytes
        got = params(place, f"context{length}")["embedding"]["positions"]
        assert got.shape[0] == length
        np.testing.assert_array_equal(got[:16], base[:length])


def test_another_tokenizer_keeps_the_rows_of_the_tokens_that_both_have(place, capsys):
    old = tokenizers.train("bytes", [], None)
    new = tokenizers.Tokenizer.load(place)
    capsys.readouterr()
    start(place, "bpe", *STILL, f"init_from={place / 'base'}", f"data.tokenizer_file={place / 'tokenizer.json'}")
    assert "; of 320 tokens it has 262\n" in capsys.readouterr().out
    before, after = (params(place, name)["embedding"]["tokens"] for name in ("base", "bpe"))
    np.testing.assert_array_equal(after[new.encode("q")[0]], before[old.encode("q")[0]])
    np.testing.assert_array_equal(after[new.separator_id], before[old.separator_id])
    whole = new.pieces.index(max(new.pieces, key=len))
    assert not (before == after[whole]).all(axis=1).any()  # "happy" begins anew


def test_what_is_new_begins_as_in_any_run(place):
    """A table over the vocabulary that the other run has not is not rearranged by the other's ids."""
    untied = [*STILL, "model.tie_embeddings=false", f"data.tokenizer_file={place / 'tokenizer.json'}"]
    start(place, "alone", *untied)
    start(place, "untied", *untied, f"init_from={place / 'base'}")
    alone, taken = params(place, "alone"), params(place, "untied")
    (name,) = alone.keys() - params(place, "base").keys()
    jax.tree.map(np.testing.assert_array_equal, alone[name], taken[name])


def test_another_family_keeps_what_both_have(place, capsys):
    capsys.readouterr()
    bert = ["model.family=bert", "data.objective=masked", f"init_from={place / 'base'}", *STILL]
    start(place, "bert", *bert)
    said = capsys.readouterr().out
    assert "; begin anew: " in said and "head." in said
    np.testing.assert_array_equal(params(place, "bert")["blocks"]["attention"]["w_query"],
                                  params(place, "base")["blocks"]["attention"]["w_query"])  # fmt: skip


def test_the_optimizer_too(place):
    plain = ["optimizer.learning_rate=0.01", "train.steps=12"]
    first = start(place, "first", *plain)
    same = [
        "train.steps=2",
        "optimizer.decay_steps=1",
        "optimizer.warmup_steps=0",
        "optimizer.beta1=0.999",
        "optimizer.beta2=0.999",
    ]
    with_moments = start(place, "with", *same, f"init_from={place / 'first'}", "init_optimizer=true")
    without = start(place, "without", *same, f"init_from={place / 'first'}")
    no_decay = start(
        place, "no_decay", *same, "optimizer.weight_decay=0", f"init_from={place / 'first'}", "init_optimizer=true"
    )
    moment = lambda run: float(np.abs(run.state.opt_state[0].nu["embedding"]["tokens"]).sum())  # noqa: E731
    assert moment(with_moments) == pytest.approx(moment(first), rel=0.05)
    assert moment(no_decay) == pytest.approx(moment(first), rel=0.05)
    assert moment(without) < 0.1 * moment(first)
    assert int(with_moments.state.step) == 2 and int(with_moments.state.opt_state[0].count) == 14


@pytest.mark.parametrize(("fields", "line"), [
    (["init_from=PLACE/none"], "config.init_from: workdir PLACE/none: holds no run"),
    (["init_from=PLACE/base", "model.width=32"],
     r"config.init_from: blocks.attention.b_key has the shape \[1, 2, 8\] in "),
    (["init_from=PLACE/base", "init_optimizer=true", "model.context_length=8"],
     "config.init_from: embedding.positions has"),
    (["init_from=PLACE/base", "init_optimizer=true", "model.family=bert", "data.objective=masked"],
     r"config.init_optimizer: True; PLACE/base is of another model \(embedding_norm.bias"),
    (["init_optimizer=true"], "config.init_optimizer: True; it needs config.init_from, a run's directory"),
])  # fmt: skip
def test_what_cannot_be_taken_is_one_line_before_anything_is_written(place, fields, line):
    with pytest.raises(ConfigError, match=f"^{line.replace('PLACE', str(place))}"):
        start(place, "refused", *(field.replace("PLACE", str(place)) for field in fields))
    assert not (place / "refused" / "manifest.json").exists()

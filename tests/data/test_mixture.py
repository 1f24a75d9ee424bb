"""Mixtures: which source a row is of, the batches that follow from it, one tokenizer, and what is held out."""

import dataclasses

import numpy as np
import pytest

from jaxformer.config import DataConfig, from_mapping
from jaxformer.data import languages, mixture
from jaxformer.data.assignment import WINDOW, Assignment
from jaxformer.data.batches import Batches
from jaxformer.data.corpus import Corpus
from jaxformer.data.mixture import MixedCorpus, MixtureBatches, open_text
from jaxformer.errors import ConfigError
from jaxformer.runs import texts

WEIGHTS = {"a third": [0.7, 0.3], "many": [1.0] * 20, "rare": [5, 3, 2, 1e-3], "one": [4.0], "never": [1, 1e-12]}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_each_source_has_its_share(weights):
    """At every window's end to within as many rows as there are sources, and its rows are counted without a gap."""
    rows = np.arange(400 * WINDOW)
    source, number = Assignment(weights, seed=5)(rows)
    for index, weight in enumerate(weights):
        mine = source == index
        assert (number[mine] == np.arange(mine.sum())).all()
        had = np.concatenate([[0], np.cumsum(mine)])[::WINDOW]
        assert abs(had - np.arange(401) * WINDOW * weight / sum(weights)).max() <= len(weights)


def test_seventy_to_thirty_over_a_thousand_steps():
    for seed in range(5):
        source, _ = Assignment([0.7, 0.3], seed)(np.arange(1000 * 8))
        assert abs((source == 0).mean() - 0.7) < 0.002


def test_any_row_alone_and_in_any_order():
    assignment = Assignment([3, 2, 1], seed=1)
    source, number = assignment(np.arange(5000))
    chosen = np.random.default_rng(0).integers(0, 5000, 300)
    found = assignment(chosen)
    assert (found[0] == source[chosen]).all() and (found[1] == number[chosen]).all()
    far = 2**50 + np.arange(3 * WINDOW)  # no float counts these
    source, number = assignment(far)
    for index in range(3):
        assert (np.diff(number[source == index]) == 1).all()
        assert abs(number[source == index][0] - far[0] * [3, 2, 1][index] / 6) < 2**50 / 2**31


def test_seeds_differ_and_no_source_comes_at_regular_steps():
    one, other = (Assignment([1, 1], seed)(np.arange(4 * WINDOW))[0] for seed in (0, 1))
    assert 0.4 < (one == other).mean() < 0.6
    for lag in (*range(1, 9), WINDOW):
        assert 0.35 < (one[lag:] == one[:-lag]).mean() < 0.65


def corpus(split, vocabulary, name="a"):
    return Corpus(split, split, vocabulary, name, None)


@pytest.fixture
def mixed(make_split, vocabulary):
    """Two sources of 5 and 12 rows in an epoch, of 7:3, and the config for them."""
    shares = {"code": 0.7, "prose": 0.3}
    sources = {"code": corpus(make_split([60, 40]), vocabulary), "prose": corpus(make_split([220]), vocabulary)}
    data = from_mapping({"data": {"mixture": {name: {"source": "stdlib", "weight": w} for name, w in shares.items()}}})
    return MixedCorpus(sources, shares, vocabulary, "0"), data.data


SHAPE = {"rows": 6, "context_length": 16, "seed": 3}


def test_each_source_goes_through_its_own_epochs_as_it_does_alone(mixed):
    text, data = mixed
    batches = MixtureBatches(text, data, **SHAPE)
    source, _ = Assignment([0.7, 0.3], 3)(np.arange(600))
    tokens = np.concatenate([batches[step].tokens for step in range(100)])
    for index, (name, part) in enumerate(data.parts().items()):
        alone = Batches(text.sources[name].train, text.tokenizer, part, **SHAPE)
        mine = tokens[source == index]
        assert len(mine) > 3 * alone.rows_per_epoch
        wanted = np.concatenate([alone[step].tokens for step in range(-(-len(mine) // 6))])
        assert (mine == wanted[: len(mine)]).all()


@pytest.mark.parametrize("hosts", [[[0, 1, 2], [3, 4, 5]], [[5, 0], [3], [1, 4, 2]], [[i] for i in range(6)]])
@pytest.mark.parametrize("objective", ["next_token", "masked"])
def test_hosts_together_have_the_batch_of_one(mixed, hosts, objective):
    """Bit for bit, noise included, at any step in any order: what a killed run goes on with."""
    text, data = mixed
    data = DataConfig(**{**vars(data), "objective": objective})
    whole = MixtureBatches(text, data, **SHAPE)
    for step in (41, 0, 7, 10**6):
        batch = whole[step]._asdict()
        for own in hosts:
            part = MixtureBatches(text, data, **SHAPE, host_row_indices=np.array(own))[step]._asdict()
            for name, x in batch.items():
                assert x is part[name] is None or (part[name] == x[own]).all(), name


def test_pairs(mixed, make_split):
    """Rows with what only some families have."""
    text, data = mixed
    sources = {name: corpus(make_split([9] * n), text.tokenizer) for name, n in {"code": 20, "prose": 40}.items()}
    data = DataConfig(**{**vars(data), "objective": "masked", "pairs": True})
    text = MixedCorpus(sources, text.shares, text.tokenizer, "0")
    batch = MixtureBatches(text, data, **SHAPE)[4]
    assert batch.inputs["pair_labels"].shape == (6,) and batch.inputs["token_types"].shape == batch.tokens.shape
    half = MixtureBatches(text, data, **SHAPE, host_row_indices=np.array([4, 1]))[4]
    assert all((half.inputs[name] == batch.inputs[name][[4, 1]]).all() for name in batch.inputs)


def test_what_is_said_before(mixed, make_split):
    text, data = mixed
    batches = MixtureBatches(text, data, **SHAPE)
    assert batches.reading(10) == "code 70 % (8.40 epochs), prose 30 % (1.50 epochs)"
    assert batches.notes(10)[-2:] == [
        "code runs dry after step 1 and is read again, 8.40 times in all, each time in a fresh order",
        "prose runs dry after step 6 and is read again, 1.50 times in all, each time in a fresh order",
    ]
    assert not any("runs dry" in line for line in batches.notes(1))
    assert batches.tokens_per_epoch == int(5 / 0.7) * 16
    short = dataclasses.replace(text, sources={**text.sources, "prose": corpus(make_split([9]), text.tokenizer)})
    with pytest.raises(ConfigError, match=r"a row of 16 tokens needs 17; .* \(data.mixture.prose\)$"):
        MixtureBatches(short, data, **SHAPE)


def config(tmp_path, **fields):
    (tmp_path / "code.txt").write_text("def f(x): return x |" * 40)
    (tmp_path / "prose.txt").write_text("All happy families are alike. |" * 400)
    sources = {
        name: {"files": [str(tmp_path / f"{name}.txt")], "separator": "|", "weight": weight}
        for name, weight in {"prose": 0.3, "code": 0.7}.items()
    }
    mapping = {"data": {"mixture": sources, "cache_dir": str(tmp_path / "cache"), "tokenizer_vocab": 300, **fields}}
    return from_mapping(mapping).data


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_one_tokenizer_for_all(tmp_path, tokenizer):
    data = config(tmp_path, tokenizer=tokenizer)
    text = open_text(data, progress=False)
    assert list(text.sources) == ["code", "prose"] and text.shares == {"code": 0.7, "prose": 0.3}
    for each, words in zip(
        text.sources.values(), ("def f(x): return x ", "All happy families are alike. "), strict=True
    ):
        assert each.tokenizer.fingerprint == text.tokenizer.fingerprint
        assert text.tokenizer.decode(each.train.tokens[: each.train.starts[1]]) == words
        assert each.train.num_unknown == each.validation.num_unknown == 0


def test_the_text_is_opened_from_the_cache_and_known_by_all_sources(tmp_path, capsys, monkeypatch):
    first = open_text(config(tmp_path), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(mixture.tokenizers, "train", lambda *_: pytest.fail("trained again"))
        assert open_text(config(tmp_path), progress=False).fingerprint == first.fingerprint
    data = config(tmp_path)
    (tmp_path / "prose.txt").write_text("All unhappy families are not. |" * 400)
    assert open_text(data, progress=False).fingerprint != first.fingerprint
    renamed = DataConfig(**{**vars(config(tmp_path)), "mixture": {
        {"code": "program"}.get(name, name): entry for name, entry in data.mixture.by_name().items()
    }})  # fmt: skip
    assert open_text(renamed, progress=False).fingerprint != first.fingerprint
    damaged = [
        path for path in (tmp_path / "cache").glob("*/tokenizer.json") if not (path.parent / "train.tokens").exists()
    ]
    for path in damaged:
        path.write_text("{}")
    assert open_text(config(tmp_path), progress=False).fingerprint == first.fingerprint
    assert damaged and "tokenizer.json is not what was written; it is rebuilt" in capsys.readouterr().err


def test_what_is_left_out_is_said_of_each_source(tmp_path):
    data = config(tmp_path, tokenizer="bytes")
    (tmp_path / "lines.jsonl").write_text('{"text": "All happy"}\n' * 20 + "{broken")
    entries = data.mixture.by_name() | {"lines": {"files": [str(tmp_path / "lines.jsonl")], "on_error": "skip"}}
    whole = from_mapping({"data": {"mixture": entries, "tokenizer": "bytes", "cache_dir": data.cache_dir}})
    text = open_text(whole.data, progress=False)
    assert text.num_skipped == 1 and texts.skipped(whole, text) == {"num_skipped": 1}
    (note,) = text.notes()
    assert note.startswith("lines: 0 training and 1 held-out lines or examples cannot be read")


@pytest.mark.slow
def test_a_tokenizer_is_trained_on_what_the_rows_will_hold(tmp_path):
    """What a heavy source repeats becomes tokens, though another is ten times as long."""

    def length(weights):
        data = config(tmp_path, tokenizer_vocab=274)  # a dozen merges
        for name, weight in weights.items():
            object.__setattr__(data.mixture[name], "weight", weight)
        text = open_text(data, progress=False)
        return len(text.tokenizer.encode("def f(x): return x"))

    assert length({"code": 20.0, "prose": 0.1}) < length({"code": 0.1, "prose": 20.0})


def test_the_floor_of_two_languages_is_between_theirs():
    entries = {
        "low": {"source": "markov", "language_order": 1, "language_zipf": 2.0},
        "high": {"source": "markov", "language_zipf": 0.5, "weight": 3.0},
    }
    data = from_mapping({"data": {"mixture": entries}}).data
    floors = {name: languages.floor(part, 64).nats for name, part in data.parts().items()}
    found = languages.floor(data, 64)
    assert found.nats == pytest.approx(0.25 * floors["low"] + 0.75 * floors["high"]) and not found.attained
    with_text = from_mapping({"data": {"mixture": {"a": {"source": "stdlib"}}}}).data
    assert languages.floor(with_text, 64) is None

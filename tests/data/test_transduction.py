"""The transduction language: what targets are made of, their alignment, and what the best model loses on them."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import languages, sources, transduction
from jaxformer.data.batches import eval_batches
from jaxformer.data.corpus import open_corpus
from jaxformer.data.transduction import TASKS, Transduction
from jaxformer.errors import ConfigError

DATA = DataConfig(
    source="transduction", objective="pairs", language_symbols=10, language_tokens=40_000, language_shortest=3,
    language_longest=12, language_synonyms=3,
)  # fmt: skip


def sampled(task, pairs=2000, **fields):
    given = {"symbols": 10, "shortest": 3, "longest": 12, "synonyms": 3, "block": 4, "seed": 0}
    language = Transduction(task, **given | fields)
    source, target = language.sample(pairs, "train")
    return language, source.split(), target.split()


@pytest.mark.parametrize("task", TASKS)
def test_targets_follow_from_sources_by_the_alignment(task):
    language, sources_, targets = sampled(task)
    plain = {"copy": lambda x: x, "reverse": lambda x: x[::-1], "sort": np.sort}
    for source, target in zip(sources_, targets, strict=True):
        alignment = language.alignment(source)
        assert sorted(alignment) == list(range(len(source)))
        assert (language.synonyms[source[alignment]] == target[:, None]).any(axis=1).all()
        if task != "translate":
            np.testing.assert_array_equal(target, plain[task](source))
        else:
            np.testing.assert_array_equal(alignment // 4, np.arange(len(source)) // 4)
    assert {len(source) for source in sources_} == set(range(3, 13))


def test_neighbours_are_exchanged_by_one_order_of_all_symbols():
    language, sources_, _ = sampled("translate")
    before = np.zeros((10, 10), int)  # how often one symbol of a block came before another
    for source in sources_:
        moved = source[language.alignment(source)]
        for begin in range(0, len(moved), 4):
            block = moved[begin : begin + 4]
            for one, other in itertools.combinations(block, 2):
                before[one, other] += 1
    distinct = ~np.eye(10, dtype=bool)
    assert ((before > 0) != (before.T > 0))[distinct].all()
    assert sorted((before > 0)[distinct].reshape(10, 9).sum(axis=1)) == list(range(10))
    still, sources_, _ = sampled("translate", block=1)
    assert all((still.alignment(source) == np.arange(len(source))).all() for source in sources_)


@pytest.mark.parametrize("zipf", [0.0, 1.0])
def test_synonyms_are_drawn_by_their_chances_and_tell_their_symbol(zipf):
    language, sources_, targets = sampled("translate", pairs=8000, zipf=zipf)
    assert len(set(language.synonyms.ravel())) == 30 and language.synonyms.min() == 10
    rank = {int(symbol): r for row in language.synonyms for r, symbol in enumerate(row)}
    drawn = [rank[int(symbol)] for target in targets for symbol in target]
    counted, total = Counter(drawn), len(drawn)
    for r, chance in enumerate(language.chances):
        assert abs(counted[r] - total * chance) < 5 * math.sqrt(total * chance * (1 - chance))
    following = Counter(itertools.pairwise(drawn))
    both = language.chances[0] ** 2
    assert abs(following[0, 0] - total * both) < 8 * math.sqrt(total * both)
    nats = -sum(math.log(language.chances[r]) for r in drawn) / total
    assert abs(nats - language.symbol_nats) < 0.01 and (zipf or nats == pytest.approx(math.log(3)))
    symbols = Counter(int(symbol) for source in sources_ for symbol in source)
    assert max(symbols.values()) < 1.1 * min(symbols.values())


def test_the_floor_is_what_the_best_model_loses(tmp_path):
    """Of every target all but the choice among synonyms is known: log(3) for each symbol, 0 for the end token."""
    data = replace(DATA, cache_dir=str(tmp_path))
    corpus = open_corpus(data, progress=False)
    batches = eval_batches(corpus.validation, corpus.tokenizer, data, rows=8, context_length=40, source_length=40)
    ends = sum(int((batch.targets == corpus.tokenizer.end_id).sum()) for batch in batches)
    tokens = sum(float(batch.weights.sum()) for batch in batches)
    floor = languages.floor(data, 40, 40)
    assert floor.nats == pytest.approx((tokens - ends) * math.log(3) / tokens, rel=1e-12)
    assert floor.attained and floor.standard_error == 0
    assert languages.floor(replace(data, language_task="sort"), 40, 40).nats == 0
    assert languages.floor(replace(data, objective="next_token"), 40) is None


def test_the_corpus_holds_the_pairs(tmp_path):
    data = replace(DATA, cache_dir=str(tmp_path))
    corpus = open_corpus(data, progress=False)
    assert corpus.tokenizer.vocab_size == 6 + 40 and corpus.train.num_documents == round(40_000 / 15)
    language, first = transduction.language(data), corpus.train.tokens[: corpus.train.starts[1]]
    source, target = language.sample(1, "train")
    wanted = [corpus.tokenizer.separator_id, *(6 + source.values), corpus.tokenizer.end_id, *(6 + target.values)]
    assert first.tolist() == wanted
    held_out = {(pair.source, pair.target) for pair in sources.documents(data, "validation")}
    trained = {(pair.source, pair.target) for pair in sources.documents(data, "train")}
    assert len(held_out) == corpus.validation.num_documents and not held_out & trained
    assert list(sources.documents(data, "train")) == list(sources.documents(data, "train"))
    assert next(sources.documents(replace(data, language_seed=1), "train")) not in trained


def test_many_symbols_and_bad_sizes():
    many = replace(DATA, language_symbols=200, language_synonyms=9)
    pair = next(sources.documents(many, "train"))
    assert all(0x4E00 <= ord(sign) < 0x4E00 + 2000 for sign in pair)
    for fields, line in (
        ({"language_shortest": 13}, "config.data.language_shortest: 13; accepted: at most data.language_longest 12"),
        ({"language_synonyms": 2001}, "config.data.language_synonyms: 2001; accepted: 1 to 2000"),
    ):
        with pytest.raises(ConfigError) as caught:
            replace(DATA, **fields)
        assert str(caught.value) == line

"""Pairs of sequences: from files of every kind to rows, whole, in their order, several to a row and apart."""

import gzip
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import tokenizers as hf

from jaxformer.config import DataConfig
from jaxformer.data import mixture, sources, text_files, tokenizers
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.corpus import open_corpus
from jaxformer.data.faults import Faults
from jaxformer.data.pair_text import Pair
from jaxformer.data.sequence_pairs import shared_rows
from jaxformer.errors import ConfigError
from jaxformer.runs import tokenization

PAIRS = [(f"to be {i}" + " or not" * (i % 5), f"sein {i}" * (1 + i % 3)) for i in range(60)]


def write_jsonl(path):
    lines = [json.dumps({"source": s, "more": 1, "target": t}) for s, t in PAIRS]
    path.write_text("\n".join([*lines[:7], "", *lines[7:]]))


def write_tsv(path, names="target\tn\tsource\n"):
    path.write_text(names + "".join(f"{t}\t{i}\t{s}\r\n" for i, (s, t) in enumerate(PAIRS)), newline="")


def write_parquet(path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    columns = {"n": list(range(60)), "target": [t for _, t in PAIRS], "source": [s for s, _ in PAIRS]}
    pq.write_table(pa.table(columns), path, row_group_size=17)


def write_arrow(path):
    pa = pytest.importorskip("pyarrow")
    columns = {"target": [t for _, t in PAIRS], "n": list(range(60)), "source": [s for s, _ in PAIRS]}
    table = pa.table(columns)
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=20)


WRITE = {".jsonl": write_jsonl, ".tsv": write_tsv, ".parquet": write_parquet, ".arrow": write_arrow}


def config(folder, ending=".jsonl", **fields):
    path = folder / f"pairs{ending}"
    if not path.exists():
        WRITE[ending](path)
    given = {"files": (str(path),), "tokenizer": "bytes", "objective": "pairs", "cache_dir": str(folder / "cache")}
    return DataConfig(**given | fields)


def read(path, text_field=("source", "target"), faults=None):
    return list(text_files.documents(path, separator=None, text_field=text_field, field="data.files", faults=faults))


def sides(batch, tokenizer):
    """(source, target) texts of each pair of each row, their end tokens checked."""
    found = []
    inputs = batch.inputs
    for r in range(len(batch.tokens)):
        texts = []
        for ids, segments in ((inputs["source_tokens"], inputs["source_segments"]), (batch.targets, batch.segments)):
            parts = [ids[r][segments[r] == s] for s in range(1, segments[r].max() + 1)]
            assert all(part[-1] == tokenizer.end_id for part in parts)
            texts.append([tokenizer.decode(part) for part in parts])
        found.append(list(zip(*texts, strict=True)))
    return found


@pytest.mark.parametrize("ending", WRITE)
def test_files_of_every_kind_hold_the_same_pairs(tmp_path, ending):
    data = config(tmp_path, ending)
    found = list(sources.documents(data, "train")) + list(sources.documents(data, "validation"))
    assert [(pair.source, pair.target) for pair in found] == PAIRS
    assert len(list(sources.documents(data, "validation"))) == 6
    plain = config(tmp_path, ending, objective="next_token", text_field="target")
    assert list(sources.documents(plain, "train")) == [t for _, t in PAIRS[:54]]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
def test_pairs_inside_another_field(tmp_path, ending):
    """As sets of translations of the Hugging Face hub have them."""
    path = tmp_path / f"a{ending}"
    both = [{"de": t, "en": s} for s, t in PAIRS]
    if ending == ".jsonl":
        path.write_text("\n".join(json.dumps({"n": i, "translation": each}) for i, each in enumerate(both)))
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        table = pa.table({"n": list(range(60)), "translation": both})
        if ending == ".parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as out:
                out.write_table(table)
    found = read(path, ("translation.en", "translation.de"))
    assert [(pair.source, pair.target) for pair in found] == PAIRS
    with pytest.raises(ConfigError, match=r"config.data.target_field: .*'translation.fr'"):
        read(path, ("translation.en", "translation.fr"))


def test_columns_by_number_and_compressed(tmp_path):
    write_tsv(tmp_path / "a.tsv", names="")
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    for name in ("a.tsv", "b.tsv.gz"):
        found = read(tmp_path / name, ("3", "1"))
        assert [(pair.source, pair.target) for pair in found] == PAIRS


# content of a .tsv, fields -> line
BAD = {
    "a\tb\n1\t2\n": (("a", "c"), "config.data.target_field: PATH:1: no column 'c'; the first line names a, b; "
                     "accepted: one of these, or the numbers of columns where no line names them"),
    "a\tb\n1\t2\n1\n": (("a", "b"), "config.data.files: PATH:3: number of columns: 1; the first line names 2; "
                        "data.on_error=skip skips it"),
    "1\t2\n1\n": (("1", "2"), "config.data.files: PATH:2: number of columns: 1; asked for: 1 and 2; "
                  "data.on_error=skip skips it"),
    "1\t2\n": (("0", "2"), "config.data.source_field: 0; accepted: a name, or the number of a column, from 1"),
    "": (("a", "b"), "config.data.files: PATH has no names of columns in its first line; accepted: names, or the "
         "numbers of columns for the fields"),
    "x\t \n": (("1", "2"), "config.data.files: PATH:1: the target is blank; data.on_error=skip skips it"),
}  # fmt: skip


@pytest.mark.parametrize("content", BAD)
def test_broken_columns(tmp_path, content):
    path = tmp_path / "a.tsv"
    path.write_text(content)
    fields, line = BAD[content]
    with pytest.raises(ConfigError) as caught:
        read(path, fields)
    assert str(caught.value).replace(str(path), "PATH") == line


def test_lines_that_are_no_pair(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n{"source": "c"}\n{"source": " ", "target": "d"}\n{"source": 1}\n')
    with pytest.raises(
        ConfigError, match=r"data.target_field: .*:2: no field 'target' holding text; .* fields source;"
    ):
        read(path)
    faults = Faults("skip")
    assert [(pair.source, pair.target) for pair in read(path, faults=faults)] == [("a", "b")]
    assert faults.count == 3
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a.txt holds no pairs; accepted with data.source_field: .jsonl .tsv"):
        read(tmp_path / "a.txt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the protobuf that reads the dataset's features
def test_a_set_of_translations_of_tfds(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets", reason="the tfds extra; .ci/run has it")

    class Pairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "pairs"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.Translation(languages=["en", "de"])
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=("en", "de"), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(PAIRS[:50]), "validation": self._generate_examples(PAIRS[50:])}

        def _generate_examples(self, pairs):
            for number, (source, target) in enumerate(pairs):
                yield number, {"en": source, "de": target}

    Pairs(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    data = DataConfig(
        tfds_name="pairs", tfds_dir=str(tmp_path), source_field="en", target_field="de", objective="pairs"
    )
    for split, wanted in (("train", PAIRS[:50]), ("validation", PAIRS[50:])):
        assert [(pair.source, pair.target) for pair in sources.documents(data, split)] == wanted


def test_every_pair_is_in_one_row_of_an_epoch(tmp_path):
    """Whole, in the order of the text within a row, more to a row than one; the rows in another order in each epoch."""
    data = config(tmp_path)
    corpus = open_corpus(data, progress=False)
    assert corpus.train.num_bytes == sum(len(s) + len(t) for s, t in PAIRS[:54]) and corpus.train.num_documents == 54
    batches = Batches(corpus.train, corpus.tokenizer, data, rows=1, context_length=60, source_length=100, seed=0)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * batches.rows_per_epoch, (epoch + 1) * batches.rows_per_epoch)
        rows = [row for step in steps for row in sides(batches[step], corpus.tokenizer)]
        assert sorted(pair for row in rows for pair in row) == sorted(PAIRS[:54])
        assert all(row == PAIRS[PAIRS.index(row[0]) :][: len(row)] for row in rows)
        epochs.append(rows)
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert 10 < batches.rows_per_epoch < 27
    held_out = eval_batches(corpus.validation, corpus.tokenizer, data, rows=2, context_length=60, source_length=100)
    assert [pair for batch in held_out for row in sides(batch, corpus.tokenizer) for pair in row] == PAIRS[54:]


def test_rows_are_filled_in_order_as_far_as_both_sides_go():
    rng = np.random.default_rng(0)
    sizes, room = rng.integers(1, 30, (3000, 2)), np.array([64, 90])
    begins = shared_rows(sizes, room)
    assert begins[0] == 0 and begins[-1] == 3000 and (np.diff(begins) > 0).all()
    for begin, end in itertools.pairwise(begins):
        assert (sizes[begin:end].sum(axis=0) <= room).all()
        assert end == 3000 or (sizes[begin : end + 1].sum(axis=0) > room).any()


def test_a_host_loads_its_rows(tmp_path):
    data = config(tmp_path)
    corpus = open_corpus(data, progress=False)
    shape = {"rows": 4, "context_length": 60, "source_length": 100, "seed": 3}
    whole = Batches(corpus.train, corpus.tokenizer, data, **shape)[5]
    part = Batches(corpus.train, corpus.tokenizer, data, **shape, host_row_indices=np.array([3, 1]))[5]
    for mine, all_ in zip(
        part[:5] + tuple(part.inputs.values()), whole[:5] + tuple(whole.inputs.values()), strict=True
    ):
        np.testing.assert_array_equal(mine, all_[[3, 1]])


def test_pairs_that_are_longer_than_a_row(tmp_path):
    shape = {"rows": 1, "context_length": 14, "source_length": 40, "seed": 0}

    def batches(how):
        data = config(tmp_path, long_pairs=how)
        corpus = open_corpus(data, progress=False)
        return Batches(corpus.train, corpus.tokenizer, data, **shape), corpus.tokenizer

    with pytest.raises(ConfigError) as caught:
        batches("stop")
    assert str(caught.value) == (
        "config.model.context_length: 14; the target of training pair 3 has 19 tokens, its end token included, the "
        "longest 22; accepted: at least that, or data.long_pairs=cut or skip"
    )
    skipping, tokenizer = batches("skip")
    kept = [(s, t) for s, t in PAIRS[:54] if len(s) < 40 and len(t) < 14]
    assert sorted(pair for i in range(skipping.rows_per_epoch) for pair in sides(skipping[i], tokenizer)[0]) == sorted(
        kept
    )
    assert "of 54 training pairs are longer than a row and are left out (data.long_pairs=skip)" in skipping.notes()[0]
    cutting, tokenizer = batches("cut")
    seen = Counter()
    for i in range(cutting.rows_per_epoch):
        batch = cutting[i]
        for s in range(1, batch.segments.max() + 1):
            ids = batch.targets[batch.segments == s]
            seen[tokenizer.decode(ids), int(ids[-1] == tokenizer.end_id)] += 1
    assert seen == Counter((t[:14], int(len(t) < 14)) for _, t in PAIRS[:54])


def test_limits_and_splits_take_whole_pairs(tmp_path):
    size = sum(len(s) + len(t) for s, t in PAIRS[:10])
    for more in (0, 1, 5):
        data = config(tmp_path, max_train_bytes=size + more)
        assert [(p.source, p.target) for p in sources.documents(data, "train")] == PAIRS[:10]
    (tmp_path / "one.jsonl").write_text('{"source": "a", "target": "b"}')
    with pytest.raises(ConfigError, match=r"validation_fraction: 0.1 of one pair; accepted: at least two pairs"):
        list(sources.documents(config(tmp_path, files=(str(tmp_path / "one.jsonl"),)), "train"))


def test_text_that_is_no_pair(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": "b"}\n' * 9)
    data = config(tmp_path, objective="next_token", text_field="source", files=(str(tmp_path / "a.jsonl"),))
    corpus = open_corpus(data, progress=False)
    asking = config(tmp_path, files=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(ConfigError, match=r"document 1 of the training text is no pair; accepted: a source of pairs"):
        Batches(corpus.train, corpus.tokenizer, asking, rows=1, context_length=9, source_length=9, seed=0)


def test_a_tokenizer_whose_documents_open_with_the_end_token(tmp_path):
    """As BERT's, whose [SEP] is both."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    signs = sorted({sign for pair in PAIRS for text in pair for sign in text})
    backend = hf.Tokenizer(hf.models.BPE({t: i for i, t in enumerate([*names, *signs])}, [], unk_token="[UNK]"))
    backend.decoder = hf.decoders.Fuse()
    backend.add_special_tokens(names)
    backend.save(str(tmp_path / "tokenizer.json"))
    data = config(tmp_path, tokenizer_file=str(tmp_path / "tokenizer.json"))
    corpus = open_corpus(data, progress=False)
    assert corpus.tokenizer.separator_id == corpus.tokenizer.end_id == 3
    held_out = eval_batches(corpus.validation, corpus.tokenizer, data, rows=2, context_length=60, source_length=100)
    assert [pair for batch in held_out for row in sides(batch, corpus.tokenizer) for pair in row] == PAIRS[54:]


def test_shards_of_pairs_give_the_same_batches(tmp_path):
    data = config(tmp_path)
    wanted = open_corpus(data, progress=False)
    tokenization.tokenize(data, tmp_path / "shards", 3, lambda function, items: list(map(function, items)))
    shards = DataConfig(tokens=(str(tmp_path / "shards"),), objective="pairs")
    found = open_corpus(shards, progress=False)
    shape = {"rows": 4, "context_length": 60, "source_length": 100, "seed": 3}
    mine = Batches(wanted.train, wanted.tokenizer, data, **shape)[2]
    theirs = Batches(found.train, found.tokenizer, shards, **shape)[2]
    for one, other in zip(mine.inputs.values(), theirs.inputs.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("objective", ["pairs", "span_corruption", "mixture", "denoising"])
def test_rows_of_a_mixture_of_sources(tmp_path, objective):
    """Each row is of one source, and of it the row that its own batches have."""
    paths = []
    for name, case in (("lower", str.lower), ("upper", str.upper)):
        paths.append(tmp_path / f"{name}.jsonl")
        lines = [json.dumps({"source": case(s) * 3, "target": case(t) * 3}) for s, t in PAIRS]
        paths[-1].write_text("\n".join(lines))
    fields = {} if objective == "pairs" else {"text_field": "source"}
    parts = {path.stem: {"files": (str(path),), "weight": 1 + i, **fields} for i, path in enumerate(paths)}
    data = DataConfig(mixture=parts, tokenizer="bytes", objective=objective, cache_dir=str(tmp_path / "cache"))
    corpus = mixture.open_text(data, progress=False)
    assert corpus.tokenizer.vocab_size == 262 + {"span_corruption": 100, "mixture": 103}.get(objective, 0)
    batches = mixture.training_batches(
        corpus, data, seed=0, rows=6, context_length=256, source_length=256, host_row_indices=None
    )
    named = Counter()
    for step in range(8):
        batch = batches[step]
        inputs = batch.inputs
        for r in range(6):
            text = corpus.tokenizer.decode(inputs["source_tokens"][r]) + corpus.tokenizer.decode(batch.targets[r])
            assert text.islower() != text.isupper()
            named[text.isupper()] += 1
        np.testing.assert_array_equal(batch.segments.max(axis=1), inputs["source_segments"].max(axis=1))
    assert named[True] > named[False] > 5


def test_a_pair_is_one_text():
    tokenizer = tokenizers.train("bytes", [], None)
    pair = Pair("a b", "c")
    assert pair == "a bc" and (pair.source, pair.target) == ("a b", "c")
    assert tokenizer.end_id not in tokenizer.encode("[SEP] </s>")

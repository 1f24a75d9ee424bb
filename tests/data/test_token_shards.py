"""Token shards: what they hold is the text as any other source gives it, however it is cut, and damage is found."""

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
from token_folders import content, here, texts, tokens_of, write_files

from jaxformer.config import DataConfig, from_mapping
from jaxformer.data import shard_plan, shard_writer, shards, tokenizers
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.corpus import open_corpus
from jaxformer.data.mixture import MixtureBatches, open_text
from jaxformer.errors import ConfigError, StoreError
from jaxformer.runs import tokenization
from jaxformer.runs.tokenization import tokenize
from jaxformer.storage import object_store
from jaxformer.storage.address import place


def same_batches(one, other, data, *, rows=3, length=16):
    shape = {"rows": rows, "context_length": length}
    mine, theirs = (Batches(c.train, c.tokenizer, data, seed=7, **shape) for c in (one, other))
    assert mine.rows_per_epoch == theirs.rows_per_epoch
    pairs = [(mine[step], theirs[step]) for step in (0, 1, 5, 1000)]
    held = [eval_batches(c.validation, c.tokenizer, data, **shape) for c in (one, other)]
    assert len(held[0]) == len(held[1])
    for a, b in [*pairs, *zip(*held, strict=True)]:
        for field in ("tokens", "targets", "weights", "positions", "segments"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


CASES = {
    "a tail held out": {},
    "a file held out": {"validation_files": "1.jsonl"},
    "half held out": {"validation_fraction": 0.5},
    "bytes": {"tokenizer": "bytes"},
    "characters": {"tokenizer": "chars"},
    "the first bytes": {"max_train_bytes": 3000},
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_the_files(tmp_path, case):
    """Bit for bit, with the tokenizer that the shards were made by, or that both train."""
    settings = dict(CASES[case])
    data = write_files(tmp_path / "text", **{k: v for k, v in settings.items() if k != "validation_files"})
    if "validation_files" in settings:
        data = replace(data, validation_files=(str(tmp_path / "text" / settings["validation_files"]),))
    expected = open_corpus(data, progress=False)
    found = open_corpus(tokens_of(data, tmp_path / "tokens"))
    assert found.tokenizer.fingerprint == expected.tokenizer.fingerprint
    for split in ("train", "validation"):
        one, other = getattr(expected, split), getattr(found, split)
        np.testing.assert_array_equal(np.asarray(one.tokens), np.asarray(other.tokens))
        np.testing.assert_array_equal(np.asarray(one.starts), np.asarray(other.starts))
        counts = ("num_tokens", "num_documents", "num_bytes", "num_unknown", "num_skipped")
        assert [getattr(one, name) for name in counts] == [getattr(other, name) for name in counts]
    same_batches(expected, found, data)


def test_objectives_with_masks_and_pairs_read_the_same(tmp_path):
    data = write_files(tmp_path / "text", objective="masked", pairs=True)
    found = open_corpus(tokens_of(data, tmp_path / "tokens"))
    same_batches(open_corpus(data, progress=False), found, data, length=32)


@pytest.mark.parametrize("shards_", [1, 2, 13, 60])
def test_the_number_of_shards_changes_nothing_but_the_files(tmp_path, shards_):
    """60 are more than there are documents: some are empty."""
    data = write_files(tmp_path / "text")
    one, other = (open_corpus(tokens_of(data, tmp_path / f"tokens{n}", n)) for n in (5 if shards_ == 1 else 1, shards_))
    assert one.fingerprint == other.fingerprint
    assert len(list(other.directory.glob("train-*.tokens"))) == shards_
    same_batches(one, other, data)


def test_a_single_document_is_cut_as_it_is_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("".join(texts(30)))
    data = DataConfig(files=(str(tmp_path / "a.txt"),), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    expected, found = open_corpus(data, progress=False), open_corpus(tokens_of(data, tmp_path / "tokens"))
    same_batches(expected, found, data)


def test_compressed_text_with_separators_and_lines_that_are_skipped(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("|".join(texts(20)).encode()))
    lines = [json.dumps({"text": text}) for text in texts(20, 1)]
    (tmp_path / "b.jsonl").write_text("\n".join([*lines[:7], "{broken", *lines[7:]]))
    files = (str(tmp_path / "a.txt.xz"), str(tmp_path / "b.jsonl"))
    data = DataConfig(files=files, separator="|", on_error="skip", tokenizer="bytes", cache_dir=str(tmp_path / "c"))
    expected, found = open_corpus(data, progress=False), open_corpus(tokens_of(data, tmp_path / "tokens"))
    assert found.train.num_skipped == expected.train.num_skipped == 1
    same_batches(expected, found, data)


def test_sources_that_are_no_files(tmp_path):
    data = DataConfig(source="markov", language_tokens=5000, cache_dir=str(tmp_path / "cache"))
    same_batches(open_corpus(data, progress=False), open_corpus(tokens_of(data, tmp_path / "tokens")), data)


def test_hosts_read_only_the_rows_of_their_own(tmp_path, monkeypatch):
    """Two hosts' rows are those of one, and neither opens a shard that it needs no token of."""
    data = write_files(tmp_path / "text", counts=(40, 40), tokenizer="bytes")
    where = tokens_of(data, tmp_path / "tokens", 50)
    whole = open_corpus(where)
    shape = {"rows": 4, "context_length": 8, "seed": 3}
    expected = Batches(whole.train, whole.tokenizer, data, **shape)[2].tokens
    opened = set()
    get = shards.ranged.open_ranged
    monkeypatch.setattr(shards.ranged, "open_ranged", lambda path, size: opened.add(path.name) or get(path, size))
    for rows in ([0, 1], [2, 3]):
        opened.clear()
        host = open_corpus(where)
        assert not opened
        batches = Batches(host.train, host.tokenizer, data, host_row_indices=np.array(rows), **shape)
        np.testing.assert_array_equal(batches[2].tokens, expected[rows])
        assert 1 <= len(opened) <= 4 and all(name.endswith(".tokens") for name in opened)


def test_many_shards_are_open_at_most(tmp_path, monkeypatch):
    from jaxformer.data import lazy_array

    monkeypatch.setattr(lazy_array, "OPEN", 3)
    data = write_files(tmp_path / "text", tokenizer="bytes")
    found = open_corpus(tokens_of(data, tmp_path / "tokens", 20))
    expected = np.asarray(open_corpus(data, progress=False).train.tokens)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(found.train.tokens), expected)
        assert sum(part.is_open for part in found.train.tokens._parts) <= 3


def test_a_start_after_a_kill_writes_what_is_missing_and_the_same_bytes(tmp_path):
    """Killed before each shard: no folder is taken for whole, and finished shards are not written again."""
    data = write_files(tmp_path / "text")
    tokens_of(data, tmp_path / "whole")
    expected, out = content(tmp_path / "whole"), tmp_path / "killed"

    class Killed(BaseException):
        pass

    def dies_after(number):
        def run(function, items):
            for count, item in enumerate(items):
                if count == number and len(item) == 3:
                    raise Killed
                function(item)

        return run

    for _ in range(5):
        with pytest.raises(Killed):
            tokenize(data, out, 5, dies_after(1))
        with pytest.raises(ConfigError, match="was begun and not finished"):
            open_corpus(DataConfig(tokens=(str(out),)))
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.tokens")}
    assert len(times) == 5
    (out / ".train-00001.tokens.1-ab").write_text("left by a worker that was killed")
    assert tokenize(data, out, 5, here) == 1
    assert content(out) == expected
    assert times == {path.name: path.stat().st_mtime_ns for path in out.glob("train-*.tokens")}
    assert tokenize(data, out, 5, here) == 0


def test_the_order_of_the_work_and_doing_it_twice_changes_no_byte(tmp_path):
    data = write_files(tmp_path / "text")
    tokens_of(data, tmp_path / "one")

    def backwards(function, items):
        for item in [*reversed(list(items)), *items]:
            function(item)

    tokenize(data, tmp_path / "other", 5, backwards)
    assert content(tmp_path / "one") == content(tmp_path / "other")


def test_a_sample_of_a_long_text_is_spread_and_as_large_as_was_wanted(tmp_path):
    data = write_files(tmp_path / "text", counts=(200, 50, 300))
    found = shard_plan.units(data)
    plan = shard_plan.make(data, found, [shard_plan.scan(data, unit) for unit in found], 4)
    total = plan.num_bytes("train")
    samples = [shard_plan.sample(data, plan, n, total // 4) for n in range(len(plan.stretches["train"]))]
    sizes = [sum(len(text.encode()) for text in sample) for sample in samples]
    for size, stretch in zip(sizes, plan.stretches["train"], strict=True):
        assert abs(size / stretch.num_bytes - 0.25) < 0.1
    everything = [text for n in range(3) for text in shard_plan.sample(data, plan, n, total)]
    assert sum(len(text.encode()) for text in everything) == total


DAMAGE = [("train-00002.tokens", 5), ("train-00002.starts", 0), ("validation-00000.tokens", 1)]


@pytest.mark.parametrize(("name", "at"), DAMAGE)
def test_damage_is_found_when_it_is_read(tmp_path, name, at):
    found = open_corpus(tokens_of(write_files(tmp_path / "text"), tmp_path / "tokens"))
    raw = bytearray((tmp_path / "tokens" / name).read_bytes())
    raw[at] ^= 4
    (tmp_path / "tokens" / name).write_bytes(raw)
    split = getattr(found, name.split("-")[0])
    with pytest.raises(ConfigError, match=f"{name} is damaged at bytes 0 to"):
        np.asarray(split.tokens if name.endswith("tokens") else split.starts)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        open_corpus(DataConfig(tokens=(str(tmp_path / "tokens"),)), verify=True)


def test_what_is_found_damaged_is_written_again(tmp_path):
    data = write_files(tmp_path / "text")
    tokens_of(data, tmp_path / "tokens")
    expected = content(tmp_path / "tokens")
    (tmp_path / "tokens" / "train-00003.json").unlink()
    (tmp_path / "tokens" / "tokens.json").unlink()
    (tmp_path / "tokens" / "train-00003.tokens").write_bytes(b"abcdef")
    assert tokenize(data, tmp_path / "tokens", 5, here) == 1
    assert content(tmp_path / "tokens") == expected


def test_a_shard_that_is_there_is_not_made_again(tmp_path):
    """As when a runner gives the same element to two workers. One made of something else is."""
    tokenizer = tokenizers.train("bytes", [], None)
    shard_writer.write(tmp_path, "train", 0, ["to be"], tokenizer, about="one")
    before = (tmp_path / "train-00000.tokens").stat().st_mtime_ns
    shard_writer.write(tmp_path, "train", 0, iter(lambda: pytest.fail("was read"), 0), tokenizer, about="one")
    assert (tmp_path / "train-00000.tokens").stat().st_mtime_ns == before
    shard_writer.write(tmp_path, "train", 0, ["or"], tokenizer, about="other")
    assert (tmp_path / "train-00000.tokens").stat().st_size == 2 * 3


def test_many_files_are_counted_and_sampled_in_groups(tmp_path, monkeypatch):
    data = write_files(tmp_path / "text")
    tokens_of(data, tmp_path / "one")
    monkeypatch.setattr(tokenization, "ELEMENTS", 2)
    sizes = []

    def run(function, items):
        sizes.append(len(items))
        here(function, items)

    tokenize(data, tmp_path / "other", 5, run)
    assert sizes[:2] == [2, 2] and content(tmp_path / "one") == content(tmp_path / "other")


def test_shards_in_a_mixture_are_their_text_and_bring_the_tokenizer(tmp_path):
    text = write_files(tmp_path / "text")
    tokens_of(text, tmp_path / "tokens", 3)
    shards_, files_ = {"tokens": (str(tmp_path / "tokens"),)}, {"files": text.files}
    cache = {"cache_dir": str(tmp_path / "cache")}
    given = {"tokenizer_file": str(tmp_path / "tokens" / "tokenizer.json"), **cache}
    batches = []
    for fields in ({"mixture": {"a": shards_, "b": files_}, **cache}, {"mixture": {"a": files_, "b": files_}, **given}):
        data = from_mapping({"data": fields}).data
        mixed = open_text(data, progress=False)
        batches.append(MixtureBatches(mixed, data, rows=4, context_length=16, seed=0))
    for step in (0, 7, 100):
        for one, other in zip(batches[0][step][:5], batches[1][step][:5], strict=True):
            np.testing.assert_array_equal(one, other)
    tokens_of(replace(text, tokenizer="bytes"), tmp_path / "bytes", 3)
    data = from_mapping({"data": {"mixture": {"a": shards_, "b": {"tokens": (str(tmp_path / "bytes"),)}}}}).data
    with pytest.raises(
        ConfigError, match=r"data.mixture.b.source: 'tokens'; its tokens are not those of data.mixture.a"
    ):
        open_text(data, progress=False)


def in_memory(tmp_path, name):
    return place(f"memory://bucket/{tmp_path.name}/{name}")


def test_shards_in_a_store_are_the_files_of_a_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_files(tmp_path / "text")
    expected, out = open_corpus(tokens_of(data, tmp_path / "tokens")), in_memory(tmp_path, "tokens")
    found = open_corpus(tokens_of(data, out))
    files = {path.name: path.read_bytes(2**20) for path in out.iterdir() if path.is_file()}
    assert files == content(tmp_path / "tokens")
    assert (
        found.fingerprint
        == expected.fingerprint
        == open_corpus(DataConfig(tokens=(str(out),)), verify=True).fingerprint
    )
    same_batches(expected, found, data)
    assert tokenize(data, out, 5, here) == 0
    (out / "train-00002.tokens").unlink()
    assert (
        tokenize(data, out, 5, here) == 1
        and (out / "train-00002.tokens").read_bytes(2**20) == files["train-00002.tokens"]
    )
    assert not list((tmp_path / "cache" / "jaxformer" / "staging").iterdir())


def test_what_a_store_answers_is_no_damage(tmp_path, monkeypatch):
    out = in_memory(tmp_path, "tokens")
    where, request = tokens_of(write_files(tmp_path / "text"), out), object_store.request
    found = open_corpus(where)
    for name in ("tokens.json", "train-00000.json"):

        def refuses(method, address, *args, name=name, **settings):
            if method == "cat_file" and address.endswith(name):
                raise StoreError(13, "access is refused: Forbidden", address)
            return request(method, address, *args, **settings)

        with monkeypatch.context() as patched, pytest.raises(ConfigError) as error:
            patched.setattr(object_store, "request", refuses)
            np.asarray(found.train.tokens if name != "tokens.json" else open_corpus(where))
        assert str(error.value) == f"config.data.tokens: {out}: {name}: access is refused: Forbidden"
    np.testing.assert_array_equal(np.asarray(found.train.tokens), np.asarray(open_corpus(where).train.tokens))


def test_one_at_a_time_writes_into_a_folder(tmp_path):
    data = write_files(tmp_path / "text")

    def both(function, items):
        with pytest.raises(ConfigError, match=rf"^--out: {tmp_path / 'tokens'} is in use by process"):
            tokenize(data, tmp_path / "tokens", 5, here)
        here(function, items)

    tokenize(data, tmp_path / "tokens", 5, both)
    tokens_of(data, tmp_path / "alone")
    assert content(tmp_path / "tokens") == content(tmp_path / "alone")


@pytest.mark.parametrize("name", ["plan.json", "tokenizer.json", "key"])
def test_damage_to_what_a_later_start_goes_on_from(tmp_path, name):
    """Any byte of it: it is made again, or the start is refused; never other shards, never a traceback."""
    data, out = write_files(tmp_path / "text", counts=(3, 2), tokenizer="bytes"), tmp_path / "tokens"
    tokens_of(data, out, 2)
    expected, whole = content(out), (out / "work" / name).read_bytes()
    for at in [*range(0, len(whole), 1 + len(whole) // 10), None]:
        (out / "tokens.json").unlink(missing_ok=True)
        raw = bytearray(whole)
        if at is not None:
            raw[at] ^= 0x81 if at % 2 else 1
        (out / "work" / name).write_bytes(raw if at is not None else b"")
        if name == "key":
            with pytest.raises(ConfigError, match="was begun with other text"):
                tokenize(data, out, 2, here)
        else:
            assert tokenize(data, out, 2, here) == 0 and content(out) == expected


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    data, out = write_files(tmp_path / "text"), tmp_path / "tokens"

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(ConfigError) as error:
        patched.setattr(tokenization, "_write", full)
        tokenize(data, out, 5, here)
    assert str(error.value) == f"--out: {out}: No space left on device"
    with pytest.raises(ConfigError) as error:
        tokenize(data, out, 5, lambda function, items: tokenization._told(str(out / "work" / "error"), full, None))
    assert (out / "work" / "error").read_text() == f"--out: {out}: No space left on device"


def test_what_is_left_out_of_a_file_in_both_splits_is_counted_once(tmp_path):
    """As of the files themselves: a broken line counts where it stands."""
    data = replace(
        write_files(tmp_path / "text", counts=(6, 6), tokenizer="bytes"), on_error="skip", validation_fraction=0.3
    )
    path = tmp_path / "text" / "1.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{", lines[0], "{", *lines[1:4], "{", lines[4], "{", lines[5], "{"]))
    expected, found = open_corpus(data, progress=False), open_corpus(tokens_of(data, tmp_path / "tokens"))
    assert (expected.train.num_skipped, expected.validation.num_skipped) == (2, 3)
    assert (found.train.num_skipped, found.validation.num_skipped) == (2, 3)


def test_the_text_may_lie_in_a_store(tmp_path):
    data = write_files(tmp_path / "text", tokenizer="bytes", validation_fraction=0.3)
    for path in (tmp_path / "text").glob("*.jsonl"):
        in_memory(tmp_path, f"text/{path.name}").write_atomically(path.read_bytes())
    moved = replace(data, files=(str(in_memory(tmp_path, "text/*.jsonl")),))
    expected, found = (open_corpus(tokens_of(each, tmp_path / name)) for each, name in ((data, "a"), (moved, "b")))
    assert found.fingerprint == expected.fingerprint

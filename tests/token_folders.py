"""Texts, and the token shards and saved datasets of them, made in this process."""

import json
import random

from jaxformer.config import DataConfig
from jaxformer.runs.tokenization import tokenize

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "by", "an", "old", "mill", "weiß", "東京"]


def texts(count, seed=0):
    """Texts of 1 to 200 words, some with line ends."""
    dice = random.Random(seed)
    return [
        "".join(dice.choice(WORDS) + dice.choice("   \n") for _ in range(dice.randint(1, 200))) for _ in range(count)
    ]


def write_files(folder, counts=(7, 1, 12, 5), **settings):
    """A config of .jsonl files of so many documents each."""
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(counts):
        lines = [json.dumps({"text": text}) for text in texts(count, number)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return DataConfig(
        files=(str(folder / "*.jsonl"),), cache_dir=str(folder / "cache"), **{"tokenizer_vocab": 300, **settings}
    )


def here(function, items):
    """Runs the items one after the other."""
    for item in items:
        function(item)


def tokens_of(data, out, shards=5):
    """A config that reads the shards of another's text."""
    tokenize(data, out, shards, here)
    return DataConfig(tokens=(str(out),))


def content(folder):
    """Name -> bytes of every file but those that a later start goes on from."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def saved(folder, texts, shards=2):
    """A folder as `save_to_disk` of `datasets` writes it; tests/data/test_hf_source.py compares with the library."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    each = -(-len(texts) // shards)
    for i, name in enumerate(names):
        table = pa.table({"text": texts[i * each : (i + 1) * each]})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=170)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")

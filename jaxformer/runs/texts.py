"""The text of a run as it is used: training batches, and what is held out of each source."""

from typing import Any

from jaxformer.config import Config, DataConfig
from jaxformer.data import token_source
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.corpus import Corpus, Split
from jaxformer.data.mixture import MixedCorpus, MixtureBatches, training_batches
from jaxformer.data.objectives import OBJECTIVES
from jaxformer.data.rows import Lengths
from jaxformer.training.evaluate import HeldOut

Text = Corpus | MixedCorpus


def check(config: Config) -> None:
    """Raises ConfigError: rows as long as the model's cannot be made of any text; none is read."""
    OBJECTIVES[config.data.objective].check(config.data, Lengths(config.model.context_length, config.source_length))


def batches_of(config: Config, text: Text, host_row_indices: Any = None) -> Batches | MixtureBatches:
    """The training batches; `host_row_indices` as of `Batches`."""
    shape = _shape(config) | {"host_row_indices": host_row_indices}
    return training_batches(text, config.data, seed=config.seed, **shape)


def held_out_of(config: Config, text: Text, host_row_indices: Any = None) -> dict[str, HeldOut]:
    """Name of a source, "" of the only one -> what is held out of it, with a sample of train.eval_rows rows of all
    sources together.

    Args:
      config: vocabulary size filled in.
      text: of `open_text`.
      host_row_indices: as of `eval_batches`.

    Raises:
      ConfigError: a source's held-out text is too short to hold a target.
    """
    found = {}
    rows, options = config.train.eval_rows, _shape(config) | {"host_row_indices": host_row_indices}
    most = None if rows is None else -(-rows // len(text.sources))
    for name, part in config.data.parts().items():
        split = text.sources[name].validation
        with config.data.naming(name):
            batches = eval_batches(split, text.tokenizer, part, **options)
            sample = None if most is None else eval_batches(split, text.tokenizer, part, **options, max_rows=most)
        found[name] = HeldOut(batches, text.shares[name], _bytes_per_token(config, split), sample)
    return found


def notes(config: Config, text: Text) -> list[str]:
    """Lines about what was left out of the text, and about a part to hold out that its source does not look at."""
    found = text.notes()
    for name, part in config.data.parts().items():
        where = f"data.mixture.{name}" if name else "data"
        if part.validation_fraction != type(part).validation_fraction and (why := _held_out_otherwise(part)):
            found.append(f"{where}.validation_fraction: {part.validation_fraction} is not used: {why}")
    return found


def _held_out_otherwise(data: DataConfig) -> str:
    """What is held out, where that is no share of the text; else ""."""
    if data.source == "stdlib":
        return "of the standard library one file in twenty is held out"
    if data.source == "tfds":
        return f"data.tfds_validation_split {data.tfds_validation_split} is held out"
    if data.validation_files or data.validation_tokens or data.hf_validation_split:
        given = ("validation_files", "validation_tokens", "hf_validation_split")
        return f"{next(f'data.{name}' for name in given if getattr(data, name))} is held out"
    if data.source == "tokens" and (folder := token_source.own_folder(data)) is not None:
        return f"{folder} has held-out text of its own, chosen when it was tokenised"
    return ""


def skipped(config: Config, text: Text) -> dict[str, int]:
    """For a record: how many lines and examples were left out; nothing where none may be."""
    allowed = any(part.on_error == "skip" for part in config.data.parts().values())
    return {"num_skipped": text.num_skipped} if allowed else {}


def compressed(text: Text) -> dict[str, float]:
    """Bits per byte that general compressors need for the held-out text, of a mixture by its shares of the bytes; empty
    where they were not tried."""
    every = {name: one.validation for name, one in text.sources.items()}
    weights = {name: text.shares[name] * split.num_bytes / split.num_tokens for name, split in every.items()}
    names = set.intersection(*(set(split.compressed) for split in every.values()))
    return {
        compressor: sum(weights[name] * 8 * s.compressed[compressor] / s.num_bytes for name, s in every.items())
        / sum(weights.values())
        for compressor in next(iter(every.values())).compressed
        if compressor in names
    }


def _shape(config: Config) -> dict[str, Any]:
    lengths = {"context_length": config.model.context_length, "source_length": config.source_length}
    return {"rows": config.train.global_batch_size, **lengths}


def _bytes_per_token(config: Config, split: Split) -> float | None:
    if not OBJECTIVES[config.data.objective].traits.is_code or split.num_unknown:
        return None
    return split.num_bytes / max(split.num_tokens - 1, 1)

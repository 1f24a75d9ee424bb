"""Documents of a prepared TensorFlow dataset, read without TensorFlow (which the array_record format allows).

Reads only local files. Finds datasets without TFDS, which would try the network for minutes if one is missing and
print hundreds of lines for an unknown name.
"""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import Example
from jaxformer.data.pair_text import joined, named
from jaxformer.data.record_examples import EXAMPLES
from jaxformer.errors import ConfigError


def documents(data: DataConfig, split: str, faults: Faults | None = None) -> Iterator[str]:
    """The text of each example of data.tfds_train_split or data.tfds_validation_split, in order, without blank ones; of
    a set of translations a pair.

    Args:
      data: tfds_name and tfds_dir name the dataset, text_field, or source_field and target_field, what holds the text.
      split: "train" or "validation".
      faults: handles examples that are not text; None: by data.on_error.

    Raises:
      ConfigError: the extra is not installed; the dataset is unknown, not prepared here, or damaged; a format that
        needs TensorFlow; no such split or feature; depending on `faults`, also an example that is not UTF-8 text.
    """
    directory, _, records, field, wanted = _opened(data, split, named(data.text_fields))
    faults = Faults(data.on_error) if faults is None else faults
    return _texts(records, list(named(data.text_fields)), f"config.{field}: {directory}: {wanted}", faults)


def examples(data: DataConfig, split: str, faults: Faults) -> Iterator[Example]:
    """The examples of a split for an objective that learns from labels, as `record_examples.EXAMPLES` makes them of
    records; the labels of a class feature by their names. Arguments and errors as of `documents`."""
    directory, builder, records, field, wanted = _opened(data, split, {})
    make, where = EXAMPLES[data.objective], f"config.{field}: {directory}: {wanted}"
    for index in range(len(records)):
        try:
            yield make(_plain(records[index], builder.info.features), data)
        except (ValueError, TypeError) as error:
            faults.meet(ConfigError(f"{where}: example {index}: {_one_line(error)}"))


def class_names(data: DataConfig) -> list[str]:
    """The names of the label's classes in the order of their numbers; [] if it has none. Errors as of `documents`."""
    assert data.labelled is not None
    features = _opened(data, "train", {})[1].info.features
    name = data.labelled.label_field
    try:
        feature = features[name]
    except KeyError:
        return []
    return list(getattr(getattr(feature, "feature", feature), "names", None) or [])


def _plain(value: Any, feature: Any = None) -> Any:
    """A value of a record as JSON would have it, class labels by their names where they have some."""
    if isinstance(value, dict):
        return {name: _plain(each, feature[name] if feature is not None else None) for name, each in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if getattr(feature, "names", None) and hasattr(feature, "int2str") and np.ndim(value) == 0:
        return None if int(value) < 0 else feature.int2str(int(value))  # -1: of test splits without labels
    inner = getattr(feature, "feature", None)
    if isinstance(value, list | np.ndarray) and np.ndim(value):
        return [_plain(each, inner) for each in value]
    return value.item() if isinstance(value, np.generic | np.ndarray) else value


def _opened(data: DataConfig, split: str, fields: dict[str, str]) -> tuple[Path, Any, Any, str, str]:
    """(directory, builder, records, field of the config and name of the split); errors as of `documents`.

    Args:
      data, split: as of `documents`.
      fields: features that must be there -> the field of the config that names each.
    """
    directory = find(data)
    tfds = _tfds()
    try:
        builder = tfds.builder_from_directory(str(directory))
    except Exception as error:  # several libraries may raise; the dataset is damaged
        raise ConfigError(f"config.data.tfds_name: {directory} cannot be read ({_one_line(error)})") from None
    if builder.info.file_format.value != "array_record":
        raise ConfigError(
            f"config.data.tfds_name: {directory} is in the format {builder.info.file_format.value}, which needs "
            f"TensorFlow; prepare it with file_format='array_record'"
        )
    for name, setting in fields.items():
        if name not in builder.info.features:
            raise ConfigError(
                f"config.{setting}: {name!r} is not a feature of {directory}; "
                f"it has {', '.join(sorted(builder.info.features))}"
            )
    field = f"data.tfds_{split}_split"
    wanted = data.tfds_train_split if split == "train" else data.tfds_validation_split
    try:
        return directory, builder, builder.as_data_source(wanted), field, wanted
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"config.{field}: {wanted!r}: {_one_line(error)} ({directory} has {', '.join(builder.info.splits)})"
        ) from None
    except Exception as error:
        raise ConfigError(f"config.{field}: {directory}: {wanted} cannot be read ({_one_line(error)})") from None


def files(data: DataConfig) -> list[Path]:
    """The files of the dataset, sorted."""
    return sorted(path for path in find(data).iterdir() if path.is_file())


def find(data: DataConfig) -> Path:
    """The directory of the dataset that data.tfds_name and data.tfds_dir name.

    `tfds_dir` alone is the dataset's own directory (with dataset_info.json) or one with a single dataset below it. With
    `tfds_name` ("name", "name/config", either with ":1.0.0") it is the folder of all datasets; None: TFDS's default. Of
    several versions the newest is used.

    Raises:
      ConfigError: nothing found; says how to prepare it, or the nearest known name.
    """
    if data.tfds_dir is not None:
        root = Path(data.tfds_dir).expanduser()
        if not root.is_dir():
            raise ConfigError(f"config.data.tfds_dir: {root} is not a directory")
        if (root / "dataset_info.json").exists():
            return root
    else:
        root = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
    name, _, version = (data.tfds_name or "").partition(":")
    below = name.strip("/")
    what = f"config.data.tfds_dir: {root}" if data.tfds_name is None else f"config.data.tfds_name: {data.tfds_name!r}"
    found = (path.parent for path in (root / below).glob("**/dataset_info.json"))
    # TFDS names a folder "incomplete..." while it prepares it.
    prepared = [path for path in found if version in ("", path.name) and not path.name.startswith("incomplete")]
    families = sorted({str(path.parent.relative_to(root)) for path in prepared})
    if len(families) > 1 and below not in families:
        raise ConfigError(f"{what} is several datasets; set data.tfds_name to one of {', '.join(families)}")
    if not prepared:
        raise ConfigError(f"{what} {_why_not(data.tfds_name, root)}")
    own = [path for path in prepared if str(path.parent.relative_to(root)) == below]
    return max(own or prepared, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _why_not(name: str | None, root: Path) -> str:
    if name is None:
        return "holds no prepared dataset (no dataset_info.json below it)"
    known = _tfds().list_builders(with_community_datasets=False)
    known += [path.name for path in root.glob("*") if path.is_dir() and path.name != "downloads"]
    if name.partition(":")[0].partition("/")[0] in known:
        return (
            f'is not prepared under {root}; prepare it once, on a machine with a network: python -c "import '
            f"tensorflow_datasets as t; t.builder('{name}', data_dir='{root}', file_format='array_record')"
            f'.download_and_prepare()"'
        )
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"is not a dataset that TFDS knows, nor one under {root}" + (f"; nearest: {', '.join(near)}" if near else "")


def _texts(examples: Any, names: list[str], where: str, faults: Faults) -> Iterator[str]:
    for index in range(len(examples)):
        try:
            example = examples[index]
            values = [example[name] for name in names]
            if any(value is None for value in values):  # the library's result for a truncated file
                raise ValueError("nothing is there")
        except Exception as error:
            raise ConfigError(f"{where}: example {index} cannot be read ({_one_line(error)})") from None
        try:
            text = joined([_decoded(value, name) for value, name in zip(values, names, strict=True)])
        except UnicodeDecodeError as error:
            faults.meet(ConfigError(f"{where}: example {index}: byte {error.start} is not UTF-8 text"))
        except ValueError as error:
            faults.meet(ConfigError(f"{where}: example {index}: {error}"))
        else:
            if text:
                yield text


def _decoded(value: Any, name: str) -> str:
    text = value.decode() if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise ValueError(f"{name!r} is a {type(text).__name__}, not text")
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError:
        raise ConfigError("config.data.source: tfds needs the tfds extra: pip install 'jaxformer[tfds]'") from None
    return tensorflow_datasets

"""A folder of the library transformers as the directory of a run, which every program opens: step 0, without records.

Its manifest has one entry more, "imported": where the weights came from and what they were there, which `export` writes
again. `config.py` in it is the config of a run that starts from it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import CheckpointConfig, Config, from_mapping, to_dict
from jaxformer.config.reference import as_file
from jaxformer.config.registry import special_tokens
from jaxformer.data.tokenizers import FILE_NAME, Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.interchange import adapter_files
from jaxformer.interchange.architectures import data_for
from jaxformer.interchange.importing import Imported, import_model
from jaxformer.interchange.tensor_files import read_json
from jaxformer.interchange.tokenizer_files import read_about, read_tokenizer
from jaxformer.models.flops import count_parameters
from jaxformer.runs import manifest
from jaxformer.runs.import_folder import CHECKPOINTS, CONFIG, begun, check_empty
from jaxformer.runs.pretrain import mesh_of
from jaxformer.storage import files, json_checksum
from jaxformer.storage.address import is_address, place
from jaxformer.training.checkpoint.checksum import checksums
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.state import TrainState

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ROWS = 8  # of a batch, in evaluation and until the config of another run says otherwise
LEARNING_RATE = 2e-5


def import_run(
    directory: str | Path, workdir: str, *, mesh: str | None = None, tokenizer: str | None = None, log: Any = print
) -> None:
    """Makes a run of a model of others.

    Args:
      directory: with config.json, safetensors and tokenizer.json.
      workdir: of the run; is made, or is empty.
      mesh: what the parameters are split over while they are read, as `pretrain.mesh_of` reads it.
      tokenizer: a tokenizer.json, or a folder with one; None: the one in `directory`.
      log: takes lines.

    Raises:
      ConfigError: as `import_model`; there is no tokenizer, or one with more tokens than the model; the run's directory
        is not empty or cannot be written. CheckpointError: the weights cannot be written.
    """
    folder, out = Path(directory), place(workdir)
    check_empty(workdir)
    if (folder / adapter_files.CONFIG).is_file() and not (folder / "config.json").exists():
        raise ConfigError(f"{folder}: holds adapters of peft; accepted: with --base, the run that they belong to")
    devices = mesh_of(workdir, mesh)
    found = import_model(folder, None if mesh is None else devices)
    about = read_json(folder / "config.json")
    text = _tokenizer(folder, tokenizer, found, about)
    config = config_of(found, text, workdir)
    with begun(workdir):
        sums = checksums({"params": found.params})
        content = json_checksum.digest(json.dumps(sums, sort_keys=True).encode())
        said = manifest.describe(config, [], "", content, json_checksum.digest(text.content()))
        said["imported"] = {
            "directory": str(folder.absolute()), "model_type": about["model_type"],
            "dtype": DTYPES.get(found.dtype, "float32"), "tokenizer_config": read_about(folder),
        }  # fmt: skip
        try:
            text.save(out)
            files.write_atomically(out / CONFIG, _next_config(config, workdir))
        except OSError as error:
            raise ConfigError(f"--workdir: {workdir} cannot be written ({error.strerror})") from None
        saved = Checkpoints(out / CHECKPOINTS, CheckpointConfig(), said["fingerprint"])
        saved.save(0, fresh_state(found.params))
        saved.close()
        manifest.write(out / manifest.FILE_NAME, said)  # last: until then there is no run
    size = f"{count_parameters(config.model).total:,} parameters, {text.vocab_size} tokens"
    log(f"{workdir}: {about['model_type']} as {config.model.family}, {size}, from {folder}")
    log(f"to train it on: jaxformer pretrain {out / 'config.py'} --config.data.files=...")


def config_of(found: Imported, tokenizer: Tokenizer, workdir: str) -> Config:
    """The config that the run has."""
    model = to_dict(found.config)
    config: Config = from_mapping(
        {
            "model": model,
            "data": data_for(model) | _labels(found),
            "train": {"global_batch_size": ROWS},
            "workdir": workdir,
        }
    )
    hidden = replace(config.data, objective="span_corruption", denoising=None) if config.model.encoder else config.data
    if (tokenizer.ids_of(special_tokens(hidden)) >= 0).all():
        config = replace(config, data=hidden)
    return config


def _labels(found: Imported) -> dict[str, Any]:
    """The section of `data` that says the labels of a task, whose examples begin as those of the model did."""
    if found.config.head is None:
        return {}
    opening = {"opening": "cls"} if found.config.family == "bert" else {}
    return {"labelled": opening | ({"labels": found.labels} if found.labels else {})}


def _tokenizer(folder: Path, given: str | None, found: Imported, about: dict[str, Any]) -> Tokenizer:
    path = folder / FILE_NAME if given is None else Path(given)
    path = path / FILE_NAME if path.is_dir() else path
    if given is None and found.tokenizer is None:
        raise ConfigError(f"{folder}: has no {FILE_NAME}; accepted: one there, or --tokenizer=FILE")
    tokenizer = read_tokenizer(path, about, found.config.family)
    size = found.config.vocab_size or 0
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"{path}: {tokenizer.vocab_size} ids, and the model has {size} rows for them; accepted: at most {size}"
        )
    return tokenizer


def _next_config(config: Config, workdir: str) -> str:
    where = workdir if is_address(workdir) else str(Path(workdir).absolute())
    about = f"Goes on from the weights in {where}; any field may be changed on the command line."
    rule = replace(config.optimizer, learning_rate=LEARNING_RATE)
    return as_file(replace(config, workdir=f"{workdir}_tuned", init_from=where, optimizer=rule), about)


def fresh_state(params: Any) -> TrainState:
    """Weights without an optimizer's state."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, (), None, jax.random.key_data(jax.random.key(0)), zero, zero)

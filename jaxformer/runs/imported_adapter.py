"""Adapters of the library peft beside the weights of a run, as a run of its own: step 0, without records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxformer.config import CheckpointConfig, Config
from jaxformer.errors import ConfigError
from jaxformer.interchange.adapter_files import import_adapter
from jaxformer.models.lora import GROUP, merge_lora
from jaxformer.runs import manifest
from jaxformer.runs.import_folder import CHECKPOINTS, begun, check_empty
from jaxformer.runs.imported_run import fresh_state
from jaxformer.runs.pretrain import open_run
from jaxformer.storage import json_checksum
from jaxformer.storage.address import place
from jaxformer.training.checkpoint.checksum import checksums
from jaxformer.training.checkpoint.manager import Checkpoints


def import_adapter_run(directory: str | Path, base: str, workdir: str, *, mesh: str | None = None, log: Any = print):
    """Makes a run of adapters and of the run that they belong to.

    Args:
      directory: with adapter_config.json and adapter_model.safetensors.
      base: the run with the weights; adapters of its own become part of them.
      workdir: of the new run; is made, or is empty.
      mesh: as of `imported_run.import_run`.
      log: takes lines.

    Raises:
      ConfigError: as `import_adapter` and `open_run`; the directory is not empty or cannot be written. CheckpointError:
        there are no weights, or they cannot be written.
    """
    out = place(workdir)
    check_empty(workdir)
    about = manifest.read(base)
    run = open_run(base, mesh)
    kind = about.get("imported", {}).get("model_type")
    tune, adapters = import_adapter(directory, run.config.model, kind)
    rule = replace(run.config.optimizer, name="adamw") if run.config.optimizer.name == "muon" else run.config.optimizer
    config: Config = replace(
        run.config, tune=tune, init_from=str(base), init_optimizer=False, optimizer=rule, workdir=workdir
    )
    params = {**merge_lora(run.params), GROUP: adapters}
    with begun(workdir):
        content = json_checksum.digest(json.dumps(checksums({"params": params}), sort_keys=True).encode())
        said = manifest.describe(config, [], "", content, json_checksum.digest(run.tokenizer.content()))
        said["imported"] = {**about.get("imported", {}), "directory": str(Path(directory).absolute())}
        try:
            run.tokenizer.save(out)
        except OSError as error:
            raise ConfigError(f"--workdir: {workdir} cannot be written ({error.strerror})") from None
        saved = Checkpoints(out / CHECKPOINTS, CheckpointConfig(), said["fingerprint"])
        saved.save(0, fresh_state(params))
        saved.close()
        manifest.write(out / manifest.FILE_NAME, said)  # last: until then there is no run
    names = ", ".join(tune.lora_targets or ())
    log(f"{workdir}: adapters of rank {tune.lora_rank} ({names}) from {directory}, beside the weights of {base}")

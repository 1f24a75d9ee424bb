"""A run from config to result: the only file that brings data, model and training together.

Everything that can be refused is refused before anything compiles and before anything is written.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from jaxformer.config import Config, MeshConfig, ModelConfig, from_mapping
from jaxformer.config.mesh import AXES
from jaxformer.data import languages
from jaxformer.data.mixture import open_text
from jaxformer.data.progress_bars import say
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError, ProgramError
from jaxformer.models import own_kinds
from jaxformer.models.attention_support import check_available, check_mesh
from jaxformer.models.distilled_model import teacher_flops
from jaxformer.models.flops import six_n, training_flops
from jaxformer.models.lora import with_adapters
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import (
    check_batch,
    check_context,
    check_experts,
    check_stages,
    check_without_stages,
    host_rows,
    make_mesh,
    param_shardings,
)
from jaxformer.runs import changes, distilling, manifest, memory_check, messages, tasks, texts, warm_start
from jaxformer.runs.command_line import Parsed
from jaxformer.runs.store_lock import lock_of
from jaxformer.runtime import cluster, coordination
from jaxformer.runtime.program import keep_compiled_programs
from jaxformer.specs import abstract_params
from jaxformer.storage import json_checksum
from jaxformer.tracking import trackers
from jaxformer.training import loop
from jaxformer.training.checkpoint.layout import list_steps
from jaxformer.training.checkpoint.manager import restore_params
from jaxformer.training.evaluate import HeldOut, TrainBatches
from jaxformer.training.state import TrainState
from jaxformer.types import Model, Params

C = TypeVar("C", bound=Config)


class Run(NamedTuple):
    """A finished or running run, opened to be used.

    Attributes:
      config: as in its manifest; attention "auto" where the kernel it names is not here.
      params: of the newest valid checkpoint (the moving average where there is one); a `LowRank` for every weight that
        has an adapter, see `models.lora`.
      tokenizer: the run's own.
      step: updates made.
    """

    config: Config
    params: Params
    tokenizer: Tokenizer
    step: int


def pretrain(parsed: Parsed) -> loop.Result:
    """Trains what a command line asked for, or goes on with it; prints what it is, how it ended and what to do next.

    Raises:
      ConfigError, CheckpointError: one line each, nothing written over; TrainingDiverged.
      ProgramError: the run ended below the floor of its language, which only a leak can do.
    """
    with ExitStack() as stack:
        return _pretrain(parsed, stack)


def _pretrain(parsed: Parsed, stack: ExitStack) -> loop.Result:
    since = time.perf_counter()
    cluster.initialize(parsed.config.distributed)
    if parsed.config.compilation_cache:
        keep_compiled_programs()
    chief = jax.process_index() == 0
    log = print if chief else lambda _: None
    # What one process finds wrong ends all of them here, before the others wait for it in a step.
    verify = getattr(parsed.options, "verify", False)
    ready = coordination.raise_together(lambda: _prepare(parsed.config, chief, stack, verify), "its text")
    config, corpus, mesh, model, batches, held_out, warm, teacher = ready
    coordination.assert_same(manifest.identity(config, corpus.fingerprint), "its config and text")
    floor = languages.floor(config.data, config.model.context_length, config.source_length)

    told: list[str] = []

    def write() -> tuple[str, list[str]]:
        if not chief:
            return "", []
        tokenizer = json_checksum.digest(corpus.tokenizer.content())
        about = manifest.describe(config, parsed.overrides, parsed.source, corpus.fingerprint, tokenizer)
        manifest.write_or_check(about, config, changes.MAY_CHANGE)
        told.extend(changes.notes(manifest.stored_config(config.workdir), config))
        if note := manifest.changed_files(config.workdir, config):
            told.append(note)
        manifest.record_change(config)
        if not manifest.tokenizer_is_kept(config.workdir):
            try:
                corpus.tokenizer.save(config.workdir)
            except OSError as error:
                raise ConfigError(f"config.workdir: {config.workdir}: tokenizer.json: {error.strerror}") from None
        return manifest.fingerprints(config.workdir, config)

    written = coordination.raise_together(write, "the manifest")
    fingerprint, also = coordination.broadcast_from_0(written, "the manifest")
    coordination.raise_together(lambda: manifest.check_shared(config), "the manifest")
    flops = training_flops(config.model, config.data, config.tune)
    if teacher is not None:
        flops += teacher_flops(teacher, config.data)
    messages.print_overview(config, corpus, batches, mesh, parsed.overrides, flops, log)
    for line in told:
        log(line)

    result = loop.train(
        model,
        batches,
        held_out,
        config,
        workdir=config.workdir,
        mesh=mesh,
        flops_per_token=flops,
        final_fields={
            "flops_6nd_per_token": six_n(config.model),
            "compressed_bits_per_byte": texts.compressed(corpus),
            **texts.skipped(config, corpus),
            **({} if floor is None else {"floor": floor.nats, "floor_stderr": floor.standard_error}),
        },
        fingerprint=fingerprint,
        also_of_this_run=also,
        resume_command=messages.resume_command(parsed),
        initial=_starter(config, warm, model, mesh, log),
        since=since,
        log=log,
    )
    if result.evaluation is not None:
        messages.print_result(config, corpus, result, log, parsed.source)
        found = result.evaluation["loss"], result.evaluation["loss_stderr"]
        leak = None if floor is None else languages.below_floor(floor, *found)
        if leak is not None:
            raise ProgramError(f"{config.workdir}: {leak}")
    return result


def _prepare(
    config: Config, chief: bool, stack: ExitStack, verify: bool = False
) -> tuple[
    Config, texts.Text, Mesh, Model, TrainBatches, dict[str, HeldOut], warm_start.WarmStart | None, ModelConfig | None
]:
    """Opens everything that a run needs and can be refused for; writes nothing but the corpus and, into `stack`, the
    lock of the working directory."""
    mesh = make_mesh(config.mesh)
    check_available(config.execution)
    check_stages(config, mesh)
    check_batch(config.train.global_batch_size, config.execution.gradient_accumulation_steps, mesh)
    check_context(config.model, mesh)
    check_experts(config.model, mesh)
    check_mesh(config.execution, mesh)
    manifest.check_workdir(config, changes.MAY_CHANGE)
    if made := max(list_steps(f"{config.workdir}/checkpoints"), default=0):
        changes.check_schedule(manifest.stored_config(config.workdir), config, made)
    if chief:
        stack.enter_context(lock_of(config.workdir))
        trackers.check_installed(config.tracking.trackers)
    config = warm_start.with_tokenizer(config)
    texts.check(config)
    corpus = open_text(config.data, progress=chief, verify=verify)
    config = tasks.fit_labels(fit_vocabulary(config, corpus.tokenizer), corpus)
    own_kinds.check_model(config)
    model = make_model(config.model, config.loss, config.execution, config.optimizer.freeze, config.tune)
    teacher = distilling.teacher_of(config, corpus.tokenizer)
    model = distilling.with_teacher(model, config, teacher)
    kept = {"model": model.specs, "frozen": model.frozen}
    memory_check.check_training(config, kept, mesh)  # refuses what does not divide as well
    own = host_rows(config.train.global_batch_size, mesh)
    batches, held_out = texts.batches_of(config, corpus, own), texts.held_out_of(config, corpus, own)
    held_out = tasks.scored(held_out, config, corpus)
    looked_at = {f"{name} held-out".strip(): each.batches for name, each in held_out.items()}
    own_kinds.check_batches(config, len(own), {"training": batches, **looked_at})
    warm = None if made else warm_start.plan(config, model, corpus.tokenizer)
    return config, corpus, mesh, model, batches, held_out, warm, teacher


def _starter(
    config: Config, warm: warm_start.WarmStart | None, model: Model, mesh: Mesh, log: Any
) -> Callable[[TrainState], TrainState] | None:
    """What a run that begins does with its initial state; None: nothing."""
    if config.distill.teacher is not None:
        return distilling.starter(config, model, mesh, log)
    return None if warm is None else warm_start.starter(warm, model, mesh, log)


def fit_vocabulary(config: C, tokenizer: Tokenizer) -> C:
    """`config` with the vocabulary size filled in: the tokenizer's, rounded up to a multiple of 64.

    Raises:
      ConfigError: the config asks for a vocabulary smaller than the tokenizer's.
    """
    size = config.model.vocab_size
    if size is None:
        size = -(-tokenizer.vocab_size // 64) * 64
    elif size < tokenizer.vocab_size:
        raise ConfigError(
            f"config.model.vocab_size: {size} is less than the tokenizer's {tokenizer.vocab_size}; "
            f"accepted: none, or at least {tokenizer.vocab_size}"
        )
    return replace(config, model=replace(config.model, vocab_size=size))


def open_run(workdir: str | Path, mesh: str | None = None) -> Run:
    """Config, parameters and tokenizer of the run in `workdir`.

    Args:
      workdir: of the run.
      mesh: what the parameters are split over, as `mesh_of` reads it; from then on it is the one in use.

    Raises:
      ConfigError: there is no run; CheckpointError: it has no valid checkpoint.
    """
    config: Config = manifest.read_config(workdir)
    devices = mesh_of(workdir, mesh)
    check_without_stages(devices, "decoding")
    tokenizer = tokenizer_of(workdir)
    if note := manifest.changed_files(workdir, config):
        say(note)
    if mesh is not None:
        jax.set_mesh(devices)
    specs = make_model(config.model, config.loss, tune=config.tune.of_weights).specs
    params, step = params_of(workdir, laid_out(specs, devices))
    return Run(config, with_adapters(params, config.tune), tokenizer, step)


def tokenizer_of(workdir: str | Path) -> Tokenizer:
    """The run's own tokenizer. Raises ConfigError: it is not what the run wrote."""
    if not manifest.tokenizer_is_kept(workdir):
        raise ConfigError(
            f"workdir {workdir}: tokenizer.json is gone, damaged or another (its checksum is not the manifest's); "
            "going on with the run writes it again"
        )
    return Tokenizer.load(workdir)


def laid_out(specs: Any, mesh: Mesh) -> Params:
    """Shapes of parameters, and where they lie."""
    shapes, where = abstract_params(specs), param_shardings(specs, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)


def params_of(
    workdir: str | Path, abstract: Params, step: int | None = None, item: str | None = None
) -> tuple[Params, int]:
    """The weights of the newest valid checkpoint of the run in `workdir`, and their step; as `restore_params`."""
    fingerprint, also = manifest.fingerprints(workdir)
    return restore_params(f"{workdir}/checkpoints", abstract, item=item, step=step, fingerprint=fingerprint, also=also)


def mesh_of(workdir: str | Path, text: str | None) -> Mesh:
    """The mesh that a program uses a run on.

    Args:
      workdir: of the run.
      text: "run": the run's own mesh; "fsdp=4,tensor=2": this one, whose data axis takes what devices are left, or
        "data=1,fsdp=4": of the first devices; None: one device.

    Raises:
      ConfigError: it names no axis, or does not fit the devices that are here.
    """
    if text is None:
        return make_mesh(MeshConfig(1), jax.devices()[:1])
    if text == "run":
        return make_mesh(manifest.read_config(workdir).mesh)
    axes = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        given: Config = from_mapping({}, {f"mesh.{name.strip()}": number for name, number in axes.items()})
        sizes = [getattr(given.mesh, name) for name in AXES]
        return make_mesh(given.mesh, jax.devices() if None in sizes else jax.devices()[: math.prod(sizes)])
    except ConfigError as error:
        raise ConfigError(f"--mesh: {str(error).removeprefix('config.mesh').lstrip('.: ')}") from None

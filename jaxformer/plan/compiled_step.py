"""The real train step of a config, compiled for devices that need not be here, from shapes alone."""

import math
import re
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.data import vocabulary
from jaxformer.data.progress_bars import say
from jaxformer.errors import ConfigError
from jaxformer.functional import attention_choice, expert_sharding, grouped_choice
from jaxformer.functional.block_loss import chosen_chunk
from jaxformer.models.attention_support import check_available, check_mesh, unsupported_by
from jaxformer.models.families import family_of
from jaxformer.models.own_kinds import check_model
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import batch_sharding, check_context, check_experts, check_stages, make_mesh
from jaxformer.parallel.platforms import compiled_for
from jaxformer.plan.communication_bound import tokens_per_device
from jaxformer.plan.topology import Topology
from jaxformer.training.chunks import longest_chunk
from jaxformer.training.optim import make_optimizer
from jaxformer.training.state import TrainState
from jaxformer.training.step import compile_steps
from jaxformer.types import Batch, Model


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step, and what it was compiled from.

    Attributes:
      config: with what "auto" chooses on the target.
      model: its specs.
      mesh: over the target's devices.
      state: shapes and shardings of its state.
      text: of the optimised program; of one device.
      memory: XLA's `memory_analysis`, bytes of one device; None where it did not fit and the compiler gave up.
      needed: bytes of temporaries that a compiler which gave up asked for.
      seconds: that lowering and compiling took.
      compiled: the program itself; None where it did not fit.
    """

    config: Config
    model: Model
    mesh: Mesh
    state: TrainState
    text: str
    memory: Any
    needed: float | None
    seconds: float
    compiled: Any = None


def target_config(config: Config, topology: Topology, mesh: Mesh) -> Config:
    """`config` with the automatic choices of a run on the target, which may differ from those on this machine."""
    model, execution = config.model, config.execution
    if model.vocab_size is None:
        guess = config.data.tokenizer_vocab if config.data.tokenizer == "bpe" else 300  # characters are not many more
        entries = vocabulary.known(config.data) or guess
        model = replace(model, vocab_size=-(-entries // 64) * 64)
    if execution.attention == "auto":
        parts = mesh.shape["context"]
        length = model.context_length // parts
        # Not cuDNN's kernel, as rows hold several documents.
        able = [name for name in ("splash", "flash_gpu") if unsupported_by(name, model, parts) is None]
        tokens = tokens_per_device(config, {k: n for k, n in mesh.shape.items() if n > 1})
        heads = model.attention.num_heads if model.attention.has_implementations else 0
        scores = int(4 * tokens * heads / mesh.shape["tensor"] * length)
        sparse = bool(model.fitted_attention.patterns(length, model.causal))
        implementation: Any = attention_choice.choose(
            length, length, parts, topology.chip.platform, able, scores, sparse
        )
        execution = replace(execution, attention=implementation)
    if execution.experts == "auto" and model.feed_forward.has_experts:
        hidden = grouped_choice.part_of(model.feed_forward.hidden_width(model.width), mesh.shape["tensor"])
        grouped: Any = grouped_choice.choose(model.width, hidden, model.dtype, topology.chip.platform)
        execution = replace(execution, experts=grouped)
    sharing = mesh.shape.get("expert", 1) if model.feed_forward.has_experts else 1
    if execution.expert_exchange == "auto" and sharing > 1:
        kind, shape = model.feed_forward, (model.context_length, model.width)
        choices = None if kind.expert_choice else kind.top_k
        exchange: Any = expert_sharding.choose(
            "auto", sharing, shape, model.dtype, kind.slots(shape[0]), choices, topology.chip.platform
        )
        execution = replace(execution, expert_exchange=exchange)
    loss = config.loss
    if loss.chunk_tokens is None and topology.chip.platform == "cuda":  # the others choose alike
        rows = config.train.global_batch_size // execution.gradient_accumulation_steps
        shards = math.gcd(rows, mesh.shape["data"] * mesh.shape["fsdp"])
        loss = replace(loss, chunk_tokens=chosen_chunk(rows, model.vocab_size or 1, shards, topology.chip.platform))
    return replace(config, model=model, execution=execution, loss=loss)


def abstract_chunk(config: Config, mesh: Mesh) -> Batch:
    """Shapes and shardings of what one dispatch of the run takes: [K, B, T]."""
    where, steps = batch_sharding(mesh, 1), longest_chunk(config)
    one = family_of(config.model).batch_spec(config.model, config.data, config.train.global_batch_size)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype, sharding=where), one)


def compile_step(config: Config, topology: Topology) -> CompiledStep:
    """Compiles the train step that `training.loop` would dispatch, with its own shardings and donation.

    Raises:
      ConfigError: the mesh does not match the topology, or this has no such kernels, the batch or a parameter does not
        divide over it, or the model has a teacher.
    """
    if config.distill.teacher is not None:
        raise ConfigError(f"config.distill.teacher: {config.distill.teacher}; accepted in a plan: none")
    try:
        mesh = make_mesh(config.mesh, list(topology.devices))
    except ConfigError as error:
        raise ConfigError(str(error).replace("the number of devices is", f"{topology.name} has")) from None
    config = target_config(config, topology, mesh)
    check_stages(config, mesh)
    check_context(config.model, mesh)
    check_experts(config.model, mesh)
    check_mesh(config.execution, mesh)
    check_model(config)
    model = make_model(config.model, config.loss, config.execution, config.optimizer.freeze, config.tune)
    check_available(config.execution, topology.chip.platform, f"in {topology.name}")
    optimizer = make_optimizer(config.optimizer, config.train.steps, model.specs)
    steps = compile_steps(model, optimizer, mesh, config)
    began = time.perf_counter()
    sizes = " x ".join(f"{name} {n}" for name, n in mesh.shape.items())
    say(f"compiling the train step for {topology.name}, mesh {sizes}, remat {config.execution.remat}")
    with jax.set_mesh(mesh), compiled_for(topology.chip.platform):
        program: Any = steps.train
        lowered = program.lower(steps.abstract_state, abstract_chunk(config, mesh), jax.ShapeDtypeStruct((), jnp.int32))
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            needed = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", str(error))
            if needed is None:
                raise
            return CompiledStep(
                config,
                model,
                mesh,
                steps.abstract_state,
                "",
                memory=None,
                needed=float(needed[1]) * 2.0 ** {"K": 10, "M": 20, "G": 30, "T": 40}[needed[2]],
                seconds=time.perf_counter() - began,
            )
    seconds = time.perf_counter() - began
    return CompiledStep(
        config,
        model,
        mesh,
        steps.abstract_state,
        compiled.as_text(),
        memory=compiled.memory_analysis(),
        needed=None,
        seconds=seconds,
        compiled=compiled,
    )

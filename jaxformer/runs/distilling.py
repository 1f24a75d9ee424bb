"""The teacher of a run (`config.distill`): whether it can be one, and its weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import Config, ModelConfig
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.models.distilled_model import distilled, initial_layers
from jaxformer.models.families import FAMILIES, family_of
from jaxformer.models.lora import plain_params
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import param_shardings
from jaxformer.runs import manifest
from jaxformer.specs import abstract_params
from jaxformer.storage.address import place
from jaxformer.training.checkpoint.layout import leaf_name, list_steps
from jaxformer.training.checkpoint.manager import restore_params
from jaxformer.training.state import TrainState
from jaxformer.types import Model

FIELD = "config.distill.teacher"


def teacher_of(config: Config, tokenizer: Tokenizer) -> ModelConfig | None:
    """The model of the teacher; None: the run has none.

    Args:
      config: vocabulary size filled in.
      tokenizer: of the run.

    Raises:
      ConfigError: there is no such run or checkpoint, or it cannot teach this model.
    """
    where = config.distill.teacher
    if where is None:
        return None
    try:
        run: Config = manifest.read_config(where)
        same = Tokenizer.load(where).fingerprint == tokenizer.fingerprint
    except ConfigError as error:
        raise ConfigError(f"{FIELD}: {error}") from None
    if not list_steps(f"{where}/checkpoints"):
        raise ConfigError(f"{FIELD}: {where} has no checkpoint; accepted: a run that saved one")
    student, teacher = config.model, run.model
    can = [name for name, family in FAMILIES.items() if family.projection is not None]
    if student.family not in can:
        raise ConfigError(f"config.model.family: {student.family}; accepted with distill.teacher: {', '.join(can)}")
    wrong = {
        "has another tokenizer": not same,
        f"has a vocabulary of {teacher.vocab_size}, and the student {student.vocab_size}": (
            teacher.vocab_size != student.vocab_size
        ),
        f"is of family {teacher.family}": teacher.family != student.family,
        "has the head of a task": teacher.head is not None,
        f"reads {teacher.context_length} tokens, and the student {student.context_length}": (
            teacher.context_length < student.context_length
        ),
    }
    for what, there in wrong.items():
        if there:
            raise ConfigError(
                f"{FIELD}: {where} {what}; accepted: a run of family {student.family}, of the same tokenizer and "
                "vocabulary, that reads as many tokens or more"
            )
    if config.distill.cosine_weight and teacher.width != student.width:
        raise ConfigError(
            f"config.distill.cosine_weight: {config.distill.cosine_weight}; {where} is {teacher.width} wide, and the "
            f"student {student.width}; accepted: 0"
        )
    if config.distill.initial_layers:
        _check_layers(where, family_of(teacher).specs(teacher), family_of(student).specs(student))
    return teacher


def _check_layers(where: str, theirs: Any, mine: Any) -> None:
    """Raises ConfigError: parameters differ in more than the number of layers."""
    shapes = [
        {leaf_name(path): leaf.shape[1:] if path[0].key == "blocks" else leaf.shape
         for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(specs))}
        for specs in (theirs, mine)
    ]  # fmt: skip
    odd = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
    if odd:
        raise ConfigError(
            f"config.distill.initial_layers: True; {where} has another {odd[0]}; accepted: false, or the teacher's "
            "config.model but for num_layers"
        )


def with_teacher(model: Model, config: Config, teacher: ModelConfig | None) -> Model:
    """`model`, with the loss of `config.distill` if there is a teacher.

    Raises:
      ConfigError: `execution.attention` cannot do what the teacher asks of it.
    """
    if teacher is None:
        return model
    make_model(teacher, config.loss, config.execution)
    return distilled(model, config, teacher)


def starter(config: Config, model: Model, mesh: Mesh, log: Callable[[str], None]) -> Callable[[TrainState], TrainState]:
    """A function that gives the state of step 0 its teacher (adapters merged), and layers of it if asked for."""
    where, student = str(config.distill.teacher), config.model
    run: Config = manifest.read_config(where)

    def start(state: TrainState) -> TrainState:
        specs = make_model(run.model, run.loss, tune=run.tune.of_weights).specs  # with its adapters, if it has some
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract_params(specs), param_shardings(specs, mesh),
        )  # fmt: skip
        fingerprint, also = manifest.fingerprints(where)
        found, step = restore_params(place(where) / "checkpoints", like, fingerprint=fingerprint, also=also)
        found = plain_params(found, run.tune, param_shardings(model.frozen, mesh))
        state = state._replace(frozen=found)
        log(f"teacher: {where} at step {step}")
        if not config.distill.initial_layers:
            return state
        chosen = initial_layers(student.num_blocks, run.model.num_blocks)

        def taken(path: Any, fresh: Any) -> Any:
            old = found
            for part in path:
                old = old[part.key]
            if path[0].key == "blocks":
                rows = jax.jit(lambda x: x[jnp.array(chosen)], out_shardings=fresh.sharding)
                return rows(old)
            return jax.jit(jnp.copy, out_shardings=fresh.sharding)(old)

        params = jax.tree_util.tree_map_with_path(taken, state.params)
        log(f"teacher: the student's layers begin as its layers {', '.join(map(str, chosen))}, counted from 0")
        return state._replace(params=params, ema=None if state.ema is None else jax.tree.map(jnp.copy, params))

    return start

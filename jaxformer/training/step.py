"""One update, many updates in one dispatch: pure functions, and their compilation."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.parallel.constraints import sequence_parallel
from jaxformer.parallel.mesh import batch_sharding, check_batch, replicated
from jaxformer.parallel.pipeline import STAGE
from jaxformer.runtime.host_memory import one_at_a_time
from jaxformer.specs import only_trained, with_trained
from jaxformer.training import state as states
from jaxformer.training.chunks import longest_chunk
from jaxformer.training.counter_biases import without_counter_biases
from jaxformer.training.eval_step import compile_eval
from jaxformer.training.gradients import gradients
from jaxformer.training.microbatch import fori_over_batches
from jaxformer.training.optim import Schedule, clip, make_schedule
from jaxformer.training.state import TrainState
from jaxformer.types import Array, Batch, Model, Params, Sums


class StepMetrics(NamedTuple):
    """What one update reports; after `train_steps` every array has a leading axis over steps.

    Attributes:
      loss: float32, the objective, a mean in nats.
      grad_norm: float32, before clipping.
      learning_rate: float32, that this update used.
      bad_steps: int32, consecutive steps, this one included, whose loss or gradient norm was not finite.
      skipped: int32, all such steps since step 0.
      sums: the model's metrics, (sum, weight) of scalars.
      weights: the batch's weight under each term of the objective.
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    bad_steps: Array
    skipped: Array
    sums: Sums
    weights: dict[str, Array]


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    micro_batches: int = 1,
    noise_scale: bool = False,
    staged: bool = False,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    max_bad_steps: int | None = None,
) -> tuple[TrainState, StepMetrics]:
    """One update; no I/O, no clock, no globals.

    A step whose loss or gradient norm is not finite changes neither parameters nor optimizer nor average; it is
    counted, and the next step goes on with the next batch.

    Args:
      state: before the step.
      batch: one batch of rows.
      model: the model.
      optimizer: of `optim.make_optimizer`, or any other of optax's through `optim.skip_nonfinite`.
      schedule: the optimizer's, for the report.
      micro_batches, noise_scale, staged: see `gradients`.
      clip_norm: largest global gradient norm; None: no clipping.
      ema_decay: of the average of the weights after n updates it is min(ema_decay, (1 + n) / (10 + n)), so that a
        young average forgets the initial values; None: there is no average.
      max_bad_steps: after this many steps in a row that were not finite nothing is updated any more, so that a
        diverged member of a sweep stays as it is while the others train; None: no limit.

    Returns:
      The state after, and the step's metrics.
    """
    rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    loss, grads, sums, weights = gradients(
        state.params,
        batch,
        rng,
        state.frozen,
        model=model,
        micro_batches=micro_batches,
        noise_scale=noise_scale,
        staged=staged,
    )
    scale, norm = clip(without_counter_biases(grads, model.specs), clip_norm)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if max_bad_steps is not None:
        finite &= state.bad_steps < max_bad_steps

    old = only_trained(state.params, model.specs)
    updates, opt_state = optimizer.update(grads, state.opt_state, old, scale=scale, finite=finite)
    params = optax.apply_updates(old, updates)
    made = state.step - state.skipped  # updates before this one: the optimizer's own count
    ema = state.ema
    if ema_decay is not None:
        decay = jnp.minimum(ema_decay, (1 + made) / (10 + made))
        ema = jax.tree.map(
            lambda e, p: (decay * e + (1 - decay) * p).astype(e.dtype), only_trained(ema, model.specs), params
        )

    def keep(new, old):
        """The whole tree `old` with its trained leaves from `new`, if the step was finite."""
        if old is None:
            return None
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, only_trained(old, model.specs))
        return with_trained(old, kept, model.specs)

    skipped = state.skipped + jnp.where(finite, 0, 1)
    bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
    after = state._replace(
        step=state.step + 1,
        params=keep(params, state.params),
        opt_state=opt_state,
        ema=keep(ema, state.ema),
        bad_steps=bad_steps,
        skipped=skipped,
    )
    return after, StepMetrics(loss, norm, schedule(made), bad_steps, skipped, sums, weights)


def train_steps(state: TrainState, batches: Batch, count: Array, **options) -> tuple[TrainState, StepMetrics]:
    """`count` updates in one compiled call.

    Args:
      state: before the first.
      batches: every array has a leading axis [K]; only the first `count` are used.
      count: int, at most K; a traced number, so that one program serves chunks of every length.
      **options: of `train_step`.

    Returns:
      The state after, and metrics with leading axis [K], 0 beyond `count`.
    """
    step: Callable = functools.partial(train_step, **options)
    capacity = jax.tree.leaves(batches)[0].shape[0]

    shapes = jax.eval_shape(step, state, jax.tree.map(lambda x: x[0], batches))[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), shapes)

    def body(index, carry, batch):
        state, metrics = carry
        state, new = step(state, batch)
        return state, jax.tree.map(lambda m, x: m.at[index].set(x), metrics, new)

    return fori_over_batches(body, (state, metrics), batches, count)


class CompiledSteps(NamedTuple):
    """The compiled functions of one run on one mesh, and how batches get there. Made by `compile_steps`.

    Attributes:
      init: () -> TrainState of step 0.
      train: (state, batches, count) -> (state, StepMetrics [K]); `state` is consumed.
      evaluate: (params, batch, frozen) -> what `eval_step` returns, all of it on every host.
      place_chunk: list of at most K host-local batches -> (batches [K, B, T] on the devices, count).
      device_put_batch: one host-local batch -> batch on the devices.
      abstract_state: shapes and shardings of the state, to restore into.
    """

    init: Callable[[], TrainState]
    train: Callable[[TrainState, Batch, np.int32], tuple[TrainState, StepMetrics]]
    evaluate: Callable[[Params, Batch, Any], Any]
    place_chunk: Callable[[list[Batch]], tuple[Batch, np.int32]]
    device_put_batch: Callable[[Batch], Batch]
    abstract_state: TrainState


def compile_steps(
    model: Model, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh, cfg: Config
) -> CompiledSteps:
    """The run's functions, jitted with shardings on `mesh` and the state donated. Compiles at first use.

    Raises:
      ConfigError: the batch does not divide over the devices, or a parameter does not over the mesh.
    """
    check_batch(cfg.train.global_batch_size, cfg.execution.gradient_accumulation_steps, mesh)
    model = with_sequence_parallelism(model, cfg)
    ema = cfg.optimizer.ema_decay is not None
    abstract = states.abstract_state(model, optimizer, mesh, ema=ema)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    train = functools.partial(
        train_steps,
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(cfg.optimizer, cfg.train.steps),
        micro_batches=cfg.execution.gradient_accumulation_steps,
        noise_scale=cfg.train.noise_scale,
        staged=STAGE in mesh.shape,
        clip_norm=cfg.optimizer.clip_norm,
        ema_decay=cfg.optimizer.ema_decay,
    )
    return CompiledSteps(
        init=lambda: states.init_state(model, optimizer, cfg.seed, mesh, ema=ema),
        train=jax.jit(
            train,
            in_shardings=(shardings, batch_sharding(mesh, 1), None),
            out_shardings=(shardings, replicated(mesh)),
            donate_argnums=0,
        ),
        evaluate=compile_eval(model, mesh),
        place_chunk=functools.partial(place_chunk, mesh=mesh, capacity=longest_chunk(cfg)),
        device_put_batch=functools.partial(device_put_batch, mesh=mesh),
        abstract_state=abstract,
    )


def with_sequence_parallelism(model: Model, cfg: Config) -> Model:
    """`model` with sequence parallelism in its loss, if `config.mesh.sequence_parallel` asks for it."""

    def within(function: Any) -> Any:
        def run(*args):
            with sequence_parallel(cfg.mesh.sequence_parallel):
                return function(*args)

        return None if function is None else run

    return model._replace(loss=within(model.loss), predict=within(model.predict))


def compile_ahead(steps: CompiledSteps, mesh: Mesh, batch: Batch, held_out: Batch) -> CompiledSteps:
    """`steps` with both programs compiled now, in parallel; jit would compile each at its first call.

    Args:
      steps: of `compile_steps`.
      mesh: the run's.
      batch, held_out: any host-local batch for training and for evaluation, for their shapes.
    """
    state = steps.abstract_state

    def compiled(program: Any, *args: Any) -> Any:
        with jax.set_mesh(mesh):  # set for one thread only
            return program.lower(*args).compile()

    with ThreadPoolExecutor(1) as other:
        put = steps.device_put_batch(held_out)
        evaluate = other.submit(compiled, steps.evaluate, states.averaged(state), put, state.frozen)
        train = compiled(steps.train, state, *steps.place_chunk([batch]))
    return steps._replace(train=one_at_a_time(train), evaluate=evaluate.result())


def device_put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This host's rows of a batch (numpy, [B_local, ...], see `parallel.mesh.host_rows`) as its part of the batch."""
    where = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(where, np.asarray(x)), batch)


def place_chunk(batches: list[Batch], mesh: Mesh, capacity: int) -> tuple[Batch, np.int32]:
    """Up to `capacity` host-local batches as one Batch [K, B, T] on the devices, and how many they are.

    A short chunk is filled up with its last batch, which `train_steps` never reads, so that all have one shape.
    """
    padded = batches + batches[-1:] * (capacity - len(batches))
    where = batch_sharding(mesh, 1)
    stacked = jax.tree.map(lambda *xs: jax.make_array_from_process_local_data(where, np.stack(xs)), *padded)
    return stacked, np.int32(len(batches))

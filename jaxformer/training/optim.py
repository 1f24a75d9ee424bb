"""Update rules and learning-rate schedules from optax, with hyperparameters that mean the same in every rule.

``learning_rate`` is the scheduled step size of an update of about unit size; weight decay is decoupled and multiplied
by it. A parameter's `ParamSpec` says whether it decays and what multiplies its rate, decay and epsilon. Clipping is
`clip`, outside the optimizer, because the train step needs the norm anyway.

>>> schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=3, schedule="linear"), steps=13)
>>> [round(float(schedule(step)), 3) for step in (0, 1, 2, 3, 8, 13)]
[0.25, 0.5, 0.75, 1.0, 0.55, 0.1]
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from jaxformer.config import OptimizerConfig
from jaxformer.errors import ConfigError
from jaxformer.specs import ParamSpec, is_spec, only_trained
from jaxformer.training.counter_biases import is_counter_bias, with_counter_biases, without_counter_biases
from jaxformer.types import Array, Params

Schedule = Callable[[Array | int], Array]

# Muon's update is scaled to the size of AdamW's, so that both share a learning rate (Liu et al. 2025, section 2.2).
MUON_RMS = 0.2


class TracedHyperparameters(NamedTuple):
    """The numbers of a rule and its schedule, all that may differ between members of one compiled sweep.

    Python numbers, or traced scalars: the program is the same for all of them.

    Attributes:
      learning_rate: the peak.
      final_fraction: of the peak, where the decay ends.
      weight_decay: of the matrices.
      warmup_steps: first update at the peak.
      steps: of the run.
      decay_steps: of wsd's final decay.
    """

    learning_rate: Any
    final_fraction: Any
    weight_decay: Any
    warmup_steps: Any
    steps: Any
    decay_steps: Any

    @classmethod
    def of(cls, cfg: OptimizerConfig, steps: int) -> "TracedHyperparameters":
        """Those of a configuration, in a run of `steps`.

        Raises:
          ConfigError: wsd's decay does not fit between the warm-up and the end.
        """
        warmup = cfg.warmup_steps
        decay = min(max(1, steps // 5), max(1, steps - warmup)) if cfg.decay_steps is None else cfg.decay_steps
        if cfg.schedule == "wsd" and warmup + decay > max(steps, 1):
            raise ConfigError(
                f"config.optimizer.decay_steps: {decay} after optimizer.warmup_steps {warmup} is more than "
                f"train.steps {steps}; accepted: at most {steps - warmup}"
            )
        return cls(cfg.learning_rate, cfg.final_fraction, cfg.weight_decay, warmup, steps, decay)


def make_schedule(cfg: OptimizerConfig, steps: int, hyperparameters: TracedHyperparameters | None = None) -> Schedule:
    """The learning rate as a function of the number of updates already made.

    Linear warm-up to `learning_rate`, which update number `warmup_steps` (from 0) is the first to use; then

      cosine, linear   down to the final rate, `final_fraction * learning_rate`, at `steps`
      inverse_sqrt     learning_rate * sqrt(warmup_steps / step), never below the final rate
      constant         stays
      wsd              stays, then falls linearly to the final rate over the last `decay_steps`

    Args:
      cfg: the schedule's kind, and its numbers where `hyperparameters` are not given.
      steps: of the run.
      hyperparameters: its numbers, perhaps traced; `cfg` gives the kind alone and `steps` is not read.

    Raises:
      ConfigError: as in `TracedHyperparameters.of`.
    """
    hyperparameters = TracedHyperparameters.of(cfg, steps) if hyperparameters is None else hyperparameters
    peak, warmup, end, decay = (
        hyperparameters.learning_rate,
        hyperparameters.warmup_steps,
        hyperparameters.steps,
        hyperparameters.decay_steps,
    )
    final = peak * hyperparameters.final_fraction

    def schedule(step: Array | int) -> Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warmup) / jnp.maximum(1, end - warmup), 0, 1)

        def inverse_sqrt() -> Array:
            first = jnp.maximum(warmup, 1)
            return jnp.maximum(peak * jnp.sqrt(first / jnp.maximum(step, first)), final)

        rate = {
            "cosine": lambda: final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * done)),
            "linear": lambda: peak + (final - peak) * done,
            "inverse_sqrt": inverse_sqrt,
            "constant": lambda: jnp.asarray(peak, jnp.float32),
            "wsd": lambda: peak + (final - peak) * jnp.clip((step - (end - decay)) / decay, 0, 1),
        }[cfg.schedule]()
        return jnp.where(step < warmup, peak * (step + 1) / (warmup + 1), rate)

    return schedule


def make_optimizer(
    cfg: OptimizerConfig, steps: int, specs: Any, hyperparameters: TracedHyperparameters | None = None
) -> optax.GradientTransformationExtraArgs:
    """The update rule over the trained parameters of `specs` (see `specs.only_trained`), for a run of `steps`.

      adamw      beta1, beta2, epsilon
      lion       beta1 (of the update), beta2 (of the momentum)
      adafactor  factored second moment, which decays as 1 - t**-0.8; beta1 is its momentum, 0 for none
      muon       beta1 is its (Nesterov) momentum; for parameters of role "hidden", the others take adamw's update

    Leading axes "layers" and "experts" are batches of parameters, never dimensions of a matrix. Parameters of role
    "counter_bias" move as `training.counter_biases` says, under every rule. Given `hyperparameters` take the
    place of those in `cfg`, as in `make_schedule`.

    Raises:
      ConfigError: as in `make_schedule`.

    Sources: Loshchilov & Hutter 2019; Chen et al. 2023; Shazeer & Stern 2018; Jordan 2024, Liu et al. 2025.
    """
    specs = only_trained(specs, specs)
    if any(map(is_counter_bias, jax.tree.leaves(specs, is_leaf=is_spec))):
        others = make_optimizer(cfg, steps, without_counter_biases(specs, specs), hyperparameters)
        return with_counter_biases(others, specs)
    epsilons = jax.tree.map(lambda spec: cfg.epsilon * spec.epsilon, specs, is_leaf=is_spec)
    rule = {
        "adamw": lambda: scale_by_adam(cfg.beta1, cfg.beta2, epsilons),
        "lion": lambda: skip_nonfinite(optax.scale_by_lion(cfg.beta1, cfg.beta2)),
        "adafactor": lambda: skip_nonfinite(_per_layer(_adafactor(cfg.beta1), specs)),
        "muon": lambda: skip_nonfinite(_muon(cfg, specs)),
    }[cfg.name]()
    parts = [optax.scale_by_learning_rate(make_schedule(cfg, steps, hyperparameters)), _scale_by_rates(specs)]
    if cfg.weight_decay or hyperparameters is not None:
        decay = cfg.weight_decay if hyperparameters is None else hyperparameters.weight_decay
        parts.insert(0, _add_decayed_weights(decay, specs))
    rest = skip_nonfinite(optax.chain(*parts))

    def update(grads, state, params=None, *, scale=1.0, finite=True):
        grads, first = rule.update(grads, state[0], params, scale=scale, finite=finite)
        updates, others = rest.update(grads, state[1:], params, finite=finite)
        return updates, (first, *others)

    return optax.GradientTransformationExtraArgs(optax.chain(rule, *parts).init, update)


def _add_decayed_weights(decay: Any, specs: Any) -> optax.GradientTransformation:
    def decayed(spec: ParamSpec, update: Array, param: Array) -> Array:
        if not spec.decay:
            return update
        return update + (decay if spec.decay == 1 else decay * spec.decay) * param

    return optax.stateless(lambda updates, params: jax.tree.map(decayed, specs, updates, params, is_leaf=is_spec))


def _scale_by_rates(specs: Any) -> optax.GradientTransformation:
    def scaled(spec: ParamSpec, update: Array) -> Array:
        if isinstance(spec.rate, tuple):
            return update * jnp.asarray(spec.rate, update.dtype).reshape(-1, *[1] * (update.ndim - 1))
        return update if spec.rate == 1 else update * spec.rate

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, specs, updates, is_leaf=is_spec))


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` with two more arguments of `update`, which `train_step` gives.

      scale     multiplies the gradients first
      finite    if false, the state stays as it is

    >>> sgd = skip_nonfinite(optax.trace(0.9))
    >>> state = sgd.init(jnp.zeros(2))
    >>> [sgd.update(jnp.ones(2), state, scale=0.5, finite=f)[1].trace.tolist() for f in (True, False)]
    [[0.5, 0.5], [0.0, 0.0]]
    """

    def update(grads, state, params=None, *, scale=1.0, finite=True):
        updates, new = inner.update(_scaled(grads, scale), state, params)
        return updates, jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def scale_by_adam(beta1: float, beta2: float, epsilon: Any) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_adam that skips steps which are not finite and, on CPU, updates the moments in place.

    `epsilon` is a tree of numbers like the parameters.

    XLA's CPU backend would compute the moments twice, for the state and for the update, and keep a copy of the old ones
    for the second time. It does not duplicate a computation inside a conditional.

    Source: Kingma and Ba 2015, algorithm 1.
    """

    def moments(grads, mu, nu, scale):
        grads = _scaled(grads, scale)
        mu = optax.tree.update_moment(grads, mu, beta1, 1)
        return mu, optax.tree.update_moment_per_elem_norm(grads, nu, beta2, 2)

    def chosen(finite, grads, mu, nu, scale):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), moments(grads, mu, nu, scale), (mu, nu))

    def in_place(finite, grads, mu, nu, scale):
        return jax.lax.cond(finite, moments, lambda grads, mu, nu, scale: (mu, nu), grads, mu, nu, scale)

    def update(grads, state, params=None, *, scale=1.0, finite=True):
        operands = (jnp.asarray(finite), grads, state.mu, state.nu, jnp.asarray(scale))
        mu, nu = jax.lax.platform_dependent(*operands, cpu=in_place, default=chosen)
        count = jnp.where(finite, optax.safe_increment(state.count), state.count)
        made = jnp.maximum(count, 1)  # no division by 0 before the first finite update
        first, second = optax.tree.bias_correction(mu, beta1, made), optax.tree.bias_correction(nu, beta2, made)
        updates = jax.tree.map(lambda m, v, e: m / (jnp.sqrt(v) + e), first, second, epsilon)
        return updates, state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(beta1, beta2, epsilon).init, update)


def _scaled(grads: Params, scale: Array | float) -> Params:
    return jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), grads)


def clip(grads: Params, limit: float | None) -> tuple[Array, Array]:
    """What scales the gradients down to a global norm of at most `limit` (None: 1), and their norm."""
    norm = optax.tree.norm(grads)
    return jnp.ones_like(norm) if limit is None else limit / jnp.maximum(norm, limit), norm


def muon_dimensions(spec: ParamSpec) -> MuonDimensionNumbers | None:
    """Which dimensions are a hidden matrix's input and output, for Muon; None for parameters of other roles.

    Heads and head width are one side together: a projection to queries is [embed, heads * head_width].
    """
    if spec.role != "hidden":
        return None
    begin, middle = spec.num_stacked, spec.num_stacked + spec.num_inputs
    return MuonDimensionNumbers(tuple(range(begin, middle)), tuple(range(middle, len(spec.shape))))


def _muon(cfg: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    def label(spec: ParamSpec) -> str:
        return "muon" if spec.role == "hidden" else "adam" if spec.epsilon == 1 else f"adam_{spec.epsilon:g}"

    labels = jax.tree.map(label, specs, is_leaf=is_spec)
    # optax.partition hides the other group's leaves as MaskedNode; the dimension tree must have the same holes.
    dimensions = jax.tree.map(lambda s: muon_dimensions(s) or optax.MaskedNode(), specs, is_leaf=is_spec)

    def like_adamw(update: Array, dims: MuonDimensionNumbers) -> Array:
        sides = [math.prod(update.shape[i] for i in axes) for axes in dims]  # type: ignore[union-attr]
        return update * (MUON_RMS * math.sqrt(max(sides)))

    # A function, because a tree of tuples given directly would be taken for a tree of parameters.
    muon = optax.contrib.scale_by_muon(
        beta=cfg.beta1, eps=cfg.epsilon, weight_dimension_numbers=lambda updates: dimensions
    )
    rescale = optax.stateless(lambda updates, _: jax.tree.map(like_adamw, updates, dimensions))
    rules = {"muon": optax.chain(muon, rescale)}
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        rules.setdefault(label(spec), optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.epsilon * spec.epsilon))
    return optax.partition(rules, labels)


def _adafactor(momentum: float) -> optax.GradientTransformation:
    # Assembled here and not optax.adafactor, whose weight decay ignores the learning rate and whose learning rate
    # is by default relative to the size of the parameter.
    parts = [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)]
    return optax.chain(*parts, optax.ema(momentum, debias=False)) if momentum else optax.chain(*parts)


def _per_layer(rule: optax.GradientTransformation, specs: Any) -> optax.GradientTransformation:
    """`rule` for each layer, and each expert of it, by itself: by vmap over the leading axes of stacked leaves."""

    def label(spec: ParamSpec) -> str:
        return "_".join(["layers", *map(str, spec.shape[: spec.num_stacked])]) if spec.num_stacked else "single"

    def mapped(number: int) -> optax.GradientTransformation:
        if number == 0:
            return rule
        inner = mapped(number - 1)
        return optax.GradientTransformation(jax.vmap(inner.init), jax.vmap(inner.update))

    labels = jax.tree.map(label, specs, is_leaf=is_spec)
    names = sorted(set(jax.tree.leaves(labels)))  # a set's order differs between processes, which run one program
    return optax.partition({name: mapped(name.count("_")) for name in names}, labels)

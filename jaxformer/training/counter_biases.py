"""Parameters of role "counter_bias", which follow no gradient descent: each moves by its rate against the sign of its
gradient, whatever the schedule, and counts in no norm. It stays where it is if that is 0 but for rounding.

A router's bias is one: its gradient is how much more than its share an expert has to do, see `router.bias_term`.

Source: DeepSeek-AI 2024, section 2.1.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.specs import ParamSpec, is_spec, only
from jaxformer.types import Array

EVEN = 1e-5  # of the greatest excess: less is what rounding leaves of a sum over micro-batches, and has no sign


def is_counter_bias(spec: ParamSpec) -> bool:
    """Whether a parameter moves so."""
    return spec.role == "counter_bias"


def without_counter_biases(tree: Any, specs: Any) -> Any:
    """`tree`, which has a leaf or None for each of `specs`, with None in place of these parameters."""
    return only(tree, specs, lambda spec: not is_counter_bias(spec))


def with_counter_biases(
    optimizer: optax.GradientTransformationExtraArgs, specs: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the other parameters of `specs` as one of all of them.

    >>> specs = {"b": ParamSpec((2,), (None,), lambda rng, shape: jnp.zeros(shape), "counter_bias", rate=0.1)}
    >>> both = with_counter_biases(optax.with_extra_args_support(optax.sgd(1.0)), specs)
    >>> gradient = {"b": jnp.array([3.0, -4.0])}
    >>> both.update(gradient, both.init(gradient))[0]["b"].round(1).tolist()
    [-0.10000000149011612, 0.10000000149011612]
    """

    def init(params):
        return optimizer.init(without_counter_biases(params, specs))

    def moved(spec: ParamSpec, gradient: Array, update: Array) -> Array:
        if not is_counter_bias(spec):
            return update
        rate = jnp.asarray(spec.rate, gradient.dtype)
        least = EVEN * jnp.max(jnp.abs(gradient), axis=-1, keepdims=True)
        sign = jnp.sign(jnp.where(jnp.abs(gradient) > least, gradient, 0))
        return -rate.reshape(-1, *[1] * (gradient.ndim - 1)) * sign

    def update(grads, state, params=None, **options):
        params = None if params is None else without_counter_biases(params, specs)
        updates, state = optimizer.update(without_counter_biases(grads, specs), state, params, **options)
        return jax.tree.map(moved, specs, grads, updates, is_leaf=is_spec), state

    return optax.GradientTransformationExtraArgs(init, update)

"""Custom derivatives for both modes, `jax.jvp` and `jax.grad`.

`jax.custom_vjp` does not support forward mode, and the backward pass that JAX derives from a `jax.custom_jvp` is slow.
Here the tangent of a `jax.custom_jvp` is one linear operation with its own transpose, the fast backward pass. Training
only uses the transpose, so its program is the same as with `jax.custom_vjp`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir

from jaxformer.types import Array

Flat = Sequence[Any]  # leaves of a tree


class _Rules(NamedTuple):
    """The linear operation and its transpose: functions of (saved arrays, arrays in which they are linear)."""

    tangent: Callable[[Flat, Flat], list[Array]]
    backward: Callable[[Flat, Flat], list[Array | None]]  # None: zero


def define(
    function: Any, forward: Callable | None, tangent: Callable, backward: Callable, *, loops: bool = False
) -> None:
    """Gives a function its derivatives.

    Args:
      function: a `jax.custom_jvp`; its outputs are floats. Its `nondiff_argnums` come first in the next functions.
      forward: all of the function's arguments -> its result and what to save for the derivatives. None: calls the
        function, and saves the arguments that are not in `nondiff_argnums`.
      tangent: (*nondiff, saved, tangents of the other arguments) -> tangent of the result, in its dtypes. Tangents of
        non-floats are None. Should read only what `backward` reads of `saved`, or more would be kept in memory.
      backward: (*nondiff, saved, cotangent of the result) -> cotangents of the other arguments, None for zero.
      loops: True if `forward` has loops. When JAX splits a loop for the backward pass, it moves loop-invariant values
        out of it and keeps them in memory; so `forward` becomes a call that JAX does not split (`apart`).
    """
    places = sorted(function.nondiff_argnums)

    def jvp(*args):
        *static, primals, tangents = args

        def saving(*primals):
            arguments = list(primals)
            for place, value in zip(places, static, strict=True):
                arguments.insert(place, value)
            return (function(*arguments), primals) if forward is None else forward(*arguments)

        out, saved = (apart(saving) if loops else saving)(*primals)
        return out, _linear(
            functools.partial(tangent, *static), functools.partial(backward, *static), saved, tangents, out
        )

    function.defjvp(jvp)


def apart(function: Callable, derived: Callable | None = None) -> Callable:
    """The function as a call that partial evaluation does not split; its derivative is that of `derived`, None: its
    own."""
    call = jax.custom_jvp(function)
    call.defjvp(functools.partial(jax.jvp, derived or function))
    return call


def _linear(tangent: Callable, backward: Callable, saved: Any, tangents: tuple, out: Any) -> Any:
    """tangent(saved, tangents), as the operation whose transpose is `backward`. `out`: only for its types."""
    saved_leaves, saved_tree = jax.tree.flatten(saved)
    saved_leaves = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in saved_leaves]  # Python numbers
    # PRNG keys as raw data, because JAX's check for reused keys does not know this primitive.
    kinds = [jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in saved_leaves]
    saved_leaves = [x if kind is None else jax.random.key_data(x) for x, kind in zip(saved_leaves, kinds, strict=True)]
    out_leaves, out_tree = jax.tree.flatten(out)
    leaves, tree = jax.tree.flatten(tangents)
    leaves = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in leaves]  # Python numbers
    structures: list[Any] = [jax.tree.structure(argument) for argument in tangents]
    moves = [leaf.dtype != jax.dtypes.float0 for leaf in leaves]

    def restored(saved: Flat) -> Any:
        pairs = zip(saved, kinds, strict=True)
        leaves = [x if kind is None else jax.random.wrap_key_data(x, impl=kind) for x, kind in pairs]
        return jax.tree.unflatten(saved_tree, leaves)

    def flat_tangent(saved: Flat, moving: Flat) -> list[Array]:
        found = iter(moving)
        whole = jax.tree.unflatten(tree, [next(found) if does else None for does in moves])
        return jax.tree.leaves(tangent(restored(saved), whole))

    def flat_backward(saved: Flat, cotangents: Flat) -> list[Array | None]:
        found: list[Any] = []
        grads = backward(restored(saved), jax.tree.unflatten(out_tree, cotangents))
        for grad, structure in zip(grads, structures, strict=True):
            found += [None] * structure.num_leaves if grad is None else structure.flatten_up_to(grad)
        return [grad for grad, does in zip(found, moves, strict=True) if does]

    found = _LINEAR.bind(
        *saved_leaves,
        *(leaf for leaf, does in zip(leaves, moves, strict=True) if does),
        rules=_Rules(flat_tangent, flat_backward),
        count=len(saved_leaves),
        avals=tuple(jax.typeof(x).update(weak_type=False) for x in out_leaves),
    )
    return jax.tree.unflatten(out_tree, found)


_LINEAR = Primitive("linear_with_transpose")  # operands: `count` saved arrays, then those in which it is linear
_LINEAR.multiple_results = True


def _apply(*args, rules, count, avals):
    return rules.tangent(args[:count], args[count:])


def _abstract(*args, rules, count, avals):
    return list(avals)


def _transpose(cotangents, *args, rules, count, avals):
    grads = rules.backward(args[:count], [ad.instantiate_zeros(ct) for ct in cotangents])
    wanted = zip(grads, args[count:], strict=True)
    # Other inputs are known primals, which get no cotangent.
    found = [(ad.Zero(x.aval) if d is None else d) if ad.is_undefined_primal(x) else None for d, x in wanted]
    return [None] * count + found


def _jvp(primals, tangents, *, rules, count, avals):
    params = {"rules": rules, "count": count, "avals": avals}
    saved, x = primals[:count], primals[count:]
    changes = [_LINEAR.bind(*saved, *map(ad.instantiate_zeros, tangents[count:]), **params)]
    moving = [i for i, t in enumerate(tangents[:count]) if type(t) is not ad.Zero and t.dtype != jax.dtypes.float0]

    def of(*some: Array) -> list[Array]:
        replaced = dict(zip(moving, some, strict=True))
        return rules.tangent([replaced.get(i, array) for i, array in enumerate(saved)], x)

    if moving:
        changes.append(jax.jvp(of, [saved[i] for i in moving], [tangents[i] for i in moving])[1])
    change = [functools.reduce(jnp.add, parts) for parts in zip(*changes, strict=True)]
    return _LINEAR.bind(*primals, **params), change


def _batch(args, axes, *, rules, count, avals):
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    # All linear inputs are batched, as their cotangents will be; saved arrays only if they are batched already.
    whole = [
        x if axis is None and i < count else batching.bdim_at_front(x, axis, size)
        for i, (x, axis) in enumerate(zip(args, axes, strict=True))
    ]
    in_axes = ([None if axis is None else 0 for axis in axes[:count]], 0)
    both = _Rules(*(lambda saved, x, rule=rule: jax.vmap(rule, in_axes)(list(saved), list(x)) for rule in rules))
    found = _LINEAR.bind(*whole, rules=both, count=count, avals=tuple(unmapped_aval(size, 0, aval) for aval in avals))
    return found, [0] * len(found)


_LINEAR.def_impl(_apply)
_LINEAR.def_abstract_eval(_abstract)
ad.primitive_jvps[_LINEAR] = _jvp
ad.primitive_transposes[_LINEAR] = _transpose
batching.primitive_batchers[_LINEAR] = _batch
mlir.register_lowering(_LINEAR, mlir.lower_fun(_apply, multiple_results=True))

"""What the functions of a kind return that a config file brings: looked at whenever they are traced, refused in one
line."""

import math
import numbers
from typing import Any

import jax

from jaxformer.config import Execution, ModelConfig
from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.functional.layer import Context, Cost, Sublayer
from jaxformer.specs import ParamSpec, is_spec
from jaxformer.types import Array, Params


def expect(fits: bool, where: str, value: Any, accepted: str) -> None:
    """Raises ConfigError, unless it `fits`: `where` names the kind and the function that returned `value`."""
    if not fits:
        seen = jax.tree.map(lambda x: _Shape(f"{x.dtype}{list(x.shape)}") if hasattr(x, "dtype") else x, value)
        raise ConfigError(f"{where}: {shown(seen)}; accepted: {accepted}")


class _Shape(str):
    __repr__ = str.__str__


def is_like(value: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a value is an array of this shape and dtype, or will be one where it is traced."""
    return getattr(value, "shape", None) == shape and getattr(value, "dtype", None) == dtype


def expect_specs(where: str, tree: Any) -> None:
    """Raises ConfigError: not a dict, or a dict of dicts, of ParamSpec."""
    fits = isinstance(tree, dict) and all(map(is_spec, jax.tree.leaves(tree, is_leaf=is_spec)))
    expect(fits, f"{where}: specs returned", tree, "a dict of ParamSpec")


def checked(where: str, sublayer: Sublayer) -> Sublayer:
    """A sublayer whose functions refuse to return what `Sublayer` does not say. `where`: its kind, as in the config."""

    def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
        tree = sublayer.specs(cfg)
        expect_specs(where, tree)
        return tree

    def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, dict[str, Array]]:
        found = sublayer.apply(params, x, cfg, context)
        name, declared = f"{where}: apply returned", " and ".join(sublayer.terms) or "none"
        expect(isinstance(found, tuple) and len(found) == 3, name, found, "(output, cache, terms)")
        out, _, terms = found
        expect(is_like(out, x.shape, x.dtype), f"{name} the output", out, f"{x.dtype}{list(x.shape)}, as its input")
        fits = isinstance(terms, dict) and sorted(terms) == sorted(sublayer.terms)
        expect(fits, f"{name} the terms", terms, f"a dict of those that its Sublayer declares, {declared}")
        for term, value in terms.items():
            expect(is_like(value, (), "float32"), f"{name} the term {term}", value, "a float32 without axes")
        return found

    def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
        found = sublayer.cost(cfg, length, execution)
        fits = isinstance(found, Cost) and all(
            isinstance(each, numbers.Real) and 0 <= each < math.inf
            for each in (*(x for x in found if x is not found.ring), *found.ring)
        )
        expect(fits, f"{where}: cost returned", found, "a Cost of finite numbers, at least 0")
        return found

    expect("loss" not in sublayer.terms, f"{where}: terms", sublayer.terms, "names other than loss")
    known = {*sublayer.terms} - {"accuracy"}
    expect({*sublayer.measured} <= known, f"{where}: measured", sublayer.measured, "some of terms, other than accuracy")
    return sublayer._replace(specs=specs, apply=apply, cost=cost)

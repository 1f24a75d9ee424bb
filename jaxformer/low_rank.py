"""Weights that are described, as masks are: a matrix W that stays and a product of two thin ones that is added to it,
or a matrix that is stored otherwise.

`functional.layers.linear` and whatever is made of it takes a `LowRank` where it takes a weight. W + scale A B is never
computed: x (W + scale A B) is x W + scale (x A) B.

>>> import jax.numpy as jnp
>>> from jaxformer.functional.layers import linear
>>> w = LowRank(jnp.ones((3, 4, 5)), jnp.ones((3, 2)), jnp.ones((2, 4, 5)), scale=0.5)
>>> linear(jnp.ones((1, 3)), w)[0, 0, 0], w.merged()[0, 0, 0]
(Array(6., dtype=float32), Array(2., dtype=float32))

Source: Hu et al. 2022, section 4.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """W + scale A B, a node of the tree of parameters in the place of W.

    Attributes:
      weight: [..., *inputs, *outputs]; leading axes may number layers.
      a: [..., *inputs, R].
      b: [..., R, *outputs].
      scale: what multiplies the product.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = field(default=1.0, metadata={"static": True})

    def merged(self, num_stacked: int = 0) -> Array:
        """One matrix, in the dtype of `weight`; the product is made in float32 or wider.

        Args:
          num_stacked: leading axes that number layers.
        """
        stacked, rank = self.weight.shape[:num_stacked], self.a.shape[-1]
        wide = jnp.promote_types(self.weight.dtype, jnp.float32)
        a = self.a.reshape(*stacked, math.prod(self.a.shape[num_stacked:-1]), rank).astype(wide)
        b = self.b.reshape(*stacked, rank, math.prod(self.b.shape[num_stacked + 1 :])).astype(wide)
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST).reshape(self.weight.shape)
        return (self.weight.astype(wide) + self.scale * product).astype(self.weight.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Columns:
    """A matrix stored by columns, a node of the tree of parameters in the place of W; see `kernels.columns`.

    Attributes:
      array: [outputs, inputs].
      shape: of W, whose inputs come first.
    """

    array: Any
    shape: tuple[int, ...] = field(metadata={"static": True})


def factor_specs(spec: Any, rank: int) -> tuple[Any, Any]:
    """The specs of A and B beside the `ParamSpec` of a weight: sharded as the axes of the weight that they have."""
    middle = spec.num_stacked + spec.num_inputs
    stacked, shape, axes = spec.num_stacked, spec.shape, spec.axes
    a = replace(spec, shape=(*shape[:middle], rank), axes=(*axes[:middle], None))
    b = replace(
        spec, shape=(*shape[:stacked], rank, *shape[middle:]), axes=(*axes[:stacked], None, *axes[middle:]),
        num_inputs=1,
    )  # fmt: skip
    return a, b


def is_low_rank(x: Any) -> bool:
    """True for a `LowRank`."""
    return isinstance(x, LowRank)


def map_weights(function: Callable[[Any, Any], Any], specs: Any, params: Any) -> Any:
    """`params` with function(spec, array) in place of every array, those of a `LowRank` having specs of their own.

    Args:
      function: of a `ParamSpec` and an array.
      specs: a tree of `ParamSpec`, plain.
      params: a tree like it, in which a `LowRank` may stand for an array, or `Columns`, which stay as they are; only
        the types of mappings may differ.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, LowRank | Columns))
    known = jax.tree.leaves(specs, is_leaf=lambda x: hasattr(x, "num_stacked"))

    def mapped(spec: Any, leaf: Any) -> Any:
        if isinstance(leaf, Columns):
            return leaf
        if not is_low_rank(leaf):
            return function(spec, leaf)
        a, b = factor_specs(spec, leaf.a.shape[-1])
        return replace(leaf, weight=function(spec, leaf.weight), a=function(a, leaf.a), b=function(b, leaf.b))

    return jax.tree.unflatten(structure, [mapped(*each) for each in zip(known, leaves, strict=True)])

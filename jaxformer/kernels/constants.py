"""Arrays that a program holds as constants: computed while it is traced."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np


def constant(function: Callable[[], Any]) -> Any:
    """function() as NumPy arrays, now.

    In a thread of its own, which has neither the trace of the caller nor its mesh: the devices of a mesh may be those
    of a plan, which are not here, and inside a `shard_map` JAX would look for a device's part of a constant.

    >>> import jax.numpy as jnp
    >>> jax.jit(lambda x: x + constant(lambda: jnp.arange(2)))(1).tolist()
    [1, 2]
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: jax.tree.map(np.asarray, function())).result()

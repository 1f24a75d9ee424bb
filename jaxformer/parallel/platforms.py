"""Which platform programs are compiled for, as the tables of implementations name them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

GPU = "an NVIDIA GPU of compute capability 8 or more"  # "cuda" in words

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


@contextmanager
def compiled_for(platform: str) -> Iterator[None]:
    """What is traced inside is compiled for devices of this platform, which this process need not have.

    >>> with compiled_for("tpu"):
    ...     this_platform()
    'tpu'
    """
    token = _planned.set(platform)
    try:
        yield
    finally:
        _planned.reset(token)


def this_platform() -> str:
    """That of `compiled_for`, or of the first device: "cpu", "tpu", or "cuda" for the GPUs that `GPU` names; others as
    JAX calls them."""
    planned = _planned.get()
    if planned is not None:
        return planned
    platform = jax.default_backend()
    capability = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return "cuda" if platform == "gpu" and capability.isdigit() and int(capability) >= 8 else platform

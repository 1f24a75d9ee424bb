"""What makes runs in tests quick to compile, which is most of their time: one device, few optimizations."""

import contextlib

import jax
import pytest

# For the environment of programs that train toys, whose numbers are compared among themselves.
FEW_OPTIMIZATIONS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def one_device(monkeypatch) -> None:
    """`jax.devices()` has one device from now on, `jax.devices(backend)` what it had: XLA takes longer for eight."""
    every = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *backend: every(*backend) if backend else every()[:1])


@contextlib.contextmanager
def quickly():
    """One device and few optimizations inside: for the fixtures of modules, which tests/conftest.py does not reach."""
    with pytest.MonkeyPatch.context() as patch:
        one_device(patch)
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield patch
        finally:
            jax.config.update("jax_disable_most_optimizations", False)

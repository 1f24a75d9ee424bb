"""What makes runs in tests quick to compile, which is most of their time: one device, few optimizations."""

import jax

# For the environment of programs, whose numbers are compared among themselves.
FEW_OPTIMIZATIONS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def one_device(monkeypatch) -> None:
    """`jax.devices()` has one device from now on, `jax.devices(backend)` what it had: XLA takes longer for eight."""
    every = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *backend: every(*backend) if backend else every()[:1])

"""Fewer devices than the eight of the tests: XLA takes longer for eight."""

import jax


def one_device(monkeypatch) -> None:
    """`jax.devices()` has one device from now on, `jax.devices(backend)` what it had."""
    every = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *backend: every(*backend) if backend else every()[:1])

"""Eight CPU devices for every test, and JAX's strict modes; set before any backend is used."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def quick_compile():
    """Compiles in half the time, for programs that run once on a few numbers."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def few_mappings():
    """Every program compiled for CPU keeps a few memory mappings, and Linux gives a process 65,530: beyond, the next
    compilation ends in a segmentation fault. So the programs are dropped when half of them are gone."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()

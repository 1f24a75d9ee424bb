"""What a program sets for its process before the first step."""

import os
import platform
import subprocess
import sys

import pytest

from jaxformer import process

REPORT = """
import os, pathlib, sys
from jaxformer import process
process.ACCELERATORS = tuple(sys.argv[1:])
process.keep_freed_memory()
memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
    if line.endswith("[heap]"):
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        print((end - start) / memory)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")


def heap(*accelerators: str, **environment: str) -> float:
    """Size of the heap of a process that asked to keep freed memory, as a fraction of the machine's memory."""
    chosen = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "JAX_PLATFORMS"))}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *accelerators],
        capture_output=True,
        text=True,
        check=True,
        env=chosen | environment,
    )
    return float(done.stdout)


@glibc
def test_the_heap_is_reserved_where_the_work_is_done_on_cpu():
    assert heap() > 0.7
    assert heap("null", JAX_PLATFORMS="cpu") > 0.7


@glibc
@pytest.mark.parametrize("chosen", ["MALLOC_ARENA_MAX=4", "GLIBC_TUNABLES=glibc.malloc.arena_max=4"])
def test_the_allocator_is_the_users_where_they_chose(chosen):
    assert heap(**dict([chosen.split("=", 1)])) < 0.1


@glibc
def test_with_an_accelerator_memory_goes_back():
    """/dev/null stands for its device file."""
    assert heap("null") < 0.1


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(process, "ACCELERATORS", ())
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    process.keep_freed_memory()

"""What stays with a process on CPU when it is freed, and what goes back."""

import os
import platform
import subprocess
import sys

import pytest

from jaxformer.runtime import host_memory

REPORT = """
import os, pathlib, sys
from jaxformer.runtime import host_memory
host_memory.ACCELERATORS = tuple(sys.argv[1:])
host_memory.keep_freed_memory()
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


@pytest.mark.slow
@glibc
def test_the_heap_is_reserved_where_the_work_is_done_on_cpu():
    assert heap() > 0.7
    assert heap("null", JAX_PLATFORMS="cpu") > 0.7


@pytest.mark.slow
@glibc
@pytest.mark.parametrize("chosen", ["MALLOC_ARENA_MAX=4", "GLIBC_TUNABLES=glibc.malloc.arena_max=4"])
def test_the_allocator_is_the_users_where_they_chose(chosen):
    assert heap(**dict([chosen.split("=", 1)])) < 0.1


@pytest.mark.slow
@glibc
def test_with_an_accelerator_memory_goes_back():
    """/dev/null stands for its device file."""
    assert heap("null") < 0.1


SETTLED = """
import ctypes, pathlib
from jaxformer.runtime import host_memory
host_memory.ACCELERATORS = ()
host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
"""
GOES_BACK = """
blocks = [libc.malloc(50 * 2**20) for _ in range(4)]
for block in blocks:
    ctypes.memset(block, 1, 50 * 2**20)
full = resident()
for block in blocks[:3]:  # the last one keeps the heap from shrinking at its end
    libc.free(block)
kept = resident()
host_memory.settle_heap()
print(full - kept, kept - resident())
"""


def settled(script, before=""):
    chosen = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "JAX_PLATFORMS"))}
    command = [sys.executable, "-c", before + SETTLED + script]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=chosen).stdout


@pytest.mark.slow
@glibc
def test_freed_memory_is_kept_until_the_heap_is_settled():
    before, after = (float(x) for x in settled(GOES_BACK).split())
    assert before < 5 and 120 < after < 160  # of 150 MiB; whole huge pages go


PROGRAMS = """
import types
import jax, jax.numpy as jnp
from jaxformer.runtime import host_memory

class Program:
    '''Stands for a compiled one: what it returns takes a while, and at each call it says whether that was there.'''

    def __init__(self, temporaries):
        self.temporaries, self.last, self.was_ready = temporaries, None, []
        self.slow = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.sin(y @ x), x).sum())

    def memory_analysis(self):
        return types.SimpleNamespace(temp_size_in_bytes=self.temporaries)

    def __call__(self, state):
        if self.last is not None:
            self.was_ready.append(self.last.is_ready())
        self.last = self.slow(jnp.ones((500, 500)))
        return state, self.last

program, small = Program(2**30), Program(2**20)
print(host_memory.one_at_a_time(program) is program)
"""
ONE_AT_A_TIME = """
print(host_memory.one_at_a_time(small) is small)
call = host_memory.one_at_a_time(program)
print([call(n)[0] for n in range(4)], program.was_ready)
"""


@pytest.mark.slow
@glibc
def test_calls_with_large_temporaries_are_made_one_at_a_time():
    """And those with small ones, or where freed memory goes back, as they are."""
    said = settled(ONE_AT_A_TIME, before=PROGRAMS).splitlines()
    assert said == ["True", "True", "[0, 1, 2, 3] [True, True, True]"]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory, "ACCELERATORS", ())
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    host_memory.keep_freed_memory()

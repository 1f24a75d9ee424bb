"""The memory that a process on CPU keeps after it has freed it: all of it, for speed, and what of it goes back."""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

# Device files of GPUs and TPUs.
ACCELERATORS = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*")
_LARGE = 64 * 2**20  # bytes
_FREEING = 0.005  # seconds
_kept: list[ctypes.CDLL] = []  # the C library, once it was told to keep what is freed


def keep_freed_memory() -> None:
    """On CPU with glibc: freed blocks stay with the process, on one heap of huge pages.

    XLA allocates its temporaries anew in every step; with glibc's defaults the large ones are mapped and unmapped
    each time, hundreds of thousands of page faults a step (measured: half of the step at 6 layers of width 384), and
    what other threads allocate lies on heaps of their own, which no huge page fits. To be called before the first
    device is used, for it is then that XLA's threads get their heaps.

    Does nothing where the user chose (`MALLOC_*` or `GLIBC_TUNABLES` in the environment), or where an accelerator will
    do the work: it is there, and `JAX_PLATFORMS` does not say cpu.
    """
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    accelerated = any(any(Path("/dev").glob(name)) for name in ACCELERATORS)
    if sys.platform != "linux" or chosen or (accelerated and os.environ.get("JAX_PLATFORMS") != "cpu"):
        return
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except AttributeError:  # another C library
        return
    _kept[:] = [libc]
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    mallopt(arena_max, 1)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)  # never
    mallopt(top_pad, 64 * 2**20)
    _reserve_huge_pages(libc)


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    """Grows the heap to what the machine could hold, untouched as yet and so at no cost, and asks for huge pages."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":  # there, what is only promised counts
        return
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free(libc.malloc(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4))
    advice_huge = 14
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            libc.madvise(start, end - start, advice_huge)


def one_at_a_time(program: Any) -> Callable:
    """After `keep_freed_memory`: a compiled (state, ...) -> (state, results) that begins when its last call has ended,
    and its temporaries are free again, if those are large; any other program as it is.

    XLA's CPU backend allocates a call's temporaries when it is dispatched and frees them a little after its results are
    there, so that calls dispatched one after another hold those of up to four (measured: 10.5 instead of 4.2 GiB with
    GPT-2). A call with such temporaries takes too long for anyone to miss what waiting costs.
    """
    if not _kept or program.memory_analysis().temp_size_in_bytes < _LARGE:
        return program
    last: list[Any] = []

    def call(*args: Any) -> Any:
        if last:
            jax.block_until_ready(last.pop())
            time.sleep(_FREEING)
        state, results = program(*args)
        last.append(results)
        return state, results

    return call


def settle_heap() -> None:
    """After `keep_freed_memory`, once everything is compiled and made, and before the first step.

    What is free goes back to the system: compiling a step of GPT-2 and making its state leave 1 GiB in pieces, between
    which the step's one block of temporaries does not fit.
    """
    if _kept:
        _kept[0].malloc_trim(0)
        _reserve_huge_pages(_kept[0])  # the end of the heap went back, too

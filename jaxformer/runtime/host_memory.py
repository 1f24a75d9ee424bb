"""How the C allocator keeps freed memory on CPU: in the process, for speed, on one heap of huge pages."""

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
_kept: list[ctypes.CDLL] = []  # the C library, once `keep_freed_memory` has configured it


def keep_freed_memory() -> None:
    """On CPU with glibc: makes the process keep freed blocks, on one heap of huge pages.

    XLA allocates its temporaries anew in every step. With glibc's defaults the large ones are mapped and unmapped each
    time, which costs a page fault per page, and other threads allocate on small heaps of their own, where no huge page
    fits. Call this before any device is used, because XLA's threads get their heaps then.

    Does nothing if the user has chosen (`MALLOC_*` or `GLIBC_TUNABLES` in the environment), or if the machine has an
    accelerator and `JAX_PLATFORMS` is not cpu.
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
    for option, value in (
        (-8, 1),  # M_ARENA_MAX: a single heap
        (-4, 0),  # M_MMAP_MAX: no separate mappings
        (-1, -1),  # M_TRIM_THRESHOLD: never return memory
        (-2, 64 * 2**20),  # M_TOP_PAD: grow the heap in large pieces
    ):
        mallopt(option, value)
    _reserve_huge_pages(libc)


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    """Grows the heap to 3/4 of the machine's memory and asks for huge pages; free of cost until it is written to."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":  # strict accounting: reserving does cost
        return
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free(libc.malloc(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            libc.madvise(start, end - start, 14)  # MADV_HUGEPAGE


def one_at_a_time(program: Any) -> Callable:
    """Makes each call of a compiled (state, ...) -> (state, results) wait for the previous one, to save memory.

    XLA's CPU backend allocates a call's temporaries at dispatch and frees them a little after its results are ready, so
    calls dispatched one after another hold several sets at once. Programs with small temporaries are returned
    unchanged, and so are all without `keep_freed_memory`; the others run long enough for the wait not to matter.
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
    """Returns free memory to the system; call it after compilation and initialization, before the first step.

    Compilation leaves the heap fragmented: the step's one block of temporaries fits in none of the free pieces. Does
    nothing without `keep_freed_memory`.
    """
    if _kept:
        _kept[0].malloc_trim(0)
        _reserve_huge_pages(_kept[0])  # trimming also gave back the end of the heap

"""What a program sets once, before its first step: compiled-program cache, allocator, one-line errors."""

import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from jaxformer.config import ConfigError

# Device files of GPUs and TPUs.
ACCELERATORS = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*")


class ProgramError(RuntimeError):
    """Something a user can mend; the message is one line."""


def cache_folder() -> Path:
    """Where this user's caches live: $XDG_CACHE_HOME or ~/.cache, and `jaxformer` in it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxformer"


def keep_compiled_programs(folder: Path | None = None) -> None:
    """Turns on the persistent compilation cache: a second run of the same config compiles nothing again."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # the user has chosen
    folder = cache_folder() / "compiled" if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a cache that cannot be written only costs time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_freed_memory() -> None:
    """On CPU with glibc: freed blocks stay with the process, on one heap of huge pages.

    XLA allocates its temporaries anew in every step; with glibc's defaults the large ones are mapped and unmapped
    each time, hundreds of thousands of page faults a step (measured: half of the step at 6 layers of width 384), and
    what other threads allocate lies on heaps of their own, which no huge page fits. Costs resident memory, about 1.6
    times. To be called before the first device is used, for it is then that XLA's threads get their heaps.

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
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    mallopt(arena_max, 1)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)  # never
    mallopt(top_pad, 64 * 2**20)
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2":  # there, what is only promised counts
        _reserve_huge_pages(libc)


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    """Grows the heap to what the machine could hold, untouched as yet and so at no cost, and asks for huge pages."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free(libc.malloc(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4))
    advice_huge = 14
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            libc.madvise(start, end - start, advice_huge)


def program(function: Callable[[], int | None]) -> None:
    """Runs a program's main function; what a user can mend ends in one line on standard error and exit code 2.

    Settles the allocator first (`keep_freed_memory`).

    What all processes agreed on is told by one of them. A process that fails alone ends at once, so that the others,
    which wait for it, hear of it from the runtime.
    """
    from jaxformer import agreement
    from jaxformer.records import RecordError
    from jaxformer.training.checkpoint import CheckpointError
    from jaxformer.training.report import TrainingDiverged

    keep_freed_memory()
    try:
        code = function()
    except (ConfigError, ProgramError, RecordError, CheckpointError, TrainingDiverged) as error:
        sys.stdout.flush()
        everyones = isinstance(error, TrainingDiverged | ProgramError) and agreement.index() > 0
        if not (everyones or getattr(error, "told_elsewhere", False)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = 3 if isinstance(error, TrainingDiverged) else 2
    except BrokenPipeError:  # the reader of our output went away: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception:
        if agreement.num_processes() == 1:
            raise
        traceback.print_exc()
        agreement.leave(1)
    sys.exit(code or 0)

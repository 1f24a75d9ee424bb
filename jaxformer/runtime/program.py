"""What a program sets once, before its first step: compiled-program cache, allocator, one-line errors."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from jaxformer.errors import ConfigError, ProgramError
from jaxformer.runtime import console
from jaxformer.runtime.compilation_cache import guard
from jaxformer.runtime.host_memory import keep_freed_memory

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of work and of time


def cache_folder() -> Path:
    """Where this user's caches live: $XDG_CACHE_HOME or ~/.cache, and `jaxformer` in it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer"


def keep_compiled_programs(folder: Path | None = None) -> None:
    """Turns on the persistent compilation cache: a second run of the same config compiles nothing again.

    Its entries are checked, in a folder that the user has chosen as well (`jaxformer.runtime.compilation_cache`).
    """
    checked = guard()
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or not checked:
        return  # the user has chosen; or a jax whose cache cannot be checked, without which it only takes longer
    folder = cache_folder() / "compiled" if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a cache that cannot be written only costs time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def a_device_for_each_core() -> None:
    """On CPU: as many devices as this process may use cores, so that each can do work of its own.

    To be called before the first device is used. Does nothing where the user chose (JAX_NUM_CPU_DEVICES, XLA_FLAGS).
    """
    number = "jax_num_cpu_devices"
    chosen = getattr(jax.config, number) != -1 or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen:
        jax.config.update(number, usable_cores())


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, and no more than its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def program(function: Callable[[], int | None], *, printing: bool = True) -> None:
    """Runs a program's main function; what a user can mend ends in one line on standard error and exit code 2.

    Settles the allocator first (`keep_freed_memory`), and standard output and error (`console.secure`). With `--debug`
    among the flags the line comes after the traceback.

    What all processes agreed on is told by one of them. A process that fails alone ends at once, so that the others,
    which wait for it, hear of it from the runtime.

    Args:
      function: returns the exit code, None for 0.
      printing: the program exists for what it prints, so that it has failed where that could not be written. Others
        go on, and their exit code is that of their work.
    """
    from jaxformer.errors import CheckpointError, RecordError, TrainingDiverged
    from jaxformer.runtime import coordination

    keep_freed_memory()
    output = console.secure(None if printing else "note: standard output cannot be written ({reason}) and is lost")
    try:
        code = function()
        sys.stdout.flush()
        if printing and not code and output is not None and output.lost:
            raise ProgramError(f"standard output: cannot be written ({output.lost})")
    except (ConfigError, ProgramError, RecordError, CheckpointError, TrainingDiverged) as error:
        sys.stdout.flush()
        everyones = isinstance(error, TrainingDiverged | ProgramError) and coordination.index() > 0
        if not (everyones or getattr(error, "told_elsewhere", False)):
            _say(error, str(error))
        code = 3 if isinstance(error, TrainingDiverged) else 2
    except BrokenPipeError:  # the reader of our output went away: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        if coordination.num_processes() == 1:
            line = _known(error)
            if line is None:
                raise
            _say(error, line)
            sys.exit(2)
        traceback.print_exc()
        coordination.leave(1)
    sys.exit(code or 0)


def _say(error: BaseException, line: str) -> None:
    if "--debug" in sys.argv[1:]:
        traceback.print_exception(error)
    print(f"error: {console.one_line(line)}", file=sys.stderr, flush=True)


def _known(error: BaseException) -> str | None:
    """The line for an error of Python's or JAX's about the environment."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"memory: none is left ({text or 'of this process'}); accepted: a smaller text, model or batch"
    if isinstance(error, RuntimeError) and "Could not determine home directory" in text:
        return "HOME: is not set, and this user has no home folder; accepted: HOME=FOLDER, or XDG_CACHE_HOME=FOLDER"
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in text:
        asked, devices = os.environ.get("JAX_PLATFORMS", ""), os.environ.get("JAX_NUM_CPU_DEVICES")
        if "backend 'cpu'" in text and devices is not None:
            return f"JAX_NUM_CPU_DEVICES: {devices!r} (JAX's CPU backend does not start); accepted: 1 or more, or unset"
        return f"JAX_PLATFORMS: {asked!r} ({text[:200]}); accepted: cpu, cuda, tpu as installed, or unset"
    return None

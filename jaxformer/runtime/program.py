"""What a program sets up once, before its first step: compilation cache, allocator, devices, one-line errors."""

import os
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import jax

from jaxformer.errors import CheckpointError, ConfigError, ProgramError, RecordError, StoreError, TrainingDiverged
from jaxformer.runtime import cluster, console, coordination
from jaxformer.runtime.compilation_cache import guard
from jaxformer.runtime.host_memory import keep_freed_memory
from jaxformer.storage.address import is_address

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time per period, and the period


def cache_folder() -> Path:
    """This user's cache folder: `jaxformer` in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer"


def keep_compiled_programs() -> None:
    """Turns on the persistent compilation cache, so that a second run of the same config compiles nothing.

    Its entries are checked (`jaxformer.runtime.compilation_cache`), in a folder chosen by the user too.
    """
    if not guard() or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return  # this jax's cache cannot be checked, so do without; or the user has chosen a folder
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a cache that cannot be written only costs time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def a_device_for_each_core() -> None:
    """On CPU: one device for each core that this process may use, so that they can work independently.

    Call it before any device is used. Does nothing if the user has chosen (JAX_NUM_CPU_DEVICES, XLA_FLAGS).
    """
    number = "jax_num_cpu_devices"
    if getattr(jax.config, number) == -1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update(number, usable_cores())


def leave_out_tpus() -> None:
    """Where libtpu is installed, as plans need it, but there is no TPU nor another plugin of JAX: the CPU at once.

    JAX would try the TPU first, and libtpu then prints seven lines about it before every program's own. Call it before
    any device is used. Does nothing if the user has chosen (JAX_PLATFORMS).
    """
    platforms = "jax_platforms"
    alone = find_spec("libtpu") is not None and find_spec("jax_plugins") is None
    if alone and not getattr(jax.config, platforms) and not cluster.has_tpu():
        jax.config.update(platforms, "cpu")


def usable_cores() -> int:
    """Number of cores this process may use: its CPU affinity, limited by its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def program(function: Callable[[], int | None], *, printing: bool = True) -> None:
    """Runs a program's main function; an error that the user can fix gives one line on standard error and exit code 2.

    First sets up the allocator (`keep_freed_memory`) and standard output and error (`console.secure`). The flag
    `--debug` prints the traceback before the line.

    An error that all processes agreed on is printed by one of them. A process that fails alone exits at once, so that
    JAX's runtime tells the others, which wait for it.

    Args:
      function: returns the exit code, None for 0.
      printing: True if the program's result is what it prints: it fails if that cannot be written. Other programs
        continue, and their exit code does not depend on it.
    """
    keep_freed_memory()
    leave_out_tpus()
    output = console.secure(None if printing else "note: standard output cannot be written ({reason}) and is lost")
    try:
        code = function()
        sys.stdout.flush()
        if printing and not code and output is not None and output.lost:
            raise ProgramError(f"standard output: cannot be written ({output.lost})")
    except (ConfigError, ProgramError, RecordError, CheckpointError, StoreError, TrainingDiverged) as error:
        sys.stdout.flush()
        everyones = isinstance(error, TrainingDiverged | ProgramError) and coordination.index() > 0
        if not (everyones or getattr(error, "told_elsewhere", False)):
            _say(error, str(error))
        code = 3 if isinstance(error, TrainingDiverged) else 2
    except BrokenPipeError:  # the reader of our output ended, as in `| head`
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
    """One line about an error that the environment caused in Python or JAX; None for any other error."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"memory: none is left ({text or 'of this process'}); accepted: a smaller text, model or batch"
    if isinstance(error, OSError) and is_address(error.filename):  # an object or a bucket that was deleted meanwhile
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, RuntimeError) and "Could not determine home directory" in text:
        return "HOME: is not set, and this user has no home folder; accepted: HOME=FOLDER, or XDG_CACHE_HOME=FOLDER"
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in text:
        asked, devices = os.environ.get("JAX_PLATFORMS", ""), os.environ.get("JAX_NUM_CPU_DEVICES")
        if "backend 'cpu'" in text and devices is not None:
            return f"JAX_NUM_CPU_DEVICES: {devices!r} (JAX's CPU backend does not start); accepted: 1 or more, or unset"
        return f"JAX_PLATFORMS: {asked!r} ({text[:200]}); accepted: cpu, cuda, tpu as installed, or unset"
    return None

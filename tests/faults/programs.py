"""Programs run for the fault suite: each in a process of its own, forked from one that has imported everything.

Importing JAX and the rest takes longer than a tiny run. The suite imports them once, starts no backend and no thread,
and forks; `fresh=True` starts Python anew instead, as a user does.
"""

import importlib
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
IMPORTED = (
    "matplotlib.pyplot", "scipy.optimize", "scipy.special", "tokenizers", "orbax.checkpoint", "rich.progress",
    "jax.experimental.multihost_utils", "jaxformer.runs.pretrain", "jaxformer.runs.scaling_study", "jaxformer.decoding",
    "jaxformer.training.sweep.scheduler", "jaxformer.scaling.results",
)  # fmt: skip


class Ended(NamedTuple):
    """A program that has ended.

    Attributes:
      code: exit code; minus the signal that ended it; None: it did not end in time and was killed.
      out, err: what it printed.
    """

    code: int | None
    out: str
    err: str


def prepare(home: Path) -> None:
    """Imports what the programs import, with a home folder of their own; to be called before anything imports JAX."""
    os.environ |= {
        "HOME": str(home), "MPLCONFIGDIR": str(home / "matplotlib"), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg",
        "JAX_NUM_CPU_DEVICES": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT", "XLA_FLAGS"))]:
        del os.environ[name]
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: forking would lose some"


class Program:
    """A program that runs.

    Args:
      argv: the module and its flags, as after `python -m`.
      folder: of the trial: its cache is `xdg`, its temporary folder `tmp`, and it runs in `cwd`.
      name: of the files that take what it prints.
      file_size: bytes at which writing a file fails; None: no limit.
      fresh: starts Python anew.
    """

    def __init__(
        self, argv: list[str], folder: Path, name: str = "1", *, file_size: int | None = None, fresh: bool = False
    ):
        self._files = [folder / f"{stream}-{name}" for stream in ("out", "err")]
        env = {"XDG_CACHE_HOME": str(folder / "xdg"), "TMPDIR": str(folder / "tmp")}
        for each in ("xdg", "tmp", "cwd"):
            (folder / each).mkdir(exist_ok=True)
        self._code: int | None = None
        if fresh:
            with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", *argv], cwd=folder / "cwd", env={**os.environ, **env}, stdout=out,
                    stderr=err, start_new_session=True, preexec_fn=lambda: _limit(file_size),
                )  # fmt: skip
            self.pid = self._process.pid
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be(argv, folder, env, self._files, file_size)

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> Ended:
        """Waits for its end; kills it after `seconds`."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        late = self.poll() is None
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.005)
        out, err = (file.read_text(errors="replace") for file in self._files)
        return Ended(None if late else self._code, out, err)


def _limit(file_size: int | None) -> None:
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))


def _be(argv: list[str], folder: Path, env: dict[str, str], files: list[Path], file_size: int | None) -> None:
    """The forked process becomes the program, and ends as an interpreter ends."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder / "cwd")
        os.environ |= env
        tempfile.tempdir = None
        for stream, file in zip((1, 2), files, strict=True):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _limit(file_size)
        sys.argv = [argv[0], *argv[1:]]
        try:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)

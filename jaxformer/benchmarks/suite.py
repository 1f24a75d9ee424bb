"""What a suite hands to the benchmark, and the ruler beside its contestants."""

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxformer.errors import ConfigError, ProgramError

RULER = "large product"
ANSWER = "jaxformer benchmark: your turn\n"


class Suite(NamedTuple):
    """Contestants of one suite.

    Attributes:
      contestants: name -> one run; it returns nothing, and then its seconds are what is measured, or MiB.
      unit: of `work`.
      work: what one run gets done; 0: nothing that could be counted.
      flop: name -> FLOP of one run; RULER among them: rates are also said as a fraction of its rate.
      peak: FLOP/s that the chip's maker states; 0: not known.
      whole: whole processes are measured, so that no round is needed to warm up.
      summary: what was measured (unit and values by name) -> lines to print after those of the contestants.
    """

    contestants: Mapping[str, Callable[[], float | None]]
    unit: str = ""
    work: float = 0
    flop: Mapping[str, float] = MappingProxyType({})
    peak: float = 0
    whole: bool = False
    summary: Callable[[Mapping[str, tuple[str, list[float]]]], Iterable[str]] = lambda measured: ()


def ruler(dtype: str, size: int = 2048, calls: int = 1) -> tuple[Callable[[], None], float]:
    """Products of two square matrices, as XLA does them here, and their FLOP. On a GPU one alone is over too soon."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))

    def run() -> None:
        for _ in range(calls):
            out = product(x)
        jax.block_until_ready(out)

    return run, calls * 2.0 * size**3


def need_peers(suite: str) -> None:
    """Raises ConfigError if torch or transformers is not installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"--suite={suite} needs torch and transformers: pip install 'jaxformer[peers]'")


def torch_device() -> str:
    """Where torch is to work: "cuda" where JAX is on a GPU, else "cpu".

    Raises:
      ConfigError: torch sees no GPU where JAX does.
    """
    import jax

    if jax.default_backend() != "gpu":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("JAX sees a GPU and torch does not; install torch with CUDA")
    return "cuda"


def process(*arguments: str) -> str:
    """Standard output of `python arguments`, a whole process.

    Raises:
      ProgramError: it failed; with the last line that it said.
    """
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ProgramError(
            f"{' '.join(arguments)} ended with exit code {done.returncode}: {done.stderr.strip()[-400:]}"
        )
    return done.stdout


def in_process(module: str, *arguments: str) -> Callable[[], None]:
    """A contestant in a process of its own, `python -m module arguments`, whose program calls `take_turns`; nothing
    that one contestant sets (allocator, threads) is shared with another. It prepares itself beside the others, and its
    first run waits until it is ready. It ends with this process.

    Raises (one run):
      ProgramError: the process ended.
    """
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    ask, answers = child.stdin, child.stdout
    ready = False

    def wait() -> None:
        if not any(line == ANSWER for line in answers):
            with contextlib.suppress(BrokenPipeError):  # what was asked of it is still in the pipe
                ask.close()
            answers.close()
            raise ProgramError(f"{' '.join(command[1:])} ended with exit code {child.wait()}")

    def run() -> None:
        nonlocal ready
        if not ready:
            wait()
            ready = True
        with contextlib.suppress(BrokenPipeError):  # it has ended; `wait` says so
            ask.write("\n")
            ask.flush()
        wait()

    return run


def take_turns(run: Callable[[], None]) -> None:
    """Runs once for each line on standard input, and says when it is ready and each time it is done."""
    print(ANSWER, end="", flush=True)
    for _ in sys.stdin:
        run()
        print(ANSWER, end="", flush=True)

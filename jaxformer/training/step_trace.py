"""A trace of some steps by JAX's profiler, for xprof, TensorBoard or Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

T = TypeVar("T")


class StepTrace:
    """Traces the dispatches that make the updates `steps[0]` to `steps[1]`, all of each.

    Args:
      steps: first and last; None: nothing is traced.
      directory: where `plugins/profile/` is written.
      say: prints a line.
    """

    def __init__(self, steps: tuple[int, ...] | None, directory: Path, say: Callable[[str], None]):
        self._steps, self._directory, self._say = steps, directory, say
        self._since: int | None = None

    def __call__(self, train: Callable[..., T], step: int, count: int, *args: Any) -> T:
        """``train(*args)``, which makes the `count` updates after `step`."""
        if self._steps is None or step + count < self._steps[0] or step >= self._steps[1]:
            return train(*args)
        if self._since is None:
            jax.block_until_ready(args)  # the dispatch before is not part of it
            try:
                jax.profiler.start_trace(str(self._directory))
            except (RuntimeError, OSError) as error:  # someone else is tracing this process
                self._steps = None
                self._none(step, error)
                return train(*args)
            self._since = step
        with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
            out = train(*args)
        if step + count >= self._steps[1]:
            jax.block_until_ready(out)
            since = self._since
            if self.close():
                self._say(f"trace of steps {since + 1} to {step + count}: {self._directory}")
        return out

    def close(self) -> bool:
        """Ends a trace that is being made; True if it was written."""
        if (since := self._since) is None:
            return False
        self._steps = self._since = None
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:  # a full disk is no reason to end the run
            self._none(since, error)
            return False
        return True

    def _none(self, since: int, error: Exception) -> None:
        self._say(f"note: no trace of step {since + 1} on ({' '.join(str(error).split())[:200]})")

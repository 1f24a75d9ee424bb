"""Stops at, or skips and counts, lines of a file or examples of a dataset that cannot be read as text."""

from typing import Literal

from jaxformer.errors import ConfigError


class Faults:
    """Handles lines or examples that cannot be read as text, by config.data.on_error: raises, or skips them.

    Attributes:
      count: how many were skipped.
      first: what was wrong with the first of them; "" if there was none.

    >>> faults = Faults("skip")
    >>> faults.meet(ConfigError("a.jsonl:3: not JSON"))
    >>> faults.count, faults.first
    (1, 'a.jsonl:3: not JSON')
    """

    def __init__(self, on_error: Literal["stop", "skip"]):
        """Starts the count at 0."""
        self.on_error = on_error
        self.count, self.first = 0, ""

    def meet(self, error: ConfigError) -> None:
        """Raises the error, with a hint to the setting that skips it, or counts it."""
        if self.on_error == "stop":
            raise ConfigError(f"{error}; data.on_error=skip skips it") from error
        self.first = self.first or str(error)
        self.count += 1

    def clear(self) -> None:
        """Resets the count."""
        self.count, self.first = 0, ""

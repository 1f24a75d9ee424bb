"""What becomes of a line of a file, or an example of a dataset, that cannot be read as text."""

from typing import Literal

from jaxformer.errors import ConfigError


class Faults:
    """What is done about a line or example that cannot be read as text: reading ends, or goes on without it.

    Attributes:
      count: how many were left out.
      first: what was wrong with the first of them; "" if there was none.

    >>> faults = Faults("skip")
    >>> faults.meet(ConfigError("a.jsonl:3: not JSON"))
    >>> faults.count, faults.first
    (1, 'a.jsonl:3: not JSON')
    """

    def __init__(self, on_error: Literal["stop", "skip"]):
        """Begins to count."""
        self.on_error = on_error
        self.count, self.first = 0, ""

    def meet(self, error: ConfigError) -> None:
        """Raises the error, with the setting that goes on without it, or counts it."""
        if self.on_error == "stop":
            raise ConfigError(f"{error}; data.on_error=skip goes on without it") from error
        self.first = self.first or str(error)
        self.count += 1

    def clear(self) -> None:
        """Forgets what was counted."""
        self.count, self.first = 0, ""

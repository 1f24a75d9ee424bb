"""The exceptions of this package. `runtime.program` prints the message, one line, and ends with exit code 2."""


class ConfigError(ValueError):
    """Bad configuration; the message is one line, ready to print."""


class DamagedCacheError(Exception):
    """Damaged cache; the message says how ("train.tokens is shorter than it was"). Our own caches are rebuilt."""


class ProgramError(RuntimeError):
    """Something that the user can fix; the message is one line, ready to print."""


class RecordError(ValueError):
    """A record does not fit the schema; the message is one line, ready to print."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message is one line, ready to print."""


class InvalidCheckpointError(Exception):
    """A checkpoint is damaged; the message is a few words saying how."""


class TrainingDiverged(RuntimeError):  # noqa: N818 (named after an event, like KeyboardInterrupt)
    """Too many steps in a row were not finite; the message is one line, ready to print."""


class StoreError(OSError):
    """An object store refuses or does not answer; the message is one line, ready to print."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

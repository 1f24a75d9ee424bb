"""The exceptions of this package. `runtime.program` prints the message, one line, and ends with exit code 2."""


class ConfigError(ValueError):
    """Bad configuration; the message is one line, ready to print."""


class DamagedCacheError(Exception):
    """What is wrong with a kept folder, as in "train.tokens is shorter than it was"; made again if it is ours."""


class ProgramError(RuntimeError):
    """Something that the user can fix; the message is one line."""


class RecordError(ValueError):
    """A record that does not fit the schema."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message is one line, ready to print."""


class InvalidCheckpointError(Exception):
    """Why a checkpoint cannot be trusted; a few words."""


class TrainingDiverged(RuntimeError):  # noqa: N818 (what happened, as in KeyboardInterrupt)
    """Too many steps in a row were not finite; the message is one line, ready to print."""

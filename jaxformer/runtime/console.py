"""Makes standard output and error safe to print to: a character that the encoding lacks is replaced by ASCII, text that
cannot be written (a full disk) is dropped after one note, and closed descriptors are opened on the null device.

>>> "0.5 ± 0.1 → é".encode("ascii", errors="jaxformer")
b'0.5 +- 0.1 -> \\\\xe9'
"""

import codecs
import io
import os
import select
import sys

PLAIN = {"±": "+-", "\N{MULTIPLICATION SIGN}": "x", "→": "->", "\N{EN DASH}": "-", "—": "--", "µ": "u", "…": "..."}


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in text), error.end


codecs.register_error("jaxformer", _plainly)


def one_line(text: str) -> str:
    r"""`text` with line ends and control characters escaped, so that a quoted file name cannot break a message.

    >>> print(one_line("a\nb \x1b[31m"))
    a\nb \x1b[31m
    """
    return "".join(c if c.isprintable() or 0xD800 <= ord(c) < 0xE000 else ascii(c)[1:-1] for c in text)


class Lossy(io.FileIO):
    """Writes to a file descriptor; after the first failure drops everything. A closed pipe still raises.

    Attributes:
      lost: why writing failed, or None.
    """

    def __init__(self, descriptor: int, note: str | None):
        """`note`: printed once to standard error when writing fails, with {reason} filled in; None: nothing."""
        super().__init__(descriptor, "w", closefd=False)
        self._note = note
        self.lost: str | None = None

    def write(self, data) -> int:  # type: ignore[override]
        """Writes the bytes; if that fails, prints the note and reports them as written."""
        if self.lost is not None:
            return len(data)
        try:
            return os.write(self.fileno(), data)
        except BrokenPipeError:
            raise
        except BlockingIOError:  # another program made this terminal or pipe non-blocking
            select.select([], [self.fileno()], [])
            return self.write(data)
        except OSError as error:
            self.lost = error.strerror or str(error)
            if self._note is not None:
                print(self._note.format(reason=self.lost), file=sys.stderr, flush=True)
            return len(data)


def open_closed() -> None:
    """Opens closed standard descriptors on the null device. Otherwise the next file opened would get the number of one,
    and libraries would print into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def secure(note: str | None = None) -> Lossy | None:
    """Replaces standard output and error by streams that do not raise; streams of tests and notebooks stay.

    Args:
      note: printed once to standard error if standard output fails, with {reason} filled in.

    Returns:
      The new raw standard output, or None.
    """
    open_closed()
    out: Lossy | None = None
    for number, name in (1, "stdout"), (2, "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):
            continue
        if descriptor != number:
            stream.reconfigure(errors="jaxformer")
            continue
        stream.flush()
        raw = Lossy(number, note if number == 1 else None)
        # Line-buffered even into files and pipes, so that a log is up to date (and PYTHONUNBUFFERED is respected).
        made = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "jaxformer", line_buffering=True)
        setattr(sys, name, made)
        out = raw if number == 1 else out
    return out

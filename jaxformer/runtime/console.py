"""Standard output and error that cannot stop a program: a character that their encoding lacks is replaced by a plainer
one, what cannot be written (a full disk) is dropped with one note, and descriptors that were closed lead nowhere.

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
    r"""`text` with line ends and a terminal's control characters spelt out: what a message quotes may hold any.

    >>> print(one_line("a\nb \x1b[31m"))
    a\nb \x1b[31m
    """
    return "".join(c if c.isprintable() or 0xD800 <= ord(c) < 0xE000 else ascii(c)[1:-1] for c in text)


class Lossy(io.RawIOBase):
    """Writes to a descriptor until that fails; from then on what is written is dropped. A closed pipe still raises.

    Attributes:
      lost: why writing failed, or None.
    """

    def __init__(self, descriptor: int, note: str | None):
        """`note`: said once on standard error when writing fails, with {reason} in it; None: nothing is said."""
        super().__init__()
        self._descriptor, self._note = descriptor, note
        self.lost: str | None = None

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data) -> int:  # type: ignore[override]
        """Writes the bytes; where that fails, says so once and drops them, as if they had been written."""
        if self.lost is not None:
            return len(data)
        try:
            return os.write(self._descriptor, data)
        except BrokenPipeError:
            raise
        except BlockingIOError:  # another program has made this terminal or pipe non-blocking
            select.select([], [self._descriptor], [])
            return self.write(data)
        except OSError as error:
            self.lost = error.strerror or str(error)
            if self._note is not None:
                print(self._note.format(reason=self.lost), file=sys.stderr, flush=True)
            return len(data)


def open_closed() -> None:
    """Opens the standard descriptors that are closed on the null device. Otherwise the next file opened would get
    their numbers, and libraries would print into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        if descriptor < 3:
            os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def secure(note: str | None = None) -> Lossy | None:
    """Replaces standard output and error by streams that cannot stop a program; those that are not the process's own
    (of tests, notebooks) stay.

    Args:
      note: said once on standard error where standard output fails; {reason} in it is why.

    Returns:
      What standard output writes to, or None.
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
        # By lines, into files and pipes too: a log shows what happens, and PYTHONUNBUFFERED promises no less.
        made = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "jaxformer", line_buffering=True)
        setattr(sys, name, made)
        out = raw if number == 1 else out
    return out

"""Reads columns of numbers from CSV files in the many formats that occur in practice.

Recognized automatically: commas, semicolons, tabs, bars or blanks between cells; quotes; a byte-order mark or UTF-16;
comment lines (`#`) and blank lines anywhere; a header after a `#`; thousands separators (`1,000,000`, `1 000 000`,
`1_000_000`); decimal commas if the cells are not separated by commas; `6.5e+18`, `6.5E18`, `1.2×10^9`. Column names
match regardless of case, blanks, underscores and quotes. Anything else is a one-line error that names row and column:
a guessed number would be worse than none.

>>> file = Rows.from_text('''Model Size; "Training FLOP"; loss
...    # a comment
...    44,000,000; 1.2e18; 3.91''', "table.csv")
>>> file.column("model_size").tolist(), file.column("LOSS").tolist()
([44000000.0], [3.91])
>>> file.column("params")
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: table.csv: no column 'params'; it has 'Model Size', 'Training FLOP', 'loss'
"""

import csv
import difflib
import io
import os
import re
from dataclasses import dataclass

import numpy as np

from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.storage import files

_MOST_BYTES, _LONGEST_LINE, _MOST_TITLES = 1 << 28, 100_000, 20
_DELIMITERS = (",", ";", "\t", "|")
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_POWER_OF_TEN = re.compile(r"\s*[\u00d7x*\u00b7]\s*10\s*(?:\^|\*\*)\s*\{?([+-]?\d+)\}?$")
_GROUPED = re.compile(r"[+-]?\d{1,3}([,' _\u00a0\u202f])\d{3}(\1\d{3})*(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[\d.]*,\d+([eE][+-]?\d+)?")
_MISSING = {"", "-", "--", "na", "n/a", "nan", "none", "null", "#n/a", "?"}


@dataclass(frozen=True)
class Rows:
    """The cells of a file.

    Attributes:
      source: name of the file in messages.
      header: column names as written.
      cells: [I] rows of text, each as long as the header.
      lines: [I] line number of each row, from 1.
      delimiter: separates the cells; " " for runs of blanks.
    """

    source: str
    header: list[str]
    cells: list[list[str]]
    lines: list[int]
    delimiter: str

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Rows":
        """Reads a file; raises ConfigError if it does not exist or holds no table."""
        try:
            raw = files.read_bytes(path, _MOST_BYTES, follow=True)
        except OSError as error:
            reason = (error.strerror or "cannot be read").lower()
            raise ConfigError(f"{path}: {reason}; accepted: a file, not a folder, a pipe or a device") from None
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            text = raw.decode("utf-16", errors="replace")
        else:
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = raw.decode("latin-1")
        if "\0" in text:
            raise ConfigError(f"{path}: not a text file; accepted: UTF-8, or UTF-16 with its byte-order mark")
        return cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, source: str) -> "Rows":
        """Parses a text; raises ConfigError if it has no header or no rows."""
        kept: list[tuple[int, str]] = []
        comment = None
        for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
            if len(line) > _LONGEST_LINE:
                raise ConfigError(
                    f"{source}: line {number} has {len(line)} characters; accepted: {_LONGEST_LINE} at most"
                )
            bare = line.strip()
            if bare.startswith("#") and not kept:
                comment = (number, bare.lstrip("# "))
            elif bare and not bare.startswith("#") and bare.strip(",;|\t \"'"):
                kept.append((number, line))
        if not kept:
            raise ConfigError(f"{source}: empty; expected a header line and rows of numbers")
        delimiter = _delimiter([line for _, line in kept[:50]])
        first = _split(kept[0][1], delimiter)
        if all(_number(cell) is not None for cell in first):
            if comment is None or len(_split(comment[1], delimiter)) != len(first):
                raise ConfigError(f"{source}: line {kept[0][0]} holds only numbers; expected column names there")
            header = _split(comment[1], delimiter)
        else:
            header, kept = first, kept[1:]
        while header and not header[-1]:  # a delimiter at the end of every line
            header.pop()
        if not kept:
            raise ConfigError(f"{source}: a header and no rows")
        cells, lines = [], []
        for number, line in kept:
            row = _split(line, delimiter)
            if any(row[len(header) :]):
                raise ConfigError(f"{source}: line {number} has {len(row)} cells, the header {len(header)}")
            cells.append((row + [""] * len(header))[: len(header)])
            lines.append(number)
        return cls(source, header, cells, lines, delimiter)

    def find(self, name: str) -> int:
        """Index of a column; raises ConfigError, with the closest name, if there is none, or if there are several."""
        exact = [i for i, title in enumerate(self.header) if title == name.strip()]
        found = exact or [i for i, title in enumerate(self.header) if _plain(title) == _plain(name)]
        listing = ", ".join(map(shown, self.header[:_MOST_TITLES])) + ", ..." * (len(self.header) > _MOST_TITLES)
        if not found:
            titles = {_plain(title): title for title in self.header}
            near = difflib.get_close_matches(_plain(name), titles, 1, 0.6)
            hint = f"; did you mean {shown(titles[near[0]])}? It has" if near else "; it has"
            raise ConfigError(f"{self.source}: no column {shown(name)}{hint} {listing}")
        if len(found) > 1:
            raise ConfigError(f"{self.source}: {len(found)} columns are called {name!r}; it has {listing}")
        return found[0]

    def texts(self, name: str) -> list[str]:
        """The cells of a column as written."""
        index = self.find(name)
        return [row[index] for row in self.cells]

    def column(self, name: str) -> np.ndarray:
        """[I] finite float64; raises ConfigError naming row, line and column of a cell that is not a finite number."""
        texts, title = self.texts(name), self.header[self.find(name)]
        commas = [t for t in texts if _DECIMAL_COMMA.fullmatch(t)]
        # 3,14 can only be a decimal comma, and then all commas of the column are; 3,142 is ambiguous.
        decimal = self.delimiter != "," and any(
            not _GROUPED.fullmatch(t) or t.lstrip("+-").startswith("0,") for t in commas
        )
        out = np.empty(len(texts))
        for i, text in enumerate(texts):
            where = f"{self.source}: {self.where(i)}, column {shown(title)}"
            if text.casefold() in _MISSING:
                raise ConfigError(f"{where}: {shown(text) if text else 'empty'}; accepted: a finite number")
            if self.delimiter != "," and not decimal and text in commas and text.count(",") == 1:
                point, none = text.replace(",", "."), text.replace(",", "")
                raise ConfigError(f"{where}: {text!r} could be {point} or {none}; write it without the comma")
            value = _number(text.replace(".", "").replace(",", ".") if decimal and "," in text else text)
            if value is None or not np.isfinite(value):
                raise ConfigError(f"{where}: {shown(text)}; accepted: a finite number without a unit")
            out[i] = value
        return out

    def where(self, i: int) -> str:
        """Name of row i (from 0) in messages: its number among the rows and its line in the file."""
        return f"row {i + 1} (line {self.lines[i]})"


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.strip().strip("\"'")).casefold()


def _split(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        line = re.sub(r"\s+", " ", line.strip())
    cells = next(csv.reader(io.StringIO(line), delimiter=delimiter, skipinitialspace=True))
    return [cell.strip() for cell in cells]


def _delimiter(lines: list[str]) -> str:
    """The delimiter that splits most rows into as many cells as the header, and into the most; blanks if none does."""
    best, score = " ", (0.0, 0)
    for delimiter in _DELIMITERS:
        widths = [len(_split(line, delimiter)) for line in lines]
        if widths[0] > 1:
            agree = sum(width == widths[0] for width in widths) / len(widths)
            score, best = max((score, best), ((agree, widths[0]), delimiter))
    return best


def _number(text: str) -> float | None:
    """The number in a cell; None if there is none (a missing value, a unit)."""
    text = text.strip().strip("\"'").replace("\u2212", "-")
    if power := _POWER_OF_TEN.search(text):
        text = text[: power.start()] + "e" + power.group(1)
    if _GROUPED.fullmatch(text):
        text = re.sub(r"[,' _\u00a0\u202f]", "", text)
    special = text.casefold().lstrip("+-") in ("nan", "inf", "infinity")
    return float(text) if special or _PLAIN.fullmatch(text) else None

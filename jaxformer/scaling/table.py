"""The table a law is fitted to: one row per trained model, with its size N, tokens D, compute C and loss.

>>> table = Table.of(n=[1e6, 2e6], c=[6e15, 6e15], loss=[3.1, 3.0])
>>> table.d.tolist(), table.derived
([1000000000.0, 500000000.0], ('D',))
>>> Table.of(n=[1e6, -2e6], d=[1e9, 1e9], loss=[3.1, 3.0])
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: table: row 2, N: -2000000.0; accepted: a number above 0
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxformer.errors import ConfigError
from jaxformer.scaling.csv_reader import Rows

Floats = np.ndarray

LARGEST = 1e50  # largest value accepted, and its inverse the smallest, so that products and powers do not overflow


@dataclass(frozen=True)
class Table:
    """Measured losses. Arrays are [I], float64, finite and positive.

    Attributes:
      loss: nats per token; the irreducible loss of a fit has the same unit.
      n, d, c: parameters, training tokens, training FLOPs, counted as the user likes; all NaN if they were not given
        and cannot be derived.
      rows: number of each row in its source, from 1.
      clusters: label of each row for the bootstrap (a seed, a size, a trunk); None: every row is its own cluster.
      known: the variables present: one of "N", "D", "C", or all three.
      derived: those of them derived by C = flops_constant * N * D instead of read from the source.
      flops_constant: FLOPs per parameter and token in that relation.
      source: name of the table in messages.
      names: names of the rows in messages, such as "row 3 (line 4)".
      common_error: standard error that all losses share because they were measured on the same validation rows. It
        shifts all of them, and so the irreducible loss, together; comparing rows cannot reveal it.
    """

    loss: Floats
    n: Floats
    d: Floats
    c: Floats
    rows: Floats
    clusters: list[str] | None = None
    known: tuple[str, ...] = ("N", "D", "C")
    derived: tuple[str, ...] = ()
    flops_constant: float = 6.0
    source: str = "table"
    names: tuple[str, ...] = ()
    common_error: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        loss: ArrayLike,
        n: ArrayLike | None = None,
        d: ArrayLike | None = None,
        c: ArrayLike | None = None,
        clusters: Sequence[Any] | None = None,
        flops_constant: float = 6.0,
        source: str = "table",
        names: Sequence[str] | None = None,
        titles: Mapping[str, str] | None = None,
        common_error: float = 0.0,
    ) -> "Table":
        """A table of the given columns; from two of N, D and C the third is derived.

        Args:
          names: names of the rows in messages; None: "row 1", ...
          titles: names of the columns in messages, by "N", "D", "C", "loss".
          common_error: see above.

        Raises:
          ConfigError: no variable, columns of different lengths, or a value that is not a positive finite number.
        """
        if not 0 <= common_error < np.inf:
            raise ConfigError(f"{source}: common_error: {common_error}; accepted: 0 or more")
        if not 1 / LARGEST <= flops_constant <= LARGEST:
            raise ConfigError(f"--flops-constant: {flops_constant}; accepted: a number above 0, 6 as a rule")
        names = tuple(names) if names is not None else tuple(f"row {i + 1}" for i in range(np.size(loss)))
        columns = {}
        for key, values in {"N": n, "D": d, "C": c, "loss": loss}.items():
            if values is None:
                continue
            column = np.asarray(values, np.float64)
            title = (titles or {}).get(key, key)
            if column.shape != (len(names),):
                raise ConfigError(f"{source}: {title} has {column.size} values and there are {len(names)} rows")
            for bad, accepted in (
                (~(np.isfinite(column) & (column > 0)), "a number above 0"),
                ((column > LARGEST) | (column < 1 / LARGEST), f"{1 / LARGEST:g} to {LARGEST:g}"),
            ):
                if bad.any():
                    first = int(bad.argmax())
                    raise ConfigError(f"{source}: {names[first]}, {title}: {column[first]}; accepted: {accepted}")
            columns[key] = column
        if len(columns) < 2:
            raise ConfigError(f"{source}: neither N nor D nor C; a fit needs at least one of them")
        absent = tuple(key for key in ("N", "D", "C") if key not in columns)
        derived = absent if len(absent) == 1 else ()
        if derived == ("C",):
            columns["C"] = flops_constant * columns["N"] * columns["D"]
        elif derived:
            columns[derived[0]] = columns["C"] / (flops_constant * columns["N" if derived == ("D",) else "D"])
        arrays = {key.lower(): columns.get(key, np.full(len(names), np.nan)) for key in ("N", "D", "C")}
        return cls(
            loss=columns["loss"],
            **arrays,
            rows=np.arange(1, len(names) + 1),
            clusters=None if clusters is None else [str(label) for label in clusters],
            known=tuple(key for key in ("N", "D", "C") if key in columns),
            derived=derived,
            flops_constant=flops_constant,
            source=source,
            names=names,
            common_error=common_error,
        )

    @classmethod
    def from_csv(
        cls,
        path: str | os.PathLike,
        *,
        loss: str,
        n: str | None = None,
        d: str | None = None,
        c: str | None = None,
        cluster: str | None = None,
        flops_constant: float = 6.0,
    ) -> "Table":
        """Reads named columns of a CSV file, in any format that `csv_reader` understands.

        Raises:
          ConfigError: a missing file or column, or a cell that is not a positive finite number.
        """
        rows = Rows.from_file(path)
        wanted = {"N": n, "D": d, "C": c, "loss": loss}
        columns = {key: rows.column(name) for key, name in wanted.items() if name is not None}
        titles = {key: f"column {rows.header[rows.find(name)]!r}" for key, name in wanted.items() if name is not None}
        return cls.of(
            n=columns.get("N"),
            d=columns.get("D"),
            c=columns.get("C"),
            loss=columns["loss"],
            clusters=None if cluster is None else rows.texts(cluster),
            flops_constant=flops_constant,
            source=str(path),
            names=[rows.where(i) for i in range(len(rows.cells))],
            titles=titles,
        )

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def num_clusters(self) -> int | None:
        """Number of different labels; None without labels."""
        return None if self.clusters is None else len(set(self.clusters))

    def column(self, name: str) -> Floats:
        """[I] of "N", "D" or "C"."""
        return {"N": self.n, "D": self.d, "C": self.c}[name]

    def take(self, index: Floats) -> "Table":
        """The table of some rows; index: booleans [I] or integers."""
        index = np.arange(len(self))[index]
        arrays = {k: getattr(self, k)[index] for k in ("loss", "n", "d", "c", "rows")}
        clusters = None if self.clusters is None else [self.clusters[i] for i in index]
        return dataclasses.replace(self, **arrays, clusters=clusters, names=tuple(self.names[i] for i in index))

    def drop_highest_loss(self, count: int) -> "Table":
        """The table without the `count` rows of highest loss (Besiroglu et al. 2024 leave out five).

        Raises:
          ConfigError: count is negative or leaves no rows.
        """
        if not 0 <= count < len(self):
            raise ConfigError(
                f"--drop-highest-loss: {count}; accepted: 0 to {len(self) - 1}, one less than {self.source} has rows"
            )
        return self.take(np.sort(np.argsort(self.loss, kind="stable")[: len(self) - count]))

"""Common style of the figures, and how they are saved. matplotlib (extra `scaling`) is imported on first use.

Every figure works in black and white and for colour-blind readers: colours are from `cividis`, whose lightness rises
evenly, and series also differ in marker or dash. Axis labels include the unit.
"""

import io
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.storage import files
from jaxformer.storage.address import place

UNITS = {"N": "parameters N", "D": "training tokens D", "C": "training compute C (FLOP)"}
_MARKERS = "osD^vPX<>p"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
STYLE = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def matplotlib(instead: str = "") -> Any:
    """The matplotlib package with the submodules used here.

    Args:
      instead: what a program can be told if it is not installed, as ", or --no-figures".

    Raises:
      ConfigError: it is not installed, or MPLBACKEND is not one of its backends.
    """
    try:
        import matplotlib as package
        import matplotlib.figure
        import matplotlib.ticker
        import matplotlib.transforms
    except ImportError:
        raise ConfigError(f"figures need the scaling extra: pip install 'jaxformer[scaling]'{instead}") from None
    except ValueError as error:
        if (asked := os.environ.get("MPLBACKEND")) is None:
            raise
        raise ConfigError(f"MPLBACKEND: {asked!r}; accepted: a backend of matplotlib such as agg, or unset") from error
    return package


def encoded(figure: Any, kind: str, **options: Any) -> bytes:
    """A figure as the bytes of a "png", "svg" or "pdf" file, without a date: the same figure gives the same bytes.

    `options` are those of matplotlib's `savefig`.
    """
    drawn = io.BytesIO()
    with matplotlib().rc_context({"svg.hashsalt": "jaxformer"}):
        figure.savefig(drawn, format=kind, metadata=_UNDATED.get(kind), **options)
    return drawn.getvalue()


def save(figures: Mapping[str, Any], directory: str | Path) -> list[Path]:
    """Writes NAME.png (150 dots per inch) and NAME.svg of each; returns the paths.

    Raises:
      OSError: a file cannot be written; it is unchanged.
    """
    paths = []
    with matplotlib().rc_context(STYLE):
        for name, figure in figures.items():
            for kind in ("png", "svg"):
                paths.append(place(directory) / f"{name}.{kind}")
                files.write_atomically(paths[-1], encoded(figure, kind, dpi=150, bbox_inches="tight"))
    return paths


def panel(rows: int = 1) -> tuple[Any, Any]:
    """A figure with one panel, or several stacked vertically (side by side they are too small on a phone)."""
    figure = matplotlib().figure.Figure(figsize=(6.4, 4.2 if rows == 1 else 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, 1)


def shade(share: float) -> Any:
    """A colour of `cividis`, from dark blue at 0 to light yellow at 1."""
    return matplotlib().colormaps["cividis"](share)


def line_style(i: int, count: int) -> dict[str, Any]:
    """Colour and dash of the i-th of `count` lines."""
    return {"color": shade(0.9 * i / max(count - 1, 1)), "linestyle": _DASHES[i % len(_DASHES)]}


def marker(i: int) -> str:
    """Marker of the i-th series."""
    return _MARKERS[i % len(_MARKERS)]


def loss_ticks(axis: Any) -> None:
    """Evenly spaced decimal numbers on a logarithmic loss axis, which rarely spans a decade."""
    _set_ticks(axis, matplotlib().ticker.MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]), "{:g}".format)


def log_ticks(axis: Any, text: Callable[[float], str] | None = None) -> None:
    """Ticks such as 20k, 50k, 100k on a logarithmic axis that spans less than two decades; call it after plotting."""
    low, high = axis.get_view_interval()
    if high < 100 * low:
        ticker = matplotlib().ticker
        near = ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])  # so that 1, where ratios end or begin, is one
        locator = ticker.LogLocator(subs=(1.0, 2.0, 5.0)) if high > 8 * low else near
        _set_ticks(axis, locator, text or (lambda value: count(value) if value >= 1000 else f"{value:g}"))


def _set_ticks(axis: Any, locator: Any, text: Callable[[float], str]) -> None:
    axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, _: text(value) if value > 0 else "")
    axis.set_minor_formatter(matplotlib().ticker.NullFormatter())


def size_bar(figure: Any, axes: Any, shades: Any, logs: np.ndarray, name: str) -> None:
    """A colour bar labelled with sizes instead of their logarithms."""
    low, high = logs.min(), logs.max()
    steps = (1,) if high - low > 4 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    marks = [k + np.log10(step) for k in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    marks = [mark for mark in marks if low <= mark <= high] or [low, high]
    bar = figure.colorbar(shades, ax=axes, pad=0.01, ticks=marks, label=UNITS[name])
    bar.ax.yaxis.set_major_formatter(lambda value, _: count(10**value))
    bar.minorticks_off()


def flop(value: float) -> str:
    """A number of FLOP as a tick's label.

    >>> flop(2e10), flop(1e10)
    ('$2\\\\times10^{10}$', '$10^{10}$')
    """
    power = math.floor(math.log10(value) + 1e-9)
    factor = f"{value / 10**power:.3g}"
    return f"$10^{{{power}}}$" if factor == "1" else rf"${factor}\times10^{{{power}}}$"


def count(value: float) -> str:
    """Abbreviates a number of parameters or tokens.

    >>> count(44e6), count(1.5e9)
    ('44M', '1.5B')
    """
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"

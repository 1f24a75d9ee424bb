"""Figures of a study's runs: learning rates at each size, and training curves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.scaling import plotting


def learning_rate_curves(points: Sequence[Mapping[str, Any]]) -> Any:
    """Final loss against learning rate, one curve per size; a star marks the chosen rate.

    Args:
      points: dicts of "N", "learning_rate", "loss" and optionally "chosen" (bool). Seeds at the same rate are averaged.
        A loss that is not finite (a diverged run) is drawn as a cross at the top.
    """
    with plotting.matplotlib().rc_context(plotting.STYLE):
        figure, axes = plotting.panel()
        points = [{**p, "loss": float(p["loss"])} for p in points]  # in JSON, nan is a string
        finite = [p["loss"] for p in points if np.isfinite(p["loss"])]
        top = max(finite) + 0.05 * np.ptp(finite) if finite else 1.0
        sizes = sorted({p["N"] for p in points})
        for i, size in enumerate(sizes):
            mine = [p for p in points if p["N"] == size]
            rates = np.unique([p["learning_rate"] for p in mine])
            loss = np.array([np.mean([p["loss"] for p in mine if p["learning_rate"] == rate]) for rate in rates])
            good = np.isfinite(loss)
            style = plotting.line_style(i, len(sizes))
            axes.plot(rates[good], loss[good], marker=plotting.marker(i), markersize=5,
                      label=f"N = {plotting.count(size)}", **style)  # fmt: skip
            axes.plot(rates[~good], np.full((~good).sum(), top), "x", color=style["color"])
            for rate in [p["learning_rate"] for p in mine if p.get("chosen") and np.isfinite(p["loss"])]:
                axes.plot(rate, loss[rates == rate], "*", color="black", markersize=11)
        axes.set(xscale="log", xlabel="peak learning rate", ylabel="final loss (nats per token)",
                 title="Learning rate at each size (star: chosen; cross at the top: diverged)")  # fmt: skip
        plotting.log_ticks(axes.xaxis)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def training_curves(curves: Sequence[Mapping[str, Any]]) -> Any:
    """Training loss against tokens.

    Args:
      curves: dicts of "tokens": [...], "loss": [...], and "N" for the legend.
    """
    with plotting.matplotlib().rc_context(plotting.STYLE):
        figure, axes = plotting.panel()
        for i, curve in enumerate(curves):
            label = f"N = {plotting.count(curve['N'])}"
            axes.plot(curve["tokens"], curve["loss"], linewidth=1.2, label=label, **plotting.line_style(i, len(curves)))
        axes.set(
            xscale="log", yscale="log", xlabel="tokens seen", ylabel="loss (nats per token)", title="Training curves"
        )
        plotting.loss_ticks(axes.yaxis)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure

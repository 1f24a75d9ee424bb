"""The figures of `experiments.language_experts`, from its records."""

import numpy as np

from experiments.language_experts_page import SHOWN_SEED, Records, arms, floors, gap, readings
from jaxformer.scaling import plotting


def gaps(found: Records) -> bytes:
    """The gap against the parameters that a model has, and those that a token uses."""
    with plotting.matplotlib().rc_context(plotting.STYLE | {"font.size": 13.0, "legend.fontsize": 12.0}):
        drawn, axes = plotting.panel()
        for i, (name, label) in enumerate({"total": "all parameters", "active": "those that a token uses"}.items()):
            means = [gap(found, experts) for experts in arms(found)]
            sizes = [floors(found)["costs"][str(experts)][name] for experts in arms(found)]
            value, low, high = np.array(means).T
            style = {"color": plotting.shade(0.7 * i), "linestyle": "-" if i == 0 else ":"}
            axes.plot(sizes, value, label=label, marker=plotting.marker(i), **style)
            if name == "total":  # the others have the same intervals
                bars = np.nan_to_num([value - low, high - value])
                axes.errorbar(sizes, value, bars, capsize=4, **style)
                for experts, size, top in zip(arms(found), sizes, value + bars[1], strict=True):
                    text = f"{experts} experts" if experts > 1 else "dense"
                    axes.annotate(
                        text, (size, top), xytext=(0, 6), textcoords="offset points", fontsize=12, ha="center"
                    )
        axes.margins(x=0.1)
        axes.set(xscale="log", xlabel="parameters", ylabel="nats per token above the floor")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        plotting.log_ticks(axes.xaxis)
        axes.legend(loc="lower left")
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def serving(found: Records) -> bytes:
    """The share of its tokens that each expert has: of each language on the left, of each symbol on the right; layers
    of one model below each other. Columns are sorted by the expert that has most of them in the layer."""
    (record,) = [each for each in readings(found, max(arms(found))) if each["seed"] == SHOWN_SEED]
    sides = {"languages": np.array(record["shares"]), "symbols": np.array(record["symbol_shares"])}  # [L, E, ...]
    package = plotting.matplotlib()
    style = plotting.STYLE | {"font.size": 13.0, "axes.titlesize": 13.0, "axes.grid": False}
    with package.rc_context(style):
        drawn = package.figure.Figure(figsize=(7.6, 6.4), layout="constrained")
        panels = drawn.subplots(len(sides["languages"]), 2, squeeze=False, width_ratios=(1.2, 1))
        for (name, layers), column in zip(sides.items(), panels.T, strict=True):
            for number, (axes, layer) in enumerate(zip(column, layers, strict=True)):
                order = np.lexsort((-layer.max(axis=0), layer.argmax(axis=0)))
                image = axes.imshow(
                    layer[:, order], cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
                )
                axes.set(title=f"layer {number + 1}, {name}", yticks=range(len(layer)))
                few = name == "languages"
                axes.set_xticks(range(len(order)) if few else [], [str(each) for each in order] if few else [])
                axes.tick_params(axis="x", labelsize=8)
        for axes in panels[:, 0]:
            axes.set_ylabel("expert")
        for axes, text in zip(panels[-1], ("language, by number", "each column a symbol"), strict=True):
            axes.set_xlabel(text)
        drawn.colorbar(image, ax=panels, label="share of its tokens")
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def figures(found: Records) -> dict[str, bytes]:
    """Figures by name."""
    return {"gap": gaps(found)} | ({"experts": serving(found)} if max(arms(found)) > 1 else {})

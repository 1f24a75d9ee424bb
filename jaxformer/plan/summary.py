"""A plan as text: memory, communication beside its lower bound, and least time; and a comparison of two plans."""

import math
from typing import Any

from jaxformer.config import diff
from jaxformer.parallel.constraints import ACTIVATION_RULES
from jaxformer.plan.measures import Plan, by_axes

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size(number: float | None) -> str:
    """Bytes as text with three digits.

    >>> size(8632745984), size(12), size(None)
    ('8.04 GiB', '12 B', 'unknown')
    """
    if number is None:
        return "unknown"
    for unit, name in UNITS:
        if abs(number) >= unit:
            return f"{number / unit:.3g} {name}" if number < 1000 * unit else f"{number / unit:.0f} {name}"
    return f"{number:.0f} B"


def _experts(plan: Plan) -> list[str]:
    """How experts are computed and what their devices send each other."""
    execution, kind = plan["config"].get("execution", {}), plan["config"].get("model", {}).get("feed_forward", {})
    if kind.get("kind") != "experts":
        return []
    products = f", products by {execution['experts']}" if kind["dispatch"] == "dropless" else ""
    sent = f", exchange by {execution['expert_exchange']}" if plan["mesh"].get("expert", 1) > 1 else ""
    return [f"experts: {kind['dispatch']}{products}{sent}"]


def lines(plan: Plan) -> list[str]:
    """The whole plan as lines of text."""
    mesh = " x ".join(f"{name} {n}" for name, n in plan["mesh"].items())
    memory = plan["memory"]
    used = f"{plan['active']:,} used by a token, " if "active" in plan else ""
    out = [
        f"{plan['topology']}: {plan['devices']} devices, mesh {mesh}; {plan['parameters']:,} parameters, {used}"
        f"{plan['tokens']} tokens an update; compiled in {plan['seconds']:.0f} s",
        *_experts(plan),
        "",
        "memory of one device",
    ]
    names = (
        ("parameters", "parameters, float32"),
        ("optimizer", "optimizer"),
        ("temporaries", "temporaries, at their peak"),
        ("gradients", "  of them gradients, float32"),
        ("activations", "  of them saved activations, about"),
        ("total", "total, with the batch"),
        ("limit", "available on the device"),
    )
    out += [f"  {label:34} {size(memory.get(name)):>12}" for name, label in names]
    out.append(f"  {'fits':34} {verdict(plan):>12}")
    out += [f"  replicated along {r['along']}: {r['in']} {r['name']}, {size(r['bytes'])}" for r in plan["replicated"]]
    if "collectives" in plan:
        out += ["", *_work(plan), "", *_sent(plan)]
    if plan.get("roofline"):
        out += ["", *_roofline(plan["roofline"])]
    return out


def verdict(plan: Plan) -> str:
    """Whether the plan fits: yes, no or unknown."""
    return {True: "yes", False: "no", None: "unknown"}[plan["memory"]["fits"]]


def _work(plan: Plan) -> list[str]:
    flops, useful = plan["flops"], plan["flops"]["useful"] or 0.0
    share = f"of which the model's {useful:.1%}"
    if useful > 1:  # kernels leave blocks of masked scores out
        share = f"{1 / useful:.1%} of the model's, which counts masked scores too"
    stages = plan.get("stages")
    times = "" if not stages or stages["repeats"] == 1 else f", {stages['repeats']} times round,"
    schedule = [] if not stages else [
        f"  {'ticks of the pipeline':34} {stages['ticks']:>12} for {stages['micro_batches']} micro-batches{times} in "
        f"{stages['stages']} stages: {stages['useful']:.1%} of them useful"
    ]  # fmt: skip
    return [
        "work of one update",
        *schedule,
        f"  {'model, all devices':34} {flops['model']:>12.4g} FLOP",
        f"  {'program, one device':34} {flops['program']:>12.4g} FLOP, {share}",
        f"  {'main memory, one device':34} {size(plan['traffic']):>12} read and written",
    ]


def _sent(plan: Plan) -> list[str]:
    out = ["sent by one device in one update"]
    out += [
        f"  {row['kind']:20} {row['axes']:14} {size(row['bytes']):>12} in {row['count']:.0f}"
        for row in plan["collectives"]
        if row["bytes"] >= 2**10
    ]
    sent = by_axes(plan)
    for axes in sorted(sent.keys() | plan["minimum"].keys(), key=lambda a: -sent.get(a, 0.0)):
        least = plan["minimum"].get(axes)
        if max(sent.get(axes, 0.0), least or 0.0) < 2**20:
            continue
        ratio = f"{sent.get(axes, 0.0) / least:.2f} of the lower bound, {size(least)}" if least else "lower bound 0"
        out.append(f"  {'all':20} {axes:14} {size(sent.get(axes, 0.0)):>12}: {ratio}")
    out.append("  largest")
    out += [
        f"    {size(row['bytes']):>9} {row['kind']:18} {row['axes']:9} {row['times']:5.0f} x {row['shape']:24} "
        f"{_end(row['source'])}"
        for row in plan["largest"]
    ]
    return out


def _end(path: str, most: int = 72) -> str:
    """The last parts of a path, as many as fit.

    >>> _end("while/body/dot_general", 16)
    '.../dot_general'
    """
    whole = path
    while len(path) > most - 4 * (path != whole) and "/" in path:
        path = path.partition("/")[2]
    return path if path == whole else f".../{path}"


def milliseconds(seconds: float) -> str:
    """A time with at least two digits that say something.

    >>> milliseconds(0.25), milliseconds(1.234e-5)
    ('250.0 ms', '0.012 ms')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2g} ms"


def _roofline(times: dict[str, Any]) -> list[str]:
    return [
        "least time of one update",
        *(f"  {name:34} {milliseconds(times[name]):>13}" for name in ("compute", "memory", "links")),
        f"  {'all three at once: ' + times['bound'] + ' bound':34} {milliseconds(times['step']):>13}, "
        f"MFU {times['utilisation']:.1%}",
        f"  {'links after the rest':34} {milliseconds(times['no_overlap']):>13}, "
        f"MFU {times['utilisation_no_overlap']:.1%}",
    ]


def remedy(plan: Plan) -> str:
    """One line about what to change if a plan does not fit."""
    memory, mesh = plan["memory"], plan["mesh"]
    rows, execution = plan["config"]["train"]["global_batch_size"], plan["config"]["execution"]
    line = (
        f"config does not fit {plan['topology']}: {size(memory['total'])} of {size(memory['limit'])} on each device "
        f"({size(memory['state'])} parameters and optimizer, {size(memory['temporaries'])} temporaries)"
    )
    ideas = []
    if memory["state"] + memory["gradients"] > 0.8 * memory["limit"]:
        ideas.append(f"more devices, or a larger mesh.fsdp (now {mesh.get('fsdp', 1)})")
    else:
        if execution["remat"] != "full":
            ideas.append(f"--config.execution.remat=full (now {execution['remat']})")
        rows //= math.prod(mesh.get(axis, 1) for axis in ACTIVATION_RULES["batch_rows"])
        if rows > (steps := execution["gradient_accumulation_steps"]):
            ideas.append(f"--config.execution.gradient_accumulation_steps={rows} (now {steps})")
        ideas.append(f"a larger mesh.tensor (now {mesh.get('tensor', 1)})")
        if execution["layers"] == "unroll":
            ideas.append("--config.execution.layers=scan")
        if execution["attention"] != "chunked":
            ideas.append("--config.execution.attention=chunked")
    return f"{line}; try {', '.join(ideas)}, or --search"


def compare(old: Plan, new: Plan) -> list[str]:
    """What differs between two plans, settings first, then numbers with their ratio."""
    names = ("topology", "devices", "mesh", "config")
    out = diff({n: old.get(n) for n in names}, {n: new.get(n) for n in names})
    before, after = _numbers(old), _numbers(new)
    for name in sorted(before.keys() | after.keys()):
        a, b = before.get(name, 0.0), after.get(name, 0.0)
        if a != b:
            ratio = f" ({b / a:.3f})" if a and b else ""
            out.append(f"{name}: {a:.6g} -> {b:.6g}{ratio}")
    return out or ["no difference"]


def _numbers(plan: Plan) -> dict[str, float]:
    """Every number of a plan, by a name in dots; 0 if unknown."""
    out = {"traffic": plan.get("traffic"), "seconds": plan["seconds"]}
    for section in ("memory", "flops", "roofline"):
        out |= {f"{section}.{name}": value for name, value in (plan.get(section) or {}).items()}
    out |= {f"sent.{row['kind']}.{row['axes']}": row["bytes"] for row in plan.get("collectives", ())}
    return {name: float(value or 0) for name, value in out.items() if not isinstance(value, str)}

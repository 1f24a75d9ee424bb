"""Sweep: train a grid of runs that differ in some fields of the config, and compare how they end.

    jaxformer sweep gpt_tiny --over optimizer.weight_decay=0,0.01,0.1 --over seed=0..4
    jaxformer sweep --report-only --workdir=runs/gpt_tiny_sweep

Each run is a normal one, in a folder of the sweep that is named by its values. The same command continues a sweep that
was stopped or killed; with more values, it adds their runs. Runs that differ in the seed alone are repetitions.
"""

import sys
from pathlib import Path

from jaxformer.errors import ConfigError
from jaxformer.runs import grid, sweep_folder
from jaxformer.runs.command_line import add_verify, parse_config, parser, workdir_text
from jaxformer.scaling import bootstrap, plotting
from jaxformer.storage.address import place

REPORT = "sweep.md"


def main() -> int:
    """Exit code: 0 done, 2 if a run failed, 75 interrupted (start again to continue)."""
    arguments = parser(__doc__, "sweep")
    arguments.add_argument(
        "--over", action="append", metavar="FIELD=VALUES", help="values of a field: A,B,... or FIRST..LAST; repeatable"
    )
    arguments.add_argument(
        "--workdir", type=workdir_text, help="the sweep's folder (default: the config's, with _sweep)"
    )
    arguments.add_argument("--plan-only", action="store_true", help="print what would be trained, and end")
    arguments.add_argument("--report-only", action="store_true", help="compare what has finished, and end")
    add_verify(arguments)
    if "--report-only" in sys.argv[1:] and not any(word.startswith("--config") for word in sys.argv[1:]):
        arguments.takes_fields = True
        options, config = arguments.parse_known_args()
        if options.workdir is not None:
            _need_packages()
            return report(place(options.workdir))
        if not config:
            raise ConfigError("--workdir: is needed with --report-only, or the sweep's config")
    parsed = parse_config(arguments)
    _need_packages()  # before the runs, which take hours
    options = parsed.options
    named = parsed.given.get("workdir")
    folder = place(options.workdir or named or f"{parsed.config.workdir}_sweep")
    if options.report_only:
        return report(folder)
    if not options.over:
        raise ConfigError("--over: is needed, as in --over optimizer.weight_decay=0,0.1 --over seed=0..4")
    runs = grid.grid(parsed, [grid.read_axis(text) for text in options.over], folder)
    sweep_folder.check(folder, runs)
    from jaxformer.runs import sweeping  # after the checks, so that a wrong value is reported at once
    from jaxformer.runs.store_lock import lock_of
    from jaxformer.runtime import cluster

    cluster.refuse_several(parsed.config.distributed, "sweep")
    todo = sweeping.plan(runs, folder)
    if options.plan_only:
        return 0
    sweep_folder.make(folder)
    with lock_of(str(folder), "--workdir"):
        sweep_folder.write(folder, runs, sweep_folder.failures(folder))
        if not sweeping.run(runs, todo, folder):
            print("stopped; the same command continues")
            return 75
    return report(folder)


def report(folder: Path) -> int:
    """Prints the comparison of a sweep's runs and writes it: sweep.md, figures/loss.png and .svg. Returns 2 if a run
    failed, else 0."""
    from jaxformer.scaling import comparison, comparison_figure, comparison_table
    from jaxformer.storage import files

    ends = sweep_folder.ends(folder)
    rows = comparison.compare(ends)
    lines = [*comparison_table.table(rows), *comparison_table.best(comparison.lowest(ends))]
    for field in list(rows[0].values)[1:]:
        if more := comparison_table.differences(comparison.compare(ends, field), field):
            lines += ["", *more]
    if missing := comparison_table.unfinished(rows):
        lines += ["", f"{len(missing)} of {len(ends)} runs have no final loss:", *missing]
    paths, picture = [folder / REPORT], list[str]()
    try:
        if sum(end.status == "finished" for end in ends) > 1:
            figures = files.make_folder(folder / "figures")
            paths += plotting.save({"loss": comparison_figure.figure(rows)}, figures)
            picture = ["", "![final loss against what was swept](figures/loss.svg)"]
        files.write_atomically(folder / REPORT, "\n".join([f"# Sweep {folder.name}", "", *lines, *picture, ""]))
    except OSError as error:
        raise ConfigError(f"--workdir: {error.filename or folder} cannot be written ({error.strerror})") from None
    print("\n".join(["", *lines, "", *map(str, paths)]))
    return 2 if any(end.status == "failed" for end in ends) else 0


def _need_packages() -> None:
    """Raises ConfigError if what a report needs is not installed."""
    bootstrap.special()
    plotting.matplotlib()

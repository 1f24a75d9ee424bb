"""Compare changes with a baseline on one ladder: how much compute each saves, how sure that is, and whether it lasts.

    jaxformer compare compare_tiny
    jaxformer compare compare_tiny --stage=plan
    jaxformer compare compare_tiny --only=lion

The config is that of a scaling study with `variants: {name: {field: value}}` beside its sections. Stages: plan (which
runs are needed and how long they take), run (trains; the same command continues a stopped or killed comparison), report
(three lines for each variant, comparison.json and comparison.html). Without --stage: all of them. With --only, machines
share the ladders of one comparison: each plans and trains those it names, and --stage=report compares what all have
trained.
"""

import re
import shlex

from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import Parsed, add_verify, integer, parse_config, parser
from jaxformer.runs.trial_flag import add_trial, asks_trial
from jaxformer.runtime.program import a_device_for_each_core
from jaxformer.scaling import plotting
from jaxformer.scaling.ladder import StudyConfig
from jaxformer.scaling.law_fit import Settings
from jaxformer.storage.address import place

STAGES = ("plan", "run", "report")


def main() -> int:
    """Exit code: 0 done, 75 interrupted (start again to continue)."""
    arguments = parser(__doc__, "compare")
    arguments.add_argument("--stage", choices=STAGES, help="one stage alone (default: all)")
    arguments.add_argument(
        "--only", metavar="NAME,...", help="ladders to plan and train: variants, baseline (default: all)"
    )
    arguments.add_argument("--at-once", type=integer(1), metavar="M", help="runs to train together (default: by trial)")
    arguments.add_argument(
        "--bootstrap", type=integer(100, 100_000), default=1000, metavar="R", help="replicates (default 1000)"
    )
    add_trial(arguments)
    add_verify(arguments)
    parsed = parse_config(arguments, cls=StudyConfig, beside=("variants",))
    options, stage, by_trial = parsed.options, parsed.options.stage, asks_trial(parsed.options)
    from jaxformer.runs import comparing

    if options.only is not None and stage == "report":
        raise ConfigError("--only: names ladders to train, and --stage=report compares all; give one of them")
    every = comparing.entrants(parsed)
    found = comparing.chosen(every, options.only)
    if options.only is not None and stage is None:
        stage = "run"
    if stage != "plan" and stage != "run":
        plotting.matplotlib()
    if stage != "report":
        from jaxformer.programs.scaling import check_memory
        from jaxformer.runs import scaling_study
        from jaxformer.runs.store_lock import lock_of
        from jaxformer.training.sweep.scheduler import Interrupted

        a_device_for_each_core()
        for entrant in found:
            scaling_study.check_from_scratch(entrant.config, "a comparison")
        settings = Settings(holdout=0)
        opened = comparing.plan(
            found, settings, options.verify, baseline=every[0], by_trial=by_trial, at_once=options.at_once
        )
        for study in opened:
            check_memory(study.config)
        if stage == "plan":
            return 0
        for entrant, study in zip(found, opened, strict=True):
            print(f"== {entrant.name}")
            with lock_of(study.config.workdir):
                scaling_study.start(study, entrant.overrides, parsed.source)
                try:
                    scaling_study.run(study, settings, at_once=options.at_once)
                except Interrupted as signal:
                    print(f"stopped by {signal}; the same command continues")
                    return 75
    if stage != "run":
        conclude(parsed)
    return 0


def conclude(parsed: Parsed) -> None:
    """Compares what has finished, writes comparison.json and comparison.html; prints their paths and three lines for
    each variant."""
    from jaxformer.runs import comparing, manifest
    from jaxformer.scaling import multiplier_page, report
    from jaxformer.scaling.compare import compare

    found, workdir = comparing.entrants(parsed), place(parsed.config.workdir)
    records = {entrant.name: comparing.finished(entrant) for entrant in found}
    if missing := [name for name, mine in records.items() if not mine]:
        raise ConfigError(f"workdir {workdir}: no run of {', '.join(missing)} has finished; --stage=run trains them")
    baseline = records[comparing.BASELINE]
    worth = {}
    for entrant in found:
        if entrant.name == comparing.BASELINE:
            continue
        try:
            worth[entrant.name] = compare(baseline, records[entrant.name], replicates=parsed.options.bootstrap)
        except ConfigError as error:
            told = re.sub("^variant: ", f"config.variants.{entrant.name}: ", str(error))
            raise ConfigError(told) from None
    changes = {entrant.name: comparing.told(entrant) for entrant in found}
    command = f"jaxformer compare --config={shlex.quote(parsed.source)}"
    command += "".join(f" --config.{name}={shlex.quote(text)}" for name, text in parsed.given.items())
    tree, page = (workdir / name for name in comparing.WRITTEN)
    print(report.write_json(tree, multiplier_page.as_json(worth)))
    text = multiplier_page.page(
        f"Compute multipliers: {workdir.name}", worth, changes, multiplier_page.tuned_rates(records),
        commands=[command], manifest=manifest.read(found[0].config.workdir),
    )  # fmt: skip
    print(report.write(page, text))
    for name, each in worth.items():
        print("\n".join(multiplier_page.lines(name, changes[name], each)))

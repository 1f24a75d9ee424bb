"""Run a scaling study: train a ladder of small models, fit scaling laws with intervals, write a report.

    jaxformer scaling scaling_tiny
    jaxformer scaling scaling_gpt --config.data.files='books/*.txt.xz' --stage=plan
    jaxformer scaling scaling_tiny --stage=run --only=32,64

Stages: plan (prints which runs are needed and how long they take), run (trains; the same command continues a stopped or
killed study), fit (writes fit.json), report (fits, then writes report.html and figures/). Without --stage: all of them.
Fit and report need only the directory's manifest.json and records.jsonl. With --only, processes and machines share a
study's sizes, each in a directory of its own; their runs/*.jsonl together in one directory are the study.
"""

import re
import shlex

from jaxformer.config import Config, MeshConfig
from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import Parsed, add_verify, finite, integer, parse_config, parser
from jaxformer.runs.trial_flag import add_trial, asks_trial
from jaxformer.runtime.program import a_device_for_each_core
from jaxformer.scaling import bootstrap, findings, plotting, results
from jaxformer.scaling.ladder import LadderConfig, StudyConfig, size_model
from jaxformer.scaling.law_fit import Settings
from jaxformer.storage.address import place

STAGES = ("plan", "run", "fit", "report")


def main() -> int:
    """Exit code: 0 done, 75 interrupted (start again to continue)."""
    arguments = parser(__doc__, "scaling")
    arguments.add_argument("--stage", choices=STAGES, help="one stage alone (default: all)")
    arguments.add_argument("--at-once", type=integer(1), metavar="M", help="runs to train together (default: by trial)")
    arguments.add_argument(
        "--bootstrap", type=integer(100, 100_000), default=1000, metavar="R", help="replicates (default 1000)"
    )
    arguments.add_argument(
        "--holdout", type=integer(0), default=1, metavar="K", help="largest budgets to predict (default 1)"
    )
    arguments.add_argument("--delta", type=finite, default=1e-3, help="of Huber's function (default 0.001)")
    arguments.add_argument("--only", metavar="WIDTH,...", help="sizes to plan and train (default: all)")
    add_trial(arguments)
    add_verify(arguments)
    parsed = parse_config(arguments, cls=StudyConfig)
    options, stage, by_trial = parsed.options, parsed.options.stage, asks_trial(parsed.options)
    assert isinstance(parsed.config, StudyConfig)
    only = None if options.only is None else widths_of(options.only, parsed.config.ladder)
    if only is not None and stage not in ("plan", "run"):
        raise ConfigError(f"--only: with --stage={stage or 'all'}, which needs all sizes; accepted: plan, run")
    # Packages for the last stages are checked before the first stage, which takes hours.
    if stage in (None, "fit", "report"):
        bootstrap.special()
    if stage in (None, "report"):
        plotting.matplotlib()
    settings = Settings.of_flags(delta=options.delta, replicates=options.bootstrap, holdout=options.holdout)
    if stage in (None, "plan", "run"):
        from jaxformer.runs import scaling_study
        from jaxformer.runs.store_lock import lock_of
        from jaxformer.training.sweep.scheduler import Interrupted

        a_device_for_each_core()
        scaling_study.check_from_scratch(parsed.config, "a study of scaling")
        opened = scaling_study.open_study(parsed.config, only=only, verify=options.verify)
        check_memory(opened.config)
        if stage == "plan":
            scaling_study.print_plan(opened, settings, by_trial=by_trial, at_once=options.at_once)
            return 0
        with lock_of(opened.config.workdir):
            scaling_study.start(opened, parsed.overrides, parsed.source)
            try:
                scaling_study.run(opened, settings, at_once=options.at_once)
            except Interrupted as signal:
                print(f"stopped by {signal}; the same command continues")
                return 75
    if stage != "run":
        conclude(parsed, stage, settings)
    return 0


def widths_of(text: str, ladder: LadderConfig) -> list[int]:
    """The widths in "64,128".

    Raises:
      ConfigError: another form, a width that the ladder has not, or one that takes its learning rate from another that
        is not among them.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise ConfigError(f"--only: {shown(text)}; accepted: widths of the ladder with commas between, as 64,128")
    found = [int(width) for width in text.split(",")]
    if unknown := [width for width in found if width not in ladder.widths]:
        widths = ", ".join(map(str, ladder.widths))
        raise ConfigError(f"--only: no size of width {unknown[0]}; accepted: {widths}")
    last = ladder.widths[: ladder.searched_sizes][-1]
    if (takers := [width for width in found if width > last]) and last not in found:
        raise ConfigError(
            f"--only: width {takers[0]} takes its learning rate from width {last} (ladder.searched_sizes "
            f"{ladder.searched_sizes}); accepted: {last} beside it"
        )
    return found


def check_memory(config: StudyConfig) -> None:
    """Raises ConfigError if training one of the sizes does not fit on one device."""
    import jax

    from jaxformer.modules import make_model
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.runs import memory_check

    mesh = make_mesh(MeshConfig(1), jax.local_devices()[:1])
    for width in config.ladder.widths:
        model = size_model(config.model, width, config.ladder)
        specs = make_model(model, config.loss, config.execution, config.optimizer.freeze, config.tune).specs
        memory_check.check_training(config, specs, mesh)


def conclude(parsed: Parsed, stage: str | None, settings: Settings) -> None:
    """Fits and, unless the stage is fit, writes the report; prints the paths and the findings."""
    from jaxformer import records
    from jaxformer.data import languages
    from jaxformer.runs import manifest

    workdir = place(parsed.config.workdir)
    manifest.check_own_files(workdir)
    about, trained = manifest.read(workdir), manifest.read_config(workdir, StudyConfig)
    path = workdir / "records.jsonl"
    if not path.exists():
        raise ConfigError(f"workdir {workdir}: no run has finished (no records.jsonl); --stage=run trains them")
    found = records.load(path, more=records.STUDY)
    records.check_run(path, found, manifest.fingerprints(workdir)[0])
    fits = results.fit(found, settings, str(path))
    print(results.write_fits(workdir, fits))
    floor = languages.floor(trained.data, trained.model.context_length, trained.source_length)
    notes = [] if floor is None else [results.against_floor(fits, floor.nats, floor.standard_error)]
    if stage in (None, "report"):
        command = f"jaxformer scaling --config={shlex.quote(str(about.get('config_file')))}"
        given = "".join(f" --config.{name}={shlex.quote(text)}" for name, text in parsed.given.items())
        given += f" --stage={stage}" if stage else ""
        for flag, field in (("bootstrap", "replicates"), ("delta", "delta"), ("holdout", "holdout")):
            if getattr(settings, field) != getattr(Settings, field):
                given += f" --{flag}={getattr(settings, field)}"
        page = results.write_report(
            workdir, title(trained), found, fits, notes=notes, commands=[command + given], manifest=about
        )
        print(page)
    print("\n".join([*findings.lines(findings.table(fits)), *notes]))


def title(config: Config) -> str:
    """Title of the report."""
    model, data = config.model, config.data
    return f"Scaling of {model.family.upper()} on {data.source} ({data.objective.replace('_', ' ')})"

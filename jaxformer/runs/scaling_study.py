"""A scaling study: ladder -> sweep -> fits -> report.

A study's directory holds `manifest.json`, `runs/` (one file per finished run), and, made from those, `records.jsonl`
(all of them), `fit.json`, `figures/` and `report.html`. The last four and the manifest are all that fits and report
need, and what is worth keeping.
"""

import collections
import functools
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import records
from jaxformer.data import languages
from jaxformer.data.mixture import open_text
from jaxformer.errors import ConfigError
from jaxformer.models.attention_support import check_available
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.modules import make_model
from jaxformer.runs import manifest, texts
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runtime import cluster
from jaxformer.runtime.program import keep_compiled_programs
from jaxformer.scaling import fit, isoflop, ladder, laws, verdict
from jaxformer.scaling.ladder import LadderConfig, StudyConfig
from jaxformer.storage.address import place
from jaxformer.training.progress import duration
from jaxformer.training.sweep import run_files, scheduler, trial
from jaxformer.training.sweep.trunks import Member, gflop_per_step, grouped, shapes, trunks

RECORDS = "records.jsonl"
# The ladder's fields that may change when a study resumes: those that a run's name shows. The fields that define the
# model of a width are not among them, or finished runs would be taken for those of other models.
MAY_CHANGE = tuple(f"ladder.{each.name}" for each in fields(LadderConfig) if each.name not in LadderConfig.SHAPE)
# Training speed as a share of a large matrix product's; used only to estimate the time without a trial.
USUAL_SHARE, COMPILE_SECONDS = 0.45, 12.0


class Study(NamedTuple):
    """A study with its text opened.

    Attributes:
      config: vocabulary size filled in.
      corpus: the text.
      available: training tokens of one epoch.
      only: widths whose runs are wanted here; None: all.
    """

    config: StudyConfig
    corpus: texts.Text
    available: int
    only: tuple[int, ...] | None = None

    def members(self, runs: Iterable[ladder.LadderRun]) -> list[Member]:
        """Those of some runs that are wanted here, as members of a sweep."""
        return [_member(self, run) for run in runs if self.only is None or run.width in self.only]


def check_from_scratch(config: StudyConfig, what: str) -> None:
    """Raises ConfigError, which says `what` it is: runs that begin with the weights of another, or have a teacher."""
    for name, value in (("distill.teacher", config.distill.teacher), ("init_from", config.init_from)):
        if value is not None:
            raise ConfigError(f"config.{name}: {value}; accepted in {what}: none")


def open_study(config: StudyConfig, *, only: Sequence[int] | None = None, verify: bool = False) -> Study:
    """Opens the text and checks that it is long enough for the ladder; `only` as in `Study`, `verify` as in
    `open_corpus`.

    Raises:
      ConfigError: the text, ladder or working directory is not usable; nothing has been compiled or written.
    """
    cluster.refuse_several(config.distributed, "study")
    if config.optimizer.schedule != "wsd" and len(config.ladder.budgets) + len(config.ladder.tokens) > 1:
        print(f"note: optimizer.schedule={config.optimizer.schedule} trains every run from step 0; wsd shares trunks")
    check_available(config.execution)
    manifest.check_workdir(config, free=MAY_CHANGE)
    texts.check(config)
    corpus = open_text(config.data, verify=verify)
    config = fit_vocabulary(config, corpus.tokenizer)
    epoch = texts.batches_of(config, corpus).tokens_per_epoch
    ladder.planned(config, {}, epoch)
    return Study(config, corpus, epoch, None if only is None else tuple(only))


def members(study: Study, finals: Mapping[str, Mapping[str, Any]]) -> list[Member]:
    """The runs wanted, given the finished ones."""
    losses = {name: float(record["loss"]) for name, record in finals.items()}
    return study.members(ladder.runs(study.config, losses, study.available))


def print_plan(
    study: Study,
    settings: fit.Settings,
    log: Callable[[str], None] = print,
    *,
    by_trial: bool = False,
    at_once: int | None = None,
) -> float:
    """Prints what would be run, how long that takes on this machine, and what no fit with these settings could say of
    it; returns the remaining GFLOP.

    `by_trial`: the time is learned from a few updates of each size, which are compiled for that, `at_once` runs
    together as in `run`.
    """
    config = study.config
    found = _finished(study)
    losses = {name: float(record["loss"]) for name, record in found.items()}
    wanted = study.members(ladder.planned(config, losses, study.available))
    todo = [member for member in wanted if member.name not in found]
    log(
        f"{len(wanted)} runs on {len(trunks(wanted))} trunks, {len(shapes(wanted))} programs to compile; "
        f"{len(found)} finished"
    )
    log(f"{'width':>6} {'layers':>6} {'parameters':>10} {'rates from':>10}  steps (tokens per parameter)")
    grid = ladder.cells(config, study.available)
    for width in config.ladder.widths:
        model = ladder.size_model(config.model, width, config.ladder)
        size = count_parameters(model).total
        cells = ", ".join(f"{c.steps} ({c.tokens / size:.0f})" for c in grid if c.width == width) or "none"
        log(f"{width:>6} {model.num_layers:>6} {size:>10} {ladder.starting_rate(config, width):>10.2g}  {cells}")
    most = max(cell.tokens for cell in grid) / study.available
    if most > 1:
        log(f"warning: the longest run reads its text {most:.2f} times; scaling laws assume that text is read once")
    for line in shortages(grid, [member.fields for member in wanted], settings):
        log(f"warning: {line}")
    for line in study.corpus.notes() + texts.batches_of(config, study.corpus).notes():
        log(f"note: {line}")
    gflop = sum(trunk.steps * gflop_per_step(trunk.members[0]) for trunk in trunks(todo))
    log(f"to do: {gflop / 1e3:.4g} TFLOP, about {_time(study, todo, gflop, by_trial, at_once)}")
    return gflop


def _time(study: Study, todo: list[Member], gflop: float, by_trial: bool, at_once: int | None) -> str:
    """How long the runs take here, and how that is known."""
    config = study.config
    if not by_trial:
        seconds = 1e9 * gflop / (USUAL_SHARE * product_speed(config)) + COMPILE_SECONDS * len(shapes(todo))
        return f"{duration(seconds)} here, from the speed of a large matrix product; --trial times each size"
    if config.compilation_cache:
        keep_compiled_programs()
    found = trial.estimate(todo, _sources(study), at_once=at_once)
    compiling = 0.0 if config.compilation_cache else found.compiling
    parts = f"updates {duration(found.updates)}, evaluations {duration(found.evaluations)}"
    also = "which are kept" if config.compilation_cache else "which the runs need too"
    return (
        f"{duration(compiling + found.updates + found.evaluations)} here, from a few updates of each size: {parts}; "
        f"making the programs took {duration(found.compiling)}, {also}"
    )


def shortages(grid: list[ladder.Cell], runs: list[Mapping[str, Any]], settings: fit.Settings) -> list[str]:
    """What the fits will lack, and what to add to the ladder; `runs` have "role" and "flops"."""
    out = []
    c = np.array([run["flops"] for run in runs if run["role"] == "ladder"])
    sizes = collections.Counter(cell.budget for cell in grid if cell.budget is not None)
    wide = sum(count >= isoflop.SIZES for count in sizes.values())
    if len(c) < laws.SUM.rows_needed:
        out.append(
            f"{len(c)} run{'s' * (len(c) != 1)} for the fits, which need {laws.SUM.rows_needed}: nothing will be fitted"
        )
    elif few := verdict.too_few(len(c)):
        out.append(few)
    if sizes and wide < isoflop.BUDGETS:
        out.append(
            f"iso-FLOP minima need {isoflop.SIZES} sizes at each of {isoflop.BUDGETS} budgets; {wide} of "
            f"{len(sizes)} will have them; add to ladder.widths or ladder.budgets, or widen the tokens per parameter"
        )
    if (
        settings.holdout
        and (left := sum(map(len, fit.budgets(c, settings)[: -settings.holdout]))) < laws.SUM.rows_needed
    ):
        out.append(
            f"the largest budget will not be predicted: {left} run{'s' * (left != 1)} below it, and "
            f"{laws.SUM.rows_needed} are needed; add to ladder.budgets, ladder.widths or ladder.seeds"
        )
    return out


def start(study: Study, overrides: list[str], source: str, log: Callable[[str], None] = print) -> None:
    """Writes the manifest of a new study; for a resumed one, checks that its text is the same. The caller has locked
    the directory.

    Runs whose files are missing or damaged get them back from `records.jsonl`.
    """
    about = manifest.describe(study.config, overrides, source, study.corpus.fingerprint)
    manifest.write_or_check(about, study.config, free=MAY_CHANGE)
    workdir = place(study.config.workdir)
    (workdir / "runs").mkdir(exist_ok=True)
    run_files.set_aside_damaged(workdir, log, _fingerprint(workdir))
    if note := records.set_aside(workdir / RECORDS, records.STUDY):
        log(f"note: {note}")
    for name, mine in _kept(workdir).items():
        path = run_files.run_path(workdir, name)
        if not path.exists():
            records.write(path, mine)


def run(
    study: Study, settings: fit.Settings, *, at_once: int | None = None, log: Callable[[str], None] = print
) -> dict[str, dict[str, Any]]:
    """Trains the missing runs and gathers all records. Call `start` first.

    Raises:
      scheduler.Interrupted: a signal; start again to resume.
      ConfigError: a run's loss is below the entropy of its language, which only a data leak can cause.
    """
    config, workdir = study.config, place(study.config.workdir)
    gflop = print_plan(study, settings, log)
    if config.compilation_cache:
        keep_compiled_programs()
    try:
        found = scheduler.run(
            functools.partial(members, study), workdir, _sources(study), at_once=at_once, expected_gflop=gflop,
            fingerprint=_fingerprint(workdir), log=log,
        )  # fmt: skip
    finally:
        _gather(study)
    check_floor(study.config, found)
    return found


def _sources(study: Study) -> scheduler.Sources:
    """The models and the data of the study's runs."""
    return scheduler.Sources(
        model=lambda c: make_model(c.model, c.loss, c.execution, c.optimizer.freeze, c.tune),
        batches=functools.lru_cache(64)(lambda c: texts.batches_of(c, study.corpus)),
        held_out=functools.lru_cache(1)(lambda c: texts.held_out_of(c, study.corpus)),
    )


def check_floor(config: StudyConfig, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError if a run's loss is below the entropy of its generated language."""
    floor = languages.floor(config.data, config.model.context_length, config.source_length)
    for name, record in found.items():
        if floor and (line := languages.below_floor(floor, record["loss"], record["loss_stderr"])) is not None:
            raise ConfigError(f"{name}: {line}")


def product_speed(config: StudyConfig) -> float:
    """FLOP/s of all devices on matrix products of the study's largest width, measured now."""
    width = max(config.ladder.widths)
    tokens = config.train.global_batch_size * config.model.context_length
    x, w = jnp.ones((tokens, width), config.model.dtype), jnp.ones((width, 4 * width), config.model.dtype)
    product = jax.jit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
    jax.block_until_ready(product(x, w))  # compiles
    seconds = min(timeit.repeat(lambda: jax.block_until_ready(product(x, w)), number=1))
    return len(jax.devices()) * 2 * tokens * width * 4 * width / seconds


def _member(study: Study, run: ladder.LadderRun) -> Member:
    config = ladder.run_config(study.config, run)
    tokens = run.steps * config.train.global_batch_size * config.model.context_length
    counts = count_parameters(config.model)
    fields = {
        "role": run.role,
        "width": run.width,
        "num_layers": config.model.num_layers,
        "params": counts.total,
        "params_non_embedding": counts.non_embedding,
        **({} if counts.active == counts.total else {"params_active": counts.active}),
        "flops": training_flops(config.model, config.data) * tokens,
        "epochs": tokens / study.available,
        **texts.skipped(config, study.corpus),
    }
    return Member(run.name, config, fields)


def _fingerprint(workdir: Path) -> str:
    """The study's fingerprint; "" before it has started."""
    return manifest.fingerprints(workdir)[0] if (workdir / manifest.FILE_NAME).exists() else ""


def _kept(workdir: Path) -> dict[str, list[dict[str, Any]]]:
    """Name -> records of the runs in `records.jsonl` that have a final one."""
    path = workdir / RECORDS
    found = records.load(path, more=records.STUDY) if path.exists() else []
    records.check_run(path, found, _fingerprint(workdir))
    runs = grouped(found, lambda record: record["run"])
    return {name: mine for name, mine in runs.items() if mine[-1]["kind"] == "final"}


def _finished(study: Study) -> dict[str, dict[str, Any]]:
    """Final records of the finished runs, from their files or from `records.jsonl`; writes nothing."""
    workdir = place(study.config.workdir)
    kept = {name: mine[-1] for name, mine in _kept(workdir).items()}
    return kept | run_files.settled(lambda found: members(study, kept | dict(found)), workdir, _fingerprint(workdir))[1]


def _gather(study: Study) -> None:
    """Writes the records of all finished runs into one file, with each run's current role."""
    workdir = place(study.config.workdir)
    wanted, found = run_files.settled(functools.partial(members, study), workdir, _fingerprint(workdir))
    lines: list[dict[str, Any]] = []
    for member in wanted:
        if member.name in found:
            mine = records.load(run_files.run_path(workdir, member.name))
            lines += [*mine[:-1], {**mine[-1], "role": member.fields["role"]}]
    if lines:
        records.write(workdir / RECORDS, lines)

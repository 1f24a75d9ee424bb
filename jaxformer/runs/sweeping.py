"""A sweep: normal runs one after the other in this process, which share compiled programs where they are the same."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxformer.errors import CheckpointError, ConfigError, ProgramError, RecordError, TrainingDiverged
from jaxformer.runs import sweep_folder
from jaxformer.runs.grid import GridRun
from jaxformer.runs.pretrain import pretrain
from jaxformer.scaling.comparison import RunEnd
from jaxformer.training.progress import duration


def tokens_of(run: GridRun) -> int:
    """Tokens that a run trains on."""
    config = run.parsed.config
    return config.train.steps * config.train.global_batch_size * config.model.context_length


def is_done(run: GridRun, end: RunEnd) -> bool:
    """Whether a run needs no more training: it has finished all of its steps, stopped early, or diverged."""
    return end.status == "diverged" or (end.status == "finished" and _all_steps(run, end))


def _all_steps(run: GridRun, end: RunEnd) -> bool:
    config = run.parsed.config.train
    return end.step >= config.steps or config.early_stop_evals is not None


def plan(runs: Sequence[GridRun], folder: Path, log: Callable[[str], None] = print) -> list[GridRun]:
    """Prints what is to be trained, and how long that takes as far as finished runs tell; returns the runs to do."""
    known = {}
    if (folder / sweep_folder.FILE_NAME).exists():
        known = {end.name: end for end in sweep_folder.ends(folder)}
    todo = [run for run in runs if run.name not in known or not is_done(run, known[run.name])]
    left, whole = sum(map(tokens_of, todo)), sum(map(tokens_of, runs))
    log(f"{len(runs)} run{'s' * (len(runs) != 1)} in {folder}, {len(todo)} to do: {left:,} of {whole:,} tokens")
    for run in runs:
        state = known[run.name].status if run.name in known else "not started"
        log(f"  {run.name}: {tokens_of(run):,} tokens, {state}")
    log(f"time left: {estimate(todo, list(known.values()))}")
    return todo


def estimate(todo: Sequence[GridRun], ends: Sequence[RunEnd]) -> str:
    """How long the runs to do will take, from the time that finished ones took for each token."""
    finished = [end for end in ends if end.status == "finished" and end.seconds]
    if not todo:
        return "none"
    if not finished:
        return "known after the first run"
    speed = sum(end.tokens for end in finished) / sum(end.seconds for end in finished)
    return f"about {duration(sum(map(tokens_of, todo)) / speed)}, from {len(finished)} finished"


def run(runs: Sequence[GridRun], todo: Sequence[GridRun], folder: Path, log: Callable[[str], None] = print) -> bool:
    """Trains the runs `todo` of the sweep `runs`; those that diverge or fail are noted, and the next begins.

    Returns:
      False: a signal ended it; the same command goes on.
    """
    failed = sweep_folder.failures(folder)
    for number, each in enumerate(todo, 1):
        log(f"\n== run {number} of {len(todo)}: {each.name}")
        failed.pop(each.name, None)
        try:
            if pretrain(each.parsed).status == "interrupted":
                return False
        except TrainingDiverged as error:
            log(f"diverged: {error}")
        except Exception as error:  # of memory or a file system, say: the others may still work
            known = isinstance(error, ConfigError | CheckpointError | RecordError | ProgramError)
            failed[each.name] = " ".join(f"{'' if known else type(error).__name__ + ': '}{error}".split())[:500]
            log(f"failed: {failed[each.name]}")
        sweep_folder.write(folder, runs, failed)
        ends = sweep_folder.ends(folder)
        log(f"{number} of {len(todo)} done; time left: {estimate(todo[number:], ends)}")
    return True

"""Tasks of lm-eval on a run: found, asked with examples before each question, and written beside the run."""

import contextlib
import io
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import Config
from jaxformer.config.fields import did_you_mean
from jaxformer.errors import ConfigError, ProgramError
from jaxformer.runs import manifest
from jaxformer.runs.continuations import language_model
from jaxformer.runs.harness import HarnessModel, check_installed
from jaxformer.storage import files
from jaxformer.storage.address import place

FOLDER = "lm_eval"  # in the run
SHOWN = 5  # names in an error


class FewShot(NamedTuple):
    """Which tasks, and how they are asked.

    Attributes:
      tasks: names of tasks, groups or tags, or patterns of them (`arc_*`).
      num_fewshot: examples before each question; None: as the task says.
      include_path: folder with tasks as YAML files; None: those that come with lm-eval.
      limit: only the first so many examples of each task; None: all.
      gen_kwargs: over the generation_kwargs of the tasks.
      seed: of the choice of examples, and of sampling.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    include_path: str | None = None
    limit: int | None = None
    gen_kwargs: dict[str, Any] | None = None
    seed: int = 1234


def run_tasks(
    workdir: str | Path, asked: FewShot, *, mesh: str | None = None, batch_size: int = 8, log: Callable = print
) -> dict[str, Any]:
    """Evaluates the newest valid checkpoint of a run on tasks; writes the results to lm_eval/ in the run.

    Args:
      workdir: of a run whose model predicts the next token.
      asked: the tasks.
      mesh: where, as `pretrain.mesh_of` reads it.
      batch_size: as of `HarnessModel`.
      log: takes the table, and where the results are.

    Returns:
      The results, as lm-eval has them ("results", "versions", "n-shot", ...), and "run".

    Raises:
      ConfigError: there is no run, or none that predicts tokens; the extra is missing; a task is unknown or cannot be
        loaded. CheckpointError: the run has no valid checkpoint.
    """
    config: Config = manifest.read_config(workdir)
    language_model(config.model, f"--workdir: {workdir}")
    check_installed()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every setting that was asked for
    loaded = load_tasks(asked)
    model = HarnessModel.of_run(workdir, mesh=mesh, batch_size=batch_size, seed=asked.seed)
    found = evaluate_tasks(model, loaded, asked)
    about = {"workdir": str(workdir), "step": model.step, "fingerprint": manifest.read(workdir)["fingerprint"]}
    found["run"] = {**about, **asked._asdict(), "mesh": mesh, "batch_size": batch_size}
    log(table(found))
    log(f"written to {_write(workdir, model.step, found)}")
    return found


def load_tasks(asked: FewShot) -> dict[str, Any]:
    """The tasks with their data, as lm-eval has them. Raises ConfigError: one is unknown or cannot be loaded."""
    from lm_eval.tasks import TaskManager

    if asked.include_path is not None and not Path(asked.include_path).is_dir():
        raise ConfigError(
            f"--include-path: {asked.include_path} is no directory; accepted: one with tasks as YAML files"
        )
    manager: Any = None
    for defaults in (False, True):  # reading the 14,000 tasks that come with it takes a while
        manager = TaskManager(include_path=asked.include_path, include_defaults=defaults)
        names = {name: manager.match_tasks([name]) for name in asked.tasks}
        unknown = [name for name, matches in names.items() if not matches]
        if not unknown:
            break
    for name in unknown:
        own = TaskManager(include_path=asked.include_path, include_defaults=False).all_tasks
        some = f"; accepted: {', '.join(own[:SHOWN])}{', ...' * (len(own) > SHOWN)}" if own else ""
        hint = did_you_mean(name, manager.all_tasks) or some or "; accepted: `lm-eval ls tasks` lists them"
        raise ConfigError(f"--tasks: {name!r} is no task, group or tag of lm-eval{hint}")
    wanted = list(dict.fromkeys(name for matches in names.values() for name in matches))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # of the library datasets
            loaded = manager.load(wanted)
        for task in loaded["tasks"].values():
            _set(task, asked)
    except Exception as error:  # of YAML, of templates, of files, of the network
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"--tasks: {', '.join(wanted)} cannot be loaded ({type(error).__name__}: {why})") from error
    return loaded


def _set(task: Any, asked: FewShot) -> None:
    """Gives a task its number of examples, unless it says that it has none."""
    own = task.get_config("num_fewshot")
    if own != 0:
        task.set_config(key="num_fewshot", value=(own or 0) if asked.num_fewshot is None else asked.num_fewshot)
    task.set_fewshot_seed(seed=asked.seed)
    if asked.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=asked.gen_kwargs, update=True)


def evaluate_tasks(model: Any, loaded: dict[str, Any], asked: FewShot) -> dict[str, Any]:
    """The results of any `LM` on loaded tasks. Raises ProgramError: an example of a task cannot be made or judged."""
    from lm_eval import evaluator

    try:
        found = evaluator.evaluate(lm=model, task_dict=loaded, limit=asked.limit, log_samples=False)
    except (ConfigError, MemoryError):
        raise
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split())[:200]
        raise ProgramError(f"lm-eval: {type(error).__name__}: {why}") from error
    return dict(found)


def table(found: dict[str, Any]) -> str:
    """lm-eval's table of results, and that of groups where there are some."""
    from lm_eval.utils import make_table

    return "\n".join(make_table(found, name) for name in ("results", "groups") if found.get(name)).rstrip("\n")


def as_text(found: dict[str, Any]) -> str:
    """The results as JSON; a number that is not finite is a text, as in records, and so is what JSON has not."""
    return json.dumps(_plain(found), indent=2, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _write(workdir: str | Path, step: int, found: dict[str, Any]) -> Path:
    """Writes results beside those that are there. Raises ConfigError: it cannot."""
    folder = place(workdir) / FOLDER
    path = folder / f"{step}_{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime())}.json"
    try:
        files.open_folder(folder)
        files.write_atomically(path, as_text(found) + "\n")
    except OSError as error:
        raise ConfigError(f"--workdir: {path} cannot be written ({error.strerror})") from None
    return path

"""Evaluates a run: on what was held out of its text, or on other text."""

import functools
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.data.mixture import open_text
from jaxformer.data.progress_bars import say
from jaxformer.errors import ConfigError
from jaxformer.models.attention_support import fallback_to_auto
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import check_batch, check_context, check_experts, check_stages, host_rows
from jaxformer.runs import manifest, messages, other_text, tasks, texts
from jaxformer.runs.other_text import OtherText
from jaxformer.runs.pretrain import laid_out, mesh_of, params_of, tokenizer_of
from jaxformer.runtime import cluster, coordination
from jaxformer.runtime.program import keep_compiled_programs
from jaxformer.storage.address import place
from jaxformer.training.by_position import eval_by_position, taken_out
from jaxformer.training.eval_step import compile_eval, eval_step
from jaxformer.training.evaluate import evaluate as measure
from jaxformer.training.evaluate import evaluation_of
from jaxformer.training.reporter import describe
from jaxformer.training.step import device_put_batch


def evaluate(
    workdir: str | Path,
    *,
    other: OtherText | None = None,
    mesh: str | None = None,
    cache_dir: str | None = None,
    verify: bool = False,
    by_position: bool = False,
    log=print,
) -> dict[str, Any]:
    """Evaluates the newest valid checkpoint of a run on its whole held-out split, or on all of some other text.

    Its held-out split needs the run's text, under the names that it had: of relative names, seen from the current
    folder. Other text needs none of it.

    Args:
      workdir: of the run.
      other: the other text; None: what was held out.
      mesh: where, as `mesh_of` reads it; no device then holds more than its part of the parameters.
      cache_dir: where corpora are kept; None: this user's cache folder, whatever the run's own was.
      verify: hash the text again and compare all that is kept of it, see `open_corpus`.
      by_position: the loss by the place of a token in its document as well.
      log: takes the lines.

    Returns:
      Step, and `metrics.evaluation`; of a mixture those of each of its "sources"; of other text "text", what it is;
      with `by_position` "by_position", as `training.by_position.taken_out` says.

    Raises:
      ConfigError: there is no run, its text has changed since, or the other text cannot be read or is too short;
        CheckpointError: no valid checkpoint.
    """
    config: Config = manifest.read_config(workdir)
    config = replace(config, execution=replace(config.execution, pipeline_repeats=1))  # its schedule, not its numbers
    if mesh is not None:
        cluster.initialize(config.distributed)
    if config.compilation_cache:
        keep_compiled_programs()
    devices = mesh_of(workdir, mesh)
    check_stages(config, devices)
    check_batch(config.train.global_batch_size, 1, devices)
    check_context(config.model, devices)
    check_experts(config.model, devices)
    if note := manifest.changed_files(workdir, config):
        say(note)
    log = log if jax.process_index() == 0 else lambda _: None
    if other is None:
        text = _own_text(workdir, config, cache_dir, verify)
        return _evaluated(workdir, config, text, "held out", devices, log, by_position)
    with ExitStack() as stack:
        opening = other_text.opened(other, config, tokenizer_of(workdir), progress=jax.process_index() == 0)
        seen = coordination.raise_together(lambda: stack.enter_context(opening), "the text")
        coordination.assert_same(seen.facts, "the text")
        found = _evaluated(workdir, seen.config, seen.corpus, seen.words, devices, log, by_position)
        rows = ["the text fits one row, so its loss has no standard error"] if found["rows"] < 2 else []
        for line in seen.notes + rows:
            log(f"note: {line}")
    return {**found, "text": seen.facts}


def _own_text(workdir: str | Path, config: Config, cache_dir: str | None, verify: bool) -> texts.Text:
    """The run's own text. Raises ConfigError: it has changed since."""
    about = manifest.read(workdir)
    if "imported" in about:
        raise ConfigError(f"workdir {workdir}: was imported, and has no text of its own; accepted: --files")
    kept_in = about["config"].get("data", {}).get("cache_dir")
    if kept_in is not None and cache_dir is None:
        say(f"note: this run kept its corpus in {kept_in!r}; to use a cache there, give --cache-dir")
    file = config.data.tokenizer_file and str(place(workdir) / "tokenizer.json")  # the run's copy of it
    corpus = open_text(replace(config.data, cache_dir=cache_dir, tokenizer_file=file), verify=verify)
    stored = about["data_fingerprint"]
    if corpus.fingerprint != stored:
        raise ConfigError(f"workdir {workdir}: was trained on other text (corpus {stored}, now {corpus.fingerprint})")
    return corpus


def _evaluated(
    workdir: str | Path, config: Config, text: texts.Text, words: str, devices: Mesh, log, by_position: bool
) -> dict[str, Any]:
    held_out = texts.held_out_of(config, text, host_rows(config.train.global_batch_size, devices))
    held_out = tasks.scored(held_out, config, text)
    model = make_model(config.model, config.loss, fallback_to_auto(config.execution), tune=config.tune.of_weights)
    params, step = params_of(workdir, laid_out(model.specs, devices))
    frozen = None if model.frozen is None else params_of(workdir, laid_out(model.frozen, devices), step, "frozen")[0]
    with jax.set_mesh(devices):
        compiled = compile_eval(model, devices, eval_by_position if by_position else eval_step)
        put = functools.partial(device_put_batch, mesh=devices)
        each = {
            name: measure(compiled, put, params, part.batches, frozen, part.score) for name, part in held_out.items()
        }
    places: list[dict[str, float]] = []
    if by_position:
        length = config.model.context_length + (config.model.memory or 0)
        each, places = taken_out(each, {name: part.share for name, part in held_out.items()}, length)
    found = evaluation_of(each, held_out)
    log(f"{workdir} at step {step}, {words}: {describe(found.values)}")
    messages.print_sources(found.sources, log)
    messages.print_floor(config, found.values, log)
    messages.print_codes(text, found.values, log, "" if words != "held out" else "held-out ")
    messages.print_places(places, log)
    more = {"sources": found.sources, "by_position": places}
    return {"step": step, **found.values} | {name: each for name, each in more.items() if each}

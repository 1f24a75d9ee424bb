"""What a run prints: what it is about to do, how it ended, and the commands that come next."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.config import Config, encoder_of, registry
from jaxformer.data import languages, sample_prompt
from jaxformer.models.families import tasks_of
from jaxformer.models.flops import count_parameters
from jaxformer.runs import texts
from jaxformer.runs.command_line import Parsed
from jaxformer.runs.texts import Text, compressed
from jaxformer.training import loop
from jaxformer.training.progress import duration
from jaxformer.training.reporter import describe

# What stands for hidden text in a source, or in a text with masks, by objective.
HOLES = {
    "masked": "[MASK]", "denoising": "[MASK]", "span_corruption": "<extra_id_0>", "mixture": "<extra_id_0>",
}  # fmt: skip


def print_overview(
    config: Config, text: Text, batches: Any, mesh, overrides: list[str], flops_per_token: float, log
) -> None:
    """What is about to be trained, on what, and where."""
    counts = count_parameters(config.model)
    model, steps, rows = config.model, config.train.steps, config.train.global_batch_size
    train, held_out = zip(*((each.train, each.validation) for each in text.sources.values()), strict=True)
    tokens = steps * rows * model.context_length
    layers, source = str(model.num_layers), ""
    if model.encoder is not None:
        layers = f"{encoder_of(model).num_layers} + {layers}"
        source = f", sources of {model.encoder.source_length}"
    kinds = f"{about}, " if (about := model.feed_forward.summary()) else ""
    active = f", {_short(counts.active)} used by a token" if counts.active < counts.total else ""
    log(
        f"{model.family}: {layers} layers, width {model.width}, {model.attention.summary()}, {kinds}"
        f"context {model.context_length}{source}, vocabulary {model.vocab_size}: {_short(counts.total)} parameters"
        f"{active} ({_short(counts.non_embedding)} without embeddings), {model.dtype}"
    )
    log(
        f"data: {_short(sum(each.num_tokens for each in train))} training tokens "
        f"({_short(sum(each.num_bytes for each in train))}B), "
        f"{_short(sum(each.num_tokens for each in held_out))} held out "
        f"({_short(sum(each.num_bytes for each in held_out))}B), corpus {text.fingerprint} of {config.data.source}"
    )
    log(
        f"run: {steps} steps of {rows} x {model.context_length} tokens = {_short(tokens)} "
        f"tokens, {batches.reading(steps)}, "
        f"{_short(flops_per_token * tokens)}FLOP, on "
        f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}, into {config.workdir}"
    )
    for line in texts.notes(config, text) + batches.notes(steps):
        log(f"note: {line}")
    for line in overrides:
        log(f"override: {line}")


def print_result(config: Config, text: Text, result: loop.Result, log, source: str) -> None:
    """How it ended, beside what general compressors make of the same bytes, and what to do next; `source`: the config
    file."""
    assert result.evaluation is not None
    log(f"\n{result.status} at step {result.step} after {result.seconds:.0f} s")
    log(f"held out: {describe(result.evaluation)}")
    print_sources(result.sources, log)
    print_used(result.used, log)
    print_floor(config, result.evaluation, log)
    print_codes(text, result.evaluation, log)
    workdir, tasks = shlex.quote(config.workdir), tasks_of(config.model)
    words = shlex.quote(something_to_try(config, text)) if {"generate", "fill_mask"} & {*tasks} else ""
    brings = "" if registry.is_built_in(config) else f" --config={shlex.quote(source)}"
    if "generate" in tasks and config.model.encoder is not None:
        log(f"sample:  jaxformer generate --workdir={workdir}{brings} --source={words}")
    elif "generate" in tasks:
        log(f"sample:  jaxformer generate --workdir={workdir}{brings} --prompt={words}")
    elif "fill_mask" in tasks:
        log(f"fill in: jaxformer fill-mask --workdir={workdir}{brings} --text={words}")
    elif "predict" in tasks:
        log(f"label:   jaxformer predict --workdir={workdir}{brings} --files=FILE.jsonl")
    log(f"measure: jaxformer evaluate --workdir={workdir}{brings}")


def print_places(places: Sequence[Mapping[str, float]], log) -> None:
    """The loss by place in the document, as `training.by_position.taken_out` gives it; nothing of none."""
    rows = [
        (
            f"{row['first']}" if row["first"] == row["last"] else f"{row['first']} to {row['last']}",
            f"{row['loss']:.4f}" + ("" if math.isnan(row["loss_stderr"]) else f" ± {row['loss_stderr']:.4f}"),
            f"{row['weight']:.0f}",
        )
        for row in places
    ]
    for place, loss, tokens in [("place in the document", "nats per token", "tokens"), *rows] if rows else []:
        log(f"  {place:>21}  {loss:<17}  {tokens:>10}")


def print_used(used: Mapping[str, float], log) -> None:
    """Where the time of all starts of a run went, and the memory it took; nothing where that is not known."""
    if used.get("wall_seconds"):
        parts = {"in steps that count": "productive", "compiling": "compilation", "starting": "startup",
                 "evaluating": "evaluation", "checkpoints": "checkpoint", "waiting for data": "data"}  # fmt: skip
        shares = [f"{used[f'{name}_seconds'] / used['wall_seconds']:.0%} {what}" for what, name in parts.items()]
        restarts, redone = used["restarts"], used["steps_redone"]
        again = f"; {restarts} restart{'s' * (restarts != 1)}, {redone} steps made again" if restarts else ""
        log(f"time:   {duration(used['wall_seconds'])}: {', '.join(shares)}{again}")
    peaks = {"fullest device": "peak_device_bytes", "host": "peak_host_bytes"}
    if found := [f"{used[name] / 2**30:.2f} GiB {where}" for where, name in peaks.items() if name in used]:
        log(f"memory: {', '.join(found)} at most")


def something_to_try(config: Config, text: Text) -> str:
    """A prompt for a GPT, a text with something hidden for a BERT, a source, such as the corpus could hold."""
    generates = "generate" in tasks_of(config.model)
    hole = HOLES.get(config.data.objective, "")
    if config.data.source == "stdlib":
        return f"import {hole}" if hole else "def "
    validation = next(iter(text.sources.values())).validation
    if generates:
        return f"{sample_prompt.prompt(validation, text.tokenizer)} {hole}".rstrip()
    room = max(1, min(12, config.model.context_length - 2))  # what else stands in a row: [CLS], [SEP]
    return sample_prompt.with_mask(validation, text.tokenizer, room)


def print_floor(config: Config, values: dict[str, float], log) -> None:
    """What the best possible model would lose on a generated language, and how far this one is from it."""
    floor = languages.floor(config.data, config.model.context_length, config.source_length)
    if floor is None:
        return
    error = f" ± {floor.standard_error:.4f}" if floor.standard_error else ""
    what = "the best possible model loses" if floor.attained else "no model can lose less than"
    more = values["loss"] - floor.nats
    loses = f"{abs(more):.4f} {'more' if more >= 0 else 'less'}"
    log(f"floor: {what} {floor.nats:.4f}{error} nats per token; this one loses {loses}")


def print_sources(sources: Mapping[str, dict[str, float]], log) -> None:
    """What each source of a mixture lost."""
    for name, values in sources.items():
        log(f"held out of {name}: {describe(values)}")


def print_codes(text: Text, values: dict[str, float], log, which: str = "held-out ") -> None:
    """Bits per byte of the model beside gzip's and xz's on the same bytes; `which` bytes these are."""
    found = compressed(text)
    if "bits_per_byte" not in values or not found:
        return
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in found.items())
    size = sum(each.validation.num_bytes for each in text.sources.values())
    log(f"bits per byte on {size} {which}bytes: this model {values['bits_per_byte']:.3f}, {others}")


def resume_command(parsed: Parsed) -> str:
    """The command line that goes on with a run: the one that started it."""
    overrides = "".join(f" --config.{name}={shlex.quote(text)}" for name, text in parsed.given.items())
    return f"jaxformer pretrain --config={shlex.quote(parsed.source)}{overrides}"


def _short(number: float) -> str:
    """A number in three digits: 1234567 -> "1.23M"."""
    if number < 1000:
        return f"{number:.0f}"
    power = min(int(math.log10(number) // 3), 8)
    return f"{number / 1000**power:.3g}{' kMGTPEZY'[power]}"

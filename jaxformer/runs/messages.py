"""What a run prints: what it is about to do, how it ended, and the commands that come next."""

import math
import shlex

from jaxformer.config import Config, registry
from jaxformer.data import languages, sample_prompt
from jaxformer.data.batches import Batches
from jaxformer.data.corpus import Corpus, Split
from jaxformer.models.families import tasks_of
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.runs.command_line import Parsed
from jaxformer.training import loop
from jaxformer.training.reporter import describe


def print_overview(config: Config, corpus: Corpus, batches: Batches, mesh, overrides: list[str], log) -> None:
    """What is about to be trained, on what, and where."""
    counts = count_parameters(config.model)
    model, train = config.model, config.train
    tokens = train.steps * train.global_batch_size * model.context_length
    log(
        f"{model.family}: {model.num_layers} layers, width {model.width}, {model.attention.summary()}, "
        f"context {model.context_length}, vocabulary {model.vocab_size}: {_short(counts.total)} parameters "
        f"({_short(counts.non_embedding)} without embeddings), {model.dtype}"
    )
    log(
        f"data: {_short(corpus.train.num_tokens)} training tokens ({_short(corpus.train.num_bytes)}B), "
        f"{_short(corpus.validation.num_tokens)} held out ({_short(corpus.validation.num_bytes)}B), "
        f"corpus {corpus.fingerprint} of {config.data.source}"
    )
    log(
        f"run: {train.steps} steps of {train.global_batch_size} x {model.context_length} tokens = {_short(tokens)} "
        f"tokens, {batches.epochs(train.steps):.2f} epochs, "
        f"{_short(training_flops(config.model, config.data) * tokens)}FLOP, on "
        f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}, into {config.workdir}"
    )
    for line in corpus.notes() + batches.notes():
        log(f"note: {line}")
    for line in overrides:
        log(f"override: {line}")


def print_result(config: Config, corpus: Corpus, result: loop.Result, log, source: str) -> None:
    """How it ended, beside what general compressors make of the same bytes, and what to do next; `source`: the config
    file."""
    assert result.evaluation is not None
    log(f"\n{result.status} at step {result.step} after {result.seconds:.0f} s")
    log(f"held out: {describe(result.evaluation)}")
    print_floor(config, result.evaluation, log)
    print_codes(corpus.validation, result.evaluation, log)
    workdir, tasks = shlex.quote(config.workdir), tasks_of(config.model)
    text = shlex.quote(something_to_try(config, corpus)) if tasks else ""
    brings = "" if registry.is_built_in(config) else f" --config={shlex.quote(source)}"
    if "generate" in tasks:
        log(f"sample:  jaxformer generate --workdir={workdir}{brings} --prompt={text}")
    elif "fill_mask" in tasks:
        log(f"fill in: jaxformer fill-mask --workdir={workdir}{brings} --text={text}")
    log(f"measure: jaxformer evaluate --workdir={workdir}{brings}")


def something_to_try(config: Config, corpus: Corpus) -> str:
    """A prompt for a GPT, or a text with [MASK] for a BERT, such as the corpus could hold."""
    if "generate" in tasks_of(config.model):
        return "def " if config.data.source == "stdlib" else sample_prompt.prompt(corpus.validation, corpus.tokenizer)
    if config.data.source == "stdlib":
        return "import [MASK]"
    room = max(1, min(12, config.model.context_length - 2))  # what else stands in a row: [CLS], [SEP]
    return sample_prompt.with_mask(corpus.validation, corpus.tokenizer, room)


def print_floor(config: Config, values: dict[str, float], log) -> None:
    """What the best possible model would lose on a generated language, and how far this one is from it."""
    floor = languages.floor(config.data, config.model.context_length)
    if floor is None:
        return
    error = f" ± {floor.standard_error:.4f}" if floor.standard_error else ""
    what = "the best possible model loses" if floor.attained else "no model loses less than"
    log(f"floor: {what} {floor.nats:.4f}{error} nats per token, this one {values['loss'] - floor.nats:+.4f} from that")


def print_codes(split: Split, values: dict[str, float], log) -> None:
    """Bits per byte of the model beside gzip's and xz's on the same held-out bytes."""
    if "bits_per_byte" not in values or not split.compressed:
        return
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in compressed(split).items())
    log(f"bits per byte on {split.num_bytes} held-out bytes: this model {values['bits_per_byte']:.3f}, {others}")


def compressed(split: Split) -> dict[str, float]:
    """Bits per byte that general compressors need for the split's text."""
    return {name: 8 * size / split.num_bytes for name, size in split.compressed.items()}


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

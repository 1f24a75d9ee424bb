"""What may change when a run goes on, and what is said of it."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.config import Config, diff, to_dict
from jaxformer.config.registry import TRACKERS
from jaxformer.errors import ConfigError
from jaxformer.training.optim import make_schedule

# How often something is told, evaluated or given up.
CADENCE = (
    "train.log_every_steps", "train.eval_every_steps", "train.eval_rows", "train.early_stop_evals",
    "train.max_bad_steps", "train.noise_scale",
)  # fmt: skip
# Filled in from the text, where the config says None.
FILLED_IN = (("model", "vocab_size"), ("model", "head", "outputs"), ("data", "labelled", "labels"))
# Where the text is, and how it is read. That it is the same text, the fingerprint of the corpus says.
TEXT = (
    "data.files", "data.validation_files", "data.tokens", "data.validation_tokens", "data.tfds_dir", "data.hf_dir",
    "data.tokenizer_file", "data.text_field", "data.on_error",
)  # fmt: skip
# What the learning rate of each step follows from; may change if that of the steps already made does not.
SCHEDULE = (
    "train.steps", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.final_fraction",
)  # fmt: skip
MAY_CHANGE = CADENCE + TEXT + SCHEDULE
# Each machine's own affair, not worth a word.
UNSAID = ("workdir", "distributed", "compilation_cache", "data.cache_dir", "data.tokenizer_file")


def check_schedule(old: Config, new: Config, newest: int) -> None:
    """Checks that a run of `newest` steps under `old` is one under `new`: its learning rates are the same.

    Raises:
      ConfigError: they are not, or there are more steps already than `new` has.
    """
    if old.train.steps == new.train.steps and old.optimizer == new.optimizer:
        return
    if newest > new.train.steps:
        raise ConfigError(
            f"config.train.steps: {new.train.steps}; {newest} steps were made; accepted: at least {newest}"
        )
    before, after = (np.asarray(make_schedule(c.optimizer, c.train.steps)(jnp.arange(newest))) for c in (old, new))
    if (before != after).any():
        same = int(np.argmax(before != after))
        changed = diff(_fields(old, SCHEDULE), _fields(new, SCHEDULE))
        raise ConfigError(
            f"config.{'; '.join(changed)}: {newest} steps were made with the old learning rates, and the new ones "
            f"differ from step {same} on; accepted: the old value, or a run of its own that starts from this one: "
            f"--config.init_from={new.workdir} --config.workdir=..."
        )


def said(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines "field: old -> new" about two configs as dicts, without what is not worth a word."""
    return [line for line in diff(old, new) if not line.startswith(UNSAID)]


def fill_in(new: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Gives the fields of a config as a dict that the text decides, where they say None, what a stored one says."""
    for *sections, name in FILLED_IN:
        mine, other = new, stored
        for section in sections:
            mine, other = mine.get(section) or {}, other.get(section) or {}
        if name in mine and mine[name] is None:
            mine[name] = other.get(name)


def notes(old: Config, new: Config) -> list[str]:
    """Lines about what changed since the run began, or since it last changed."""
    lines = said(to_dict(old), to_dict(new))
    execution = [line for line in lines if line.startswith("execution.")]
    every = [line for line in lines if line not in execution]
    lines = []
    if execution:
        of_weights = getattr(new.model.attention, "dropout", 0.0)  # whose elements each kernel draws in its own way
        rates = {"attention": of_weights, "gradient_accumulation_steps": of_weights + new.model.dropout}
        agree = "its results agree to rounding, not bit for bit"
        if any(rate and getattr(old.execution, name) != getattr(new.execution, name) for name, rate in rates.items()):
            agree = "dropout then drops other elements, so its results are those of other random numbers"
        lines.append(f"{'; '.join(execution)} since this run began; {agree}")
    if every:
        lines.append(f"{'; '.join(every)} since this run began")
    if old.train.steps != new.train.steps:
        rate = make_schedule(new.optimizer, new.train.steps)(new.train.steps - 1)
        lines.append(f"it goes on as a run of {new.train.steps} steps, whose learning rate ends at {float(rate):.3g}")
    return [f"note: {line}" for line in lines]


def with_known_trackers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A manifest's config without the trackers that a config file brought, which to read a run does not need."""
    section = config.get("tracking")
    if not isinstance(section, dict) or not isinstance(section.get("trackers"), list):
        return config
    return {**config, "tracking": {**section, "trackers": [n for n in section["trackers"] if n in TRACKERS]}}


def _fields(config: Config, names: tuple[str, ...]) -> dict[str, object]:
    tree = to_dict(config)
    return {name: tree[name.split(".")[0]][name.split(".")[1]] for name in names}

"""What a run checks before it writes or compiles anything: its first batches, and what the kinds of its own return."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxformer.config import Config, Execution
from jaxformer.config.registry import is_built_in
from jaxformer.functional.checked import expect, expect_specs, is_like
from jaxformer.functional.sublayers import costs_of
from jaxformer.models.families import family_of
from jaxformer.specs import abstract_params
from jaxformer.types import Batch


def check_model(config: Config) -> None:
    """Traces the loss of a model that has kinds of a config file's own, its blocks as one, and looks at what it and
    its sublayers return. Nothing compiles.

    Args:
      config: vocabulary size filled in.

    Raises:
      ConfigError: names the kind, what it returned and what is accepted.
    """
    if is_built_in(config):
        return
    cfg, where, family = config.model, f"config.model.family: {config.model.family}", family_of(config.model)
    costs_of(cfg, cfg.context_length, Execution())
    specs, frozen, batch = family.specs(cfg), family.frozen(cfg), family.batch_spec(cfg, config.data, 1)
    expect_specs(where, specs)
    expect(isinstance(batch, Batch), f"{where}: batch_spec returned", batch, "a Batch of jax.ShapeDtypeStruct")

    def trace(params: Any, values: Any, batch: Batch) -> None:
        found = family.loss(params, batch, cfg, config.loss, None, Execution(layers="scan"), values)
        expect(isinstance(found, tuple) and len(found) == 2, f"{where}: loss returned", found, "(objective, metrics)")
        objective, metrics = found
        weights = family.weights(batch, cfg)
        fits = all(isinstance(each, dict) and "loss" in each for each in (objective, weights))
        both = (sorted(objective), sorted(weights)) if fits else (objective, weights)
        expect(fits and both[0] == both[1], f"{where}: loss and weights returned", both, "the same names, loss in both")
        needed = {"loss", "accuracy"} if cfg.head is None else {"loss"}
        fits = isinstance(metrics, dict) and needed <= metrics.keys()
        expect(fits, f"{where}: loss returned the metrics", metrics, "a dict with loss and accuracy")
        for sums, shape in ((objective, ()), (metrics, batch.tokens.shape[:1])):
            for name, pair in sums.items():
                fits = isinstance(pair, tuple) and [np.shape(each) for each in pair] == [shape, shape]
                expect(fits, f"{where}: loss returned {name}", pair, f"(sum, weight), each of shape {shape}")

    jax.eval_shape(trace, abstract_params(specs), None if frozen is None else abstract_params(frozen), batch)


def check_batches(config: Config, rows: int, sources: Mapping[str, Any]) -> None:
    """Looks at the first batch of each source.

    Args:
      config: vocabulary size filled in.
      rows: of a batch, on this host.
      sources: what their batches are for -> batches by number.

    Raises:
      ConfigError: a batch is not what the family's models are trained on; names the objective.
    """
    size, weighted = config.model.vocab_size or 0, is_built_in(config)
    ids = (lambda x: (x >= 0) & (x < size), f"0 to {size - 1}")
    accepted: dict[str, Any] = {
        "tokens": ids, "targets": ids, "source_tokens": ids, "positions": (lambda x: x >= 0, "at least 0"),
        "weights": (lambda x: np.isfinite(x) & (x >= 0), "finite numbers, at least 0"),
    }  # fmt: skip
    for what, batches in sources.items():
        batch, where = batches[0], f"config.data.objective: {config.data.objective}: the first {what} batch"
        expect(isinstance(batch, Batch), where, batch, "a Batch")
        found, wanted = map(_arrays, (batch, family_of(config.model).batch_spec(config.model, config.data, rows)))
        names = ", ".join(wanted)
        expect(found.keys() == wanted.keys(), where, list(found), f"{names}, as model.family={config.model.family} has")
        for name, spec in wanted.items():
            x, about = found[name], f"{where}: {name}"
            expect(is_like(x, spec.shape, spec.dtype), about, x, f"{spec.dtype}{list(spec.shape)}")
            fits, words = accepted.get(name, (np.isfinite, "finite numbers"))
            wrong = x[~fits(x)]
            expect(not wrong.size, about, wrong[:1].tolist(), words)
        weighted = weighted or bool(batch.weights.any())
    expect(weighted, f"config.data.objective: {config.data.objective}: weights of the first batches", 0, "some above 0")


def _arrays(batch: Batch) -> dict[str, Any]:
    """All arrays of a batch by name."""
    return {name: x for name, x in (batch._asdict() | dict(batch.inputs or {})).items() if name != "inputs"}

"""DeBERTa's train step beside that of a BERT of the same shape, both ours."""

from dataclasses import replace
from typing import Any

from jaxformer.benchmarks.suite import Suite
from jaxformer.benchmarks.train import SHAPES, model_config, our_steps
from jaxformer.config.positions import Disentangled
from jaxformer.runtime.host_memory import keep_freed_memory


def contestants(options: Any) -> Suite:
    """v3's layers, of a BERT's shape: projections shared with the tokens', buckets by the logarithm of the distance."""
    keep_freed_memory()
    shape = SHAPES[options.shape]
    shape = shape._replace(rows=options.rows or shape.rows)
    bert = model_config(shape, options.dtype)
    deberta = replace(bert, positions=Disentangled(distance="log", span=256, max_distance=512))
    found = {name: our_steps(shape, options.dtype, model) for name, model in (("BERT", bert), ("DeBERTa", deberta))}
    return Suite(found, "tokens", shape.steps * shape.rows * shape.context)

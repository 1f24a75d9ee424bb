"""One task, one curve and the same predictions, whatever the mesh: rows cut into parts, several examples in a row."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from flat_config import model_config

from jaxformer.config import (
    Config,
    DataConfig,
    Execution,
    HeadConfig,
    Labelled,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from jaxformer.data import tokenizers
from jaxformer.data.batches import Batches
from jaxformer.data.example_forms import question
from jaxformer.data.labelled_text import Example, split_of
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps

pytestmark = pytest.mark.slow
ROWS, LENGTH, STEPS = 8, 32, 4
MODELS = {
    "sequence_classification": {"norm": "rms_norm", "activation": "swiglu", "use_bias": False},
    "extractive_qa": {"family": "bert", "block": "post_norm"},
}


def examples(objective):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcd "), rng.integers(4, 24))) for _ in range(90)]
    if objective == "extractive_qa":
        return [question("q", text, [(2, text[2:4])]) for text in texts]
    return [Example([text], str(text.count("a") % 3)) for text in texts]


@functools.cache
def found(objective, shape):
    """Losses of some steps, and the predictions before them."""
    tokenizer = tokenizers.train("bytes", [], None)
    labelled = Labelled(labels=("0", "1", "2"), opening="separator", stride=4)
    head = HeadConfig(objective, 2 if objective == "extractive_qa" else 3, dropout=0.0)
    model = {"num_layers": 2, "width": 64, "num_heads": 8, "context_length": LENGTH, "vocab_size": 320}
    cfg = Config(
        model=replace(model_config(**model, positions="rotary", **MODELS[objective]), head=head),
        execution=Execution(layers="scan", steps_per_dispatch=STEPS),
        data=DataConfig(objective=objective, labelled=labelled),
        mesh=MeshConfig(*shape),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        train=TrainConfig(steps=STEPS, global_batch_size=ROWS),
    )
    split = split_of(examples(objective), tokenizer)
    batches = Batches(split, tokenizer, cfg.data, rows=ROWS, context_length=LENGTH, seed=0)
    assert batches[0].segments.max() > 1
    mesh = make_mesh(cfg.mesh, jax.devices()[: int(np.prod(shape))])
    model = make_model(cfg.model, cfg.loss)
    with jax.set_mesh(mesh):
        steps = compile_steps(model, make_optimizer(cfg.optimizer, STEPS, model.specs), mesh, cfg)
        state = steps.init()
        _, predictions = steps.evaluate(state.params, steps.device_put_batch(batches[0]), None)
        _, metrics = steps.train(state, *steps.place_chunk([batches[i] for i in range(STEPS)]))
        return np.asarray(metrics.loss), jax.device_get(predictions)


@pytest.mark.parametrize(
    ("objective", "shape"), [("sequence_classification", (1, 2, 2, 2)), ("extractive_qa", (1, 1, 1, 8))]
)
def test_curves_and_predictions_agree(objective, shape):
    (losses, predictions), (expected, wanted) = found(objective, shape), found(objective, (1, 1, 1, 1))
    np.testing.assert_allclose(losses, expected, rtol=5e-5)
    assert predictions.keys() == wanted.keys()
    for name, values in wanted.items():
        kind = np.testing.assert_allclose if values.dtype == np.float32 else np.testing.assert_array_equal
        options = {"rtol": 1e-4, "atol": 1e-5} if values.dtype == np.float32 else {}
        kind(predictions[name], values, **options)

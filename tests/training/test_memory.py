"""Of the logits of a whole batch no compiled train step holds any, and that is most of a small model's memory."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxformer.config import Config, from_mapping
from jaxformer.models import bert, gpt
from jaxformer.modules import make_model
from jaxformer.plan import topology
from jaxformer.plan.compiled_step import compile_step
from jaxformer.specs import abstract_params

ROWS, LENGTH, VOCAB, WIDTH = 8, 512, 50_304, 64


def config(family: str, dtype: str) -> Config:
    shape = {"num_layers": 2, "width": WIDTH, "num_heads": 4, "context_length": LENGTH, "vocab_size": VOCAB}
    objective = "masked" if family == "bert" else "next_token"
    train = {"batch_rows": ROWS, "steps_per_dispatch": 1}
    return from_mapping(
        {"model": {"family": family, "dtype": dtype, **shape}, "train": train, "data": {"objective": objective}}
    )


def largest_logits(text: str) -> int:
    """Most positions of any floating-point array [..., V] or [V, ...] of a compiled program, the table apart."""
    shapes = (tuple(map(int, found.split(","))) for found in re.findall(r"\b(?:f|bf)\d+\[([\d,]+)\]", text))
    return max(math.prod(shape) // VOCAB for shape in shapes if VOCAB in shape and WIDTH not in shape)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("gpt", "float32"), ("bert", "bfloat16")])
@pytest.mark.optimized
def test_no_train_step_holds_the_logits_of_a_batch(family, dtype):
    """At 50k tokens of vocabulary; and the step with all of them at once, as written down naively, holds three times
    the memory: parameters, optimizer and batch included."""
    chunked = compile_step(config(family, dtype), topology.make("cpu:1"))
    assert largest_logits(chunked.text) <= ROWS * LENGTH / 4
    naive = naive_step(config(family, dtype))
    assert largest_logits(naive.as_text()) >= ROWS * LENGTH  # the ruler measures
    assert total(chunked.memory) * 3 <= total(naive.memory_analysis())


def total(memory) -> int:
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def naive_step(config: Config):
    """Compiled: a step of the same model that computes every logit, and the cross-entropy from them, by autodiff."""
    model = make_model(config.model, config.loss)
    apply = {"gpt": gpt.apply, "bert": bert.apply}[config.model.family]
    params = abstract_params(model.specs)
    adam = optax.adamw(1e-3)
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)

    def step(params, state, tokens, targets, weights):
        def loss(params):
            logits = apply(params, tokens, config.model).astype(jnp.float32)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return (each * weights).sum() / weights.sum()

        updates, state = adam.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    arguments = params, jax.eval_shape(adam.init, params), ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()

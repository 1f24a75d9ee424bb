"""Log-probabilities of continuations: those of the logits, whatever the batch, the padding and the mesh."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import HeadConfig, MeshConfig, from_mapping
from jaxformer.data.decoding_text import template_start
from jaxformer.data.tokenizers import train
from jaxformer.decoding import Sampling
from jaxformer.errors import ConfigError
from jaxformer.models import gpt
from jaxformer.parallel.mesh import make_mesh, param_shardings
from jaxformer.runs.continuations import Scorer, language_model
from jaxformer.runs.harness import _cut, _sampling
from jaxformer.specs import init_params

CFG = from_mapping(
    {"model": {"num_layers": 2, "width": 16, "context_length": 32, "vocab_size": 40, "dtype": "float32",
               "attention": {"num_heads": 2}, "feed_forward": {"width": 16}}}
).model  # fmt: skip
RNG = np.random.default_rng(0)
SIZES = [(1, 1), (3, 2), (14, 3), (20, 5), (40, 9), (2, 32), (3, 2), (31, 1), (32, 1)]
PAIRS = [tuple(RNG.integers(0, 40, n).tolist() for n in sizes) for sizes in SIZES]


@functools.cache
def params_of_cfg():
    return jax.tree.map(lambda x: 8.0 * x, init_params(gpt.specs(CFG), jax.random.key(0)))


APPLY = jax.jit(lambda params, tokens, prefix: gpt.apply(params, tokens, CFG, prefix=prefix))


def expected(context, continuation, both_sides=False):
    """By the logits of one padded row."""
    ids = [*context, *continuation][-33:]
    size, new = len(ids) - 1, len(continuation)
    row = jnp.asarray([ids[:-1] + [0] * (32 - size)])
    prefix = jnp.asarray([np.arange(32) < (size - new + 1 if both_sides else 0)])
    nats = np.asarray(jax.nn.log_softmax(APPLY(params_of_cfg(), row, prefix)[0]))[size - new : size]
    return nats[np.arange(new), continuation].sum(), bool((nats.argmax(1) == continuation).all())


def likeliest(context):
    nats = APPLY(params_of_cfg(), jnp.asarray([context + [0] * (32 - len(context))]), jnp.zeros((1, 32), bool))
    return [int(nats[0, len(context) - 1].argmax())]


@pytest.mark.slow
def test_they_are_those_of_the_logits():
    """In order, in batches of several lengths; of long contexts the last tokens are read; twice is computed once."""
    pairs = [*PAIRS, (PAIRS[1][0], likeliest(PAIRS[1][0]))]
    told = []
    scorer = Scorer(params_of_cfg(), CFG, rows=2)
    found = scorer([*pairs, pairs[3]], told.append)
    assert found.pop() == found[3] and sum(told) == len(pairs) + 1
    wanted = [expected(*pair) for pair in pairs]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-5, atol=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert found[-1].greedy and not found[0].greedy


@pytest.mark.slow
def test_a_model_of_prefixes_reads_a_context_from_both_sides():
    (found,), pair = Scorer(params_of_cfg(), CFG, rows=1, prefix_lm=True)(PAIRS[2:3]), PAIRS[2]
    assert found.log_prob == pytest.approx(expected(*pair, both_sides=True)[0], rel=1e-5)
    assert abs(found.log_prob - expected(*pair)[0]) > 1e-3


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, context=2))
    params = jax.device_put(params_of_cfg(), param_shardings(gpt.specs(CFG), mesh))
    pairs = PAIRS[1:3]
    found, wanted = Scorer(params, CFG, mesh=mesh, rows=1)(pairs), [expected(*pair) for pair in pairs]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    scorer = Scorer(params_of_cfg(), CFG)
    for pair, line in (
        (([], [1]), "^context: no tokens; accepted: at least one$"),
        (([1], []), "^continuation: no tokens; accepted: at least one$"),
        (([1], [2] * 33), "^continuation: 33 tokens; accepted: at most model.context_length, 32$"),
    ):
        with pytest.raises(ConfigError, match=line):
            scorer([pair])
    assert language_model(replace(CFG, head=HeadConfig("multiple_choice"))).head is None
    with pytest.raises(ConfigError, match=r"gpt with a head for regression; accepted: one that predicts tokens$"):
        language_model(replace(CFG, head=HeadConfig("regression", 1)))


def test_how_the_harness_chooses_and_cuts():
    assert _sampling({"do_sample": False, "temperature": 0.0, "top_k": 5, "max_gen_toks": 3}) == Sampling(0)
    assert _sampling({"do_sample": True, "temperature": 0.5, "top_p": 0.9}) == Sampling(0.5, top_p=0.9)
    with pytest.raises(
        ConfigError, match=r"^generation_kwargs.num_beams: 4; accepted: do_sample, max_gen_toks, min_p, "
    ):
        _sampling({"num_beams": 4})
    assert _cut("a b\n\nc", ["c", "\n\n"]) == "a b" and _cut("ab", ["c"]) == "ab"
    assert template_start(train("bytes", [], None)) == []

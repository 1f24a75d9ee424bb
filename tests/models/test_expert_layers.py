"""Models of which only every second layer has experts: the layers one after another, by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Dense, Experts, ModelConfig, Softmax
from jaxformer.config.execution import Execution
from jaxformer.functional import block as blocks
from jaxformer.functional.layer import NO_CONTEXT
from jaxformer.models import backbone
from jaxformer.models.flops import count_parameters, flops_per_token
from jaxformer.specs import is_spec, stack_specs

KIND = Experts(count=4, top_k=2, width=8, activation="gelu", every=2, dense_activation="geglu")
CFG = ModelConfig(
    num_layers=4,
    width=8,
    context_length=4,
    vocab_size=16,
    attention=Softmax(2),
    positions="none",
    feed_forward=KIND,
    use_bias=False,
)
ALL = replace(CFG, feed_forward=replace(KIND, every=1, dense_activation=None))
NONE = replace(CFG, feed_forward=Dense(8, "geglu"))


def drawn(specs):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), jnp.float32), specs, is_leaf=is_spec)


@pytest.mark.slow
def test_a_block_is_a_dense_layer_and_one_of_experts():
    params = drawn(stack_specs(blocks.block_specs(CFG), CFG.num_blocks))
    assert CFG.num_blocks == 2 and set(params["mlp_1"]) == {"w_up", "w_gate", "w_down"}
    x = drawn({"x": backbone.specs(CFG)["embedding"]["tokens"]})["x"].reshape(4, 4, 8)
    context = NO_CONTEXT._replace(execution=Execution(layers="scan"))
    found, _, terms = jax.jit(lambda *of: blocks.stack(*of, CFG, context))(params, x)

    @jax.jit
    def by_hand(params, x):
        total = 0.0
        for number in range(2):
            of = jax.tree.map(lambda leaf, at=number: leaf[at], params)
            first = {name.replace("_1", ""): tree for name, tree in of.items() if "_1" in name}
            x = blocks.block(first, x, NONE)[0]
            x, _, more = blocks.block({name: of[name] for name in blocks.block_specs(ALL)}, x, ALL)
            total += more["expert_balance"]
        return x, total

    expected, balance = by_hand(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(terms["expert_balance"], balance, rtol=1e-5)


def test_counts_are_halves_of_those_of_both_kinds():
    of, every, none = (count_parameters(cfg) for cfg in (CFG, ALL, NONE))
    assert 2 * of.total == every.total + none.total and 2 * of.active == every.active + none.active
    flops = [flops_per_token(cfg) for cfg in (CFG, ALL, NONE)]
    assert 2 * flops[0].training == flops[1].training + flops[2].training
    weight = blocks.term_weights(CFG, jnp.ones((2, 4), jnp.int32))["expert_balance"]
    assert weight == 2 * 8  # tokens of the two layers of experts

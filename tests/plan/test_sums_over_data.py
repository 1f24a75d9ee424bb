"""Gradients are summed over the data axis once an update, however many micro-batches it has; read from the program."""

import jax
import pytest
from on_tpus import needs_libtpu, plans_on

from jaxformer.config import from_mapping
from jaxformer.parallel.data_axis import draws
from jaxformer.plan import topology
from jaxformer.plan.measures import by_axes, make_plan

MODEL = {"num_layers": 4, "width": 32, "context_length": 32, "vocab_size": 64, "dtype": "float32"}


def plan_of(dropout=0.0, **mesh):
    return make_plan(
        from_mapping({
            "model": {**MODEL, "dropout": dropout}, "mesh": mesh, "train": {"global_batch_size": 32},
            "execution": {"gradient_accumulation_steps": 4, "layers": "scan", "remat": "full"},
        }), topology.make("cpu:4")
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"data": 2, "stage": 2}], ids=str)
def test_once_an_update(mesh):
    plan = plan_of(**mesh)
    # Norms, which fsdp does not split, are summed over it before, and not over both at once.
    least, norms = plan["minimum"]["data"], plan["minimum"].get("data+fsdp", 0)
    assert least <= by_axes(plan)["data"] <= least + norms + 100


@pytest.mark.slow
@needs_libtpu
def test_on_tpus_whose_kernels_nothing_may_shard():
    """Also where no axis but those that are apart has several devices."""
    common = {
        "model": {**MODEL, "num_layers": 2, "width": 128, "num_heads": 1, "context_length": 1024},
        "train": {"global_batch_size": 8}, "execution": {"gradient_accumulation_steps": 2, "layers": "scan"},
    }  # fmt: skip
    configs = [common | {"mesh": mesh} for mesh in ({"data": 4}, {"data": 2, "stage": 2})]
    for plan in plans_on("v5e:2x2", configs):
        assert plan["minimum"]["data"] <= by_axes(plan)["data"] <= 1.02 * plan["minimum"]["data"]


@pytest.mark.slow
def test_but_in_every_micro_batch_with_dropout():
    plan = plan_of(dropout=0.1, data=4)
    assert by_axes(plan)["data"] > 3 * plan["minimum"]["data"]


@pytest.mark.parametrize(
    "drawn",
    [
        lambda rng: jax.random.bernoulli(rng),
        lambda rng: jax.lax.cond(True, lambda: jax.random.normal(rng), lambda: 0.0),
        lambda rng: jax.lax.scan(lambda c, key: (c, jax.random.uniform(key)), 0, jax.random.split(rng)),
        lambda rng: jax.jit(jax.checkpoint(lambda rng: jax.random.gamma(rng, 2.0)))(rng),
        lambda rng: jax.random.key_data(jax.random.fold_in(rng, 1)),
    ],
    ids=["plain", "branch", "loop", "function", "bits"],
)
def test_what_draws(drawn):
    assert draws(drawn, jax.random.key(0))
    assert not draws(lambda rng: jax.random.split(jax.random.fold_in(rng, 3)), jax.random.key(0))

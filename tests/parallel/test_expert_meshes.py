"""A layer of experts on several devices: what it sends, what cannot be split."""

import re
import sys
from dataclasses import replace

import expert_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Config, Dense, Execution, Experts, MeshConfig, ModelConfig, TrainConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import experts_layer
from jaxformer.functional.block import rematerialized
from jaxformer.functional.layer import Context
from jaxformer.masks import Mask, segments
from jaxformer.models import gpt
from jaxformer.parallel.mesh import check_context, check_experts, make_mesh
from jaxformer.parallel.platforms import compiled_for
from jaxformer.plan.communication_bound import communication_bound

ROWS = 16
COLLECTIVES = "all_to_all", "all_gather", "ragged_all_to_all"


def exchanged(dispatch, exchange, mesh, run=True):
    """The layer on a mesh, and which collectives exchange its tokens; these alone without `run`."""
    fields = {"balance": None, "bias_rate": 0.0} if dispatch == "expert_choice" else {}
    cfg, batch = cases.config_of(dispatch=dispatch, **fields), cases.batch_of(ROWS)
    params = cases.params_of(cfg, np.float32)
    context = Context(segments(batch.segments), execution=Execution(expert_exchange=exchange))
    weights = {name: params["mlp"][name] for name in cases.specs_of(cfg)["mlp"] if name not in ("load", "bias")}

    def layer(weights, x):
        return experts_layer.apply(params["mlp"] | weights, x, cfg, context)[0]

    with jax.set_mesh(make_mesh(mesh, jax.devices()[: mesh.data * mesh.expert])):
        arguments_of = weights, np.asarray(cases.inputs_of(batch, np.float32))
        text = str(jax.make_jaxpr(layer)(*arguments_of))
        sent = {n for n in COLLECTIVES if f" {n}[" in text}
        return (jax.device_get(cases.quickly(layer)(*arguments_of)), sent) if run else sent


WAYS = {  # the collectives of each exchange on CPU, where a ragged one gathers
    "all_to_all": {"all_to_all"},
    "gather": {"all_gather"},
    "ragged_all_to_all": {"all_gather"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dispatch, ways",
    [
        ("capacity", {"auto": "all_to_all", "ragged_all_to_all": "ragged_all_to_all", "gather": "gather"}),
        ("expert_choice", {"auto": "all_to_all", "gather": "gather"}),
        ("dropless", {"auto": "gather", "ragged_all_to_all": "ragged_all_to_all"}),
    ],
)
def test_all_exchanges_are_the_layer_of_one_device(dispatch, ways):
    expected = exchanged(dispatch, "auto", MeshConfig(data=1))[0]
    for exchange, way in ways.items():
        found, sent = exchanged(dispatch, exchange, MeshConfig(data=2, expert=4))
        assert sent == WAYS[way], exchange
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_log_says_which_exchange_is_taken(caplog, monkeypatch):
    caplog.set_level("INFO")
    exchanged("dropless", "ragged_all_to_all", MeshConfig(data=2, expert=4), run=False)
    assert caplog.messages == [
        "experts: blocks multiplies with their weights",
        "experts: ragged_all_to_all is ragged_all_to_all between 4 devices",
    ]
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 3)
    assert exchanged("dropless", "ragged_all_to_all", MeshConfig(data=1, expert=4), run=False) == set()
    line = "experts: ragged_all_to_all is gather, as 3 rows are not split over the 4 devices of experts"
    assert caplog.messages[-1] == line


@pytest.mark.parametrize(
    "dispatch, collective",
    [("dropless", "ragged_all_to_all"), ("capacity", "ragged_all_to_all"), ("expert_choice", "all_to_all")],
)
def test_what_is_chosen_elsewhere(dispatch, collective):
    with compiled_for("cuda"):
        assert collective in exchanged(dispatch, "auto", MeshConfig(data=1, expert=4), run=False)


@pytest.mark.parametrize("dispatch", ["capacity", "expert_choice"])
@pytest.mark.parametrize("remat, ways", [("none", 4), ("dots", 4), ("full", 5)])
def test_rows_go_to_their_experts_and_back_twice_and_once_more_where_they_are_not_kept(dispatch, remat, ways):
    fields = {"balance": None, "bias_rate": 0.0} if dispatch == "expert_choice" else {}
    cfg, batch = cases.config_of(dispatch=dispatch, **fields), cases.batch_of(ROWS)
    params = cases.params_of(cfg, np.float32)
    execution = Execution(expert_exchange="all_to_all", remat=remat)
    context = Context(segments(batch.segments), execution=execution)

    def loss(params, x):
        layer = rematerialized(lambda *of: experts_layer.apply(*of, cfg, context)[0], execution, in_loop=False)
        return jnp.sum(jnp.sin(x + layer(params["mlp"], x)))

    with jax.set_mesh(make_mesh(MeshConfig(data=1, expert=4), jax.devices()[:4])):
        x = np.asarray(cases.inputs_of(batch, np.float32))
        text = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile().as_text()
    shapes = re.findall(r"= \(f32\[[0-9,]+,(\d+)\].* all-to-all\(", text)
    assert shapes.count(str(cases.D)) == ways and set(shapes) <= {str(cases.D), "1", "2"}  # the others are of gates


def test_padding_of_rows_in_parts():
    documents = np.array([[1, 1, 2, 0], [1, 0, 0, 0]])
    mask = Mask(query_segments=documents, key_segments=documents, parts=2)
    found = experts_layer.not_padding(np.zeros((4, 2, 3)), Context(mask))
    assert found.tolist() == [[True, True], [True, False], [True, False], [False, False]]


def test_what_an_expert_axis_sends_at_the_least():
    def least(top_k, remat="none", micro_batches=1, **more):
        kind = Experts(count=4, top_k=top_k, width=64, **more)
        model = ModelConfig(num_layers=3, width=128, context_length=16, vocab_size=64, dtype="bfloat16")
        model, execution = (
            replace(model, feed_forward=kind),
            Execution(remat=remat, gradient_accumulation_steps=micro_batches),
        )
        cfg = Config(model=model, train=TrainConfig(global_batch_size=8), execution=execution)
        devices = make_mesh(MeshConfig(data=1, expert=4), jax.devices()[:4])
        return communication_bound(cfg, gpt.specs(cfg.model), devices)["expert"]

    once = 3 * 4 * 3 / 4 * (8 * 16 / 4) * 128 * 2  # layers, ways, to others, tokens of a device, numbers, bytes
    assert least(2) - least(1) == once and least(4) - least(2) == 2 * once  # from k = 4 on, all to all is as cheap
    assert least(2, "full") - least(1, "full") == 5 / 4 * once and least(2, "dots") == least(2)
    counted = least(2, micro_batches=2) - least(1, micro_batches=2)  # all choices first: forward up to the last router
    assert counted == (4 * 3 + 2 * 2) / 12 * once and least(2, balance=0.0) - least(1, balance=0.0) == once
    dropping = least(2, dispatch="capacity", capacity_factor=0.5) - least(1, dispatch="capacity", capacity_factor=0.5)
    assert dropping == once / 2  # what finds no place is not sent


def refused(check, cfg, **mesh):
    with pytest.raises(ConfigError) as caught:
        check(cfg, make_mesh(MeshConfig(data=1, **mesh), jax.devices()[: np.prod(list(mesh.values()))]))
    return str(caught.value)


def test_what_a_mesh_cannot_split():
    assert refused(check_experts, cases.config_of(), expert=3) == (
        "config.mesh.expert: 3 does not divide model.feed_forward.count 4; accepted: a divisor of 4"
    )
    assert refused(check_experts, ModelConfig(feed_forward=Dense()), expert=2) == (
        "config.mesh.expert: 2 has no experts to split; accepted: 1, or model.feed_forward.kind=experts"
    )
    assert refused(check_context, cases.config_of(dispatch="capacity"), context=2) == (
        "config.mesh.context: 2; model.feed_forward.dispatch=capacity needs whole rows; accepted: 1"
    )

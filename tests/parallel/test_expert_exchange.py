"""Tokens sent to the devices of their experts by themselves: the layer of one device; what the collective is told."""

import functools

import expert_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.config import Execution
from jaxformer.functional import expert_exchange, expert_rows, experts
from jaxformer.functional.block import rematerialized
from jaxformer.functional.expert_exchange import slots_exchange, sorted_exchange
from jaxformer.functional.experts import capacity_mlp, expert_mlp
from jaxformer.functional.router import sort_by_expert

DEVICES, EXPERTS, TOKENS, CHOICES, WIDTH = 4, 8, 12, 2, 4
OVER = ("expert",)


def on_devices(function):
    """function of each device's part of its arguments, whose first axes are split."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), OVER)
    return jax.shard_map(function, mesh=mesh, in_specs=P(OVER), out_specs=P(OVER), check_vma=False)


def choices(case):
    """[n N, k]: different experts for each token; EXPERTS: nobody."""
    rng = np.random.default_rng(3)
    own = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(DEVICES * TOKENS)]).astype(np.int32)
    own[::5] = EXPERTS
    alike = {"one expert": [5, EXPERTS], "one device": [6, 7], "nobody": [EXPERTS, EXPERTS]}
    return np.array([alike[case]], np.int32) + 0 * own if case in alike else own


def layer_of(function, case, **settings):
    """Outputs and gradients on one device, and on all."""
    x, up, down, g = cases.drawn(
        (DEVICES * TOKENS, WIDTH), (EXPERTS, WIDTH, 6), (EXPERTS, 6, WIDTH), (DEVICES * TOKENS, WIDTH)
    )
    gates, chosen = cases.drawn((DEVICES * TOKENS, CHOICES), seed=1)[0], choices(case)

    def alone(x, gates, up, down):
        return function(x, gates, chosen, up, down)

    def local(x, gates, chosen, up, down):
        return function(x, gates, chosen, up, down, over=OVER, **settings)

    def everywhere(x, gates, up, down):
        return on_devices(local)(x, gates, chosen, up, down)

    with jax.enable_x64(True):
        return tuple(cases.with_gradients(f, g, x, gates, up, down) for f in (everywhere, alone))


@pytest.mark.parametrize("case", ["even", "one expert", "one device", "nobody"])
@pytest.mark.parametrize("implementation", ["ragged", "blocks"])
def test_any_number_of_tokens_finds_its_experts(case, implementation):
    cases.close(*layer_of(functools.partial(expert_mlp, implementation=implementation), case))


def test_there_are_as_many_rounds_as_the_busiest_device_needs(monkeypatch):
    """With room for twice the rows of a device; the fourth could bring up to four times as many."""
    seen, combine = [], expert_rows._combine

    def watched(rows, *rest):
        jax.debug.callback(lambda: seen.append(len(rows)))
        return combine(rows, *rest)

    monkeypatch.setattr(expert_rows, "_combine", watched)
    monkeypatch.setattr(experts, "ROOM", 1)
    x, up, down = cases.drawn((DEVICES * TOKENS, WIDTH), (EXPERTS, WIDTH, 6), (EXPERTS, 6, WIDTH), dtype=np.float32)
    gates, number = np.ones((DEVICES * TOKENS, CHOICES), np.float32), TOKENS * CHOICES
    run = cases.quickly(on_devices(functools.partial(expert_mlp, over=OVER, implementation="ragged")))
    for rows, rounds in ((number, 1), (number + 1, 2), (2 * number, 2), (2 * number + 1, 3), (4 * number, 4)):
        chosen = np.full(DEVICES * number, EXPERTS, np.int32)
        chosen[:rows] = 6  # the others go to nobody
        run(x, gates, chosen.reshape(-1, CHOICES), up, down)
        jax.effects_barrier()
        assert seen == [number] * rounds * DEVICES, rows
        seen.clear()


@pytest.mark.parametrize("remat", ["none", "dots", "attention", "full"])
def test_nothing_of_later_rounds_is_kept(remat):
    """But what they begin with: neither their rows nor copies of weights."""
    x, up, down = cases.drawn((DEVICES * TOKENS, WIDTH), (EXPERTS, WIDTH, 6), (EXPERTS, 6, WIDTH), dtype=np.float32)
    gates, chosen = np.ones((DEVICES * TOKENS, CHOICES), np.float32), choices("even")

    def layer(x, gates, up, down):
        run = on_devices(functools.partial(expert_mlp, over=OVER, implementation="ragged"))
        return jnp.sum(jnp.sin(run(x, gates, chosen, up, down)))

    run = rematerialized(layer, Execution(remat=remat), in_loop=True)
    kept = jax.tree.leaves(jax.eval_shape(lambda *of: jax.vjp(run, *of)[1], x, gates, up, down))
    room = 2 * TOKENS * CHOICES * DEVICES
    most = {"none": 3, "dots": 3, "attention": 0, "full": 0}[remat]  # rows, and the results of both products
    assert len([each for each in kept if each.shape[:1] == (room,)]) == most
    assert {each.shape for each in kept if each.ndim == 3} == {up.shape, down.shape}


@pytest.mark.parametrize("capacity", [1, 3])
def test_tokens_without_empty_places(capacity):
    def in_rows(x, gates, chosen, *weights, **settings):
        rows = (a.reshape(-1, TOKENS // 2, a.shape[-1]) for a in (x, gates, chosen))
        return capacity_mlp(*rows, capacity, *weights, **settings).reshape(x.shape)

    cases.close(*layer_of(in_rows, "even", ragged=True))


def reference(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its documentation says, slice by slice, where CPUs have none."""
    devices, here = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    every = [jax.lax.all_gather(each, axis_name) for each in (operand, input_offsets, send_sizes, output_offsets)]
    slices = len(send_sizes) // devices
    rows, to = jnp.arange(len(operand)), jnp.arange(len(output))
    for source in range(devices):
        for i in range(slices):
            data, begins, sizes, places = (each[source] for each in every)
            begin, size, place = (each[here * slices + i] for each in (begins, sizes, places))
            inside = (to >= place) & (to < place + size) & (size == recv_sizes[source * slices + i])
            output = jnp.where(inside[:, None], data[jnp.clip(to - place + begin, 0, len(rows) - 1)], output)
    return output


@pytest.mark.parametrize("case", ["even", "one expert", "one device"])
@pytest.mark.parametrize("how", ["sorted", "slots", "window"])
def test_what_the_collective_is_told(case, how, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", reference)
    rows, back = cases.drawn((DEVICES * TOKENS * CHOICES, 3), (DEVICES * 500, 3), dtype=np.float32)

    def both(rows, back, chosen):
        number = TOKENS * CHOICES
        sizes = sort_by_expert(chosen.reshape(-1), EXPERTS)[1]
        exchange = slots_exchange(sizes, OVER, number, number) if how == "slots" else sorted_exchange(
            sizes, OVER, number, 4
        )[0]  # fmt: skip
        exchange = exchange.window(1, 8) if how == "window" else exchange
        back = back[: exchange.room]
        native = expert_exchange._to_native(rows, exchange), expert_exchange._from_native(back, exchange)
        gathered = expert_exchange._to_by_gather(rows, exchange), expert_exchange._from_by_gather(back, exchange)
        return native, gathered

    native, gathered = cases.quickly(on_devices(both))(rows, back, choices(case))
    jax.tree.map(np.testing.assert_array_equal, native, gathered)
    assert any(np.abs(each).max() > 0 for each in native) or (case, how) == ("even", "window")


def test_numbers_of_rows_are_32_bits_wide():
    """TPUs have no collective of wider ones."""

    def dtypes(chosen):
        sizes = sort_by_expert(chosen.reshape(-1), EXPERTS)[1]
        exchanges = sorted_exchange(sizes, OVER, chosen.size, 4)[0], slots_exchange(sizes, OVER, chosen.size, 3)
        found.extend({leaf.dtype.name for leaf in jax.tree.leaves(exchanges[0].window(1, 8))})
        found.extend({leaf.dtype.name for leaf in jax.tree.leaves(exchanges)})
        return chosen

    found = []
    with jax.enable_x64(True):
        jax.eval_shape(on_devices(dtypes), choices("even"))
    assert set(found) == {"int32"}

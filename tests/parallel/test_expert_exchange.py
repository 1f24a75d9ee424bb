"""Tokens sent to the devices of their experts by themselves: the layer of one device; what the collective is told."""

import functools

import expert_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.functional import expert_exchange, expert_rows
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


def test_later_rounds_are_taken_only_where_a_device_has_no_room(monkeypatch):
    seen, visit = [], expert_rows._combine

    def watched(rows, *rest):
        jax.debug.callback(lambda: seen.append(len(rows)))
        return visit(rows, *rest)

    monkeypatch.setattr(expert_rows, "_combine", watched)
    x, up, down = cases.drawn((DEVICES * TOKENS, WIDTH), (EXPERTS, WIDTH, 6), (EXPERTS, 6, WIDTH), dtype=np.float32)
    gates, rounds = np.ones((DEVICES * TOKENS, CHOICES), np.float32), {}
    run = on_devices(functools.partial(expert_mlp, over=OVER, implementation="ragged"))
    for case in ("even", "one device"):
        cases.quickly(run)(x, gates, choices(case), up, down)
        jax.effects_barrier()
        rounds[case] = len(seen) / DEVICES
        assert set(seen) == {2 * TOKENS * CHOICES}
        seen.clear()
    assert rounds == {"even": 1, "one device": 2}


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

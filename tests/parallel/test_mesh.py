"""One mesh, one table; what does not fit says so in one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.config import MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.parallel import mesh
from jaxformer.specs import ParamSpec, zeros


def mesh_of(data=None, fsdp=1, tensor=1, devices=None):
    return mesh.make_mesh(MeshConfig(data, fsdp, tensor), devices)


@pytest.mark.parametrize(
    ("asked", "shape"),
    [((None, 1, 1), (8, 1, 1)), ((2, 2, 2), (2, 2, 2)), ((1, None, 2), (1, 4, 2)), ((1, 1, None), (1, 1, 8))],
)
def test_none_fills(asked, shape):
    assert tuple(mesh_of(*asked).shape[name] for name in ("data", "fsdp", "tensor")) == shape
    assert mesh_of(*asked).axis_names == ("data", "fsdp", "context", "tensor")


def test_axes_are_auto():
    # Under Explicit axes, the default of jax.make_mesh, an einsum over a split dimension raises.
    with jax.set_mesh(mesh_of(1, 8, 1)) as m:
        x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(m or mesh_of(1, 8, 1), P("fsdp")))
        assert jnp.einsum("ab,ac->bc", x, x)[0, 0] == 8


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((3, 1, 1), "config.mesh: data 3 x fsdp 1 x context 1 x tensor 1 makes 3, but the number of devices is 8"),
        (
            (None, 3, 1),
            "config.mesh: data none x fsdp 3 x context 1 x tensor 1 makes 3, but the number of devices is 8",
        ),
        ((16, 1, 1), "makes 16, but the number of devices is 8"),
    ],
)
def test_mismatch_is_one_line_with_the_numbers(asked, message):
    with pytest.raises(ConfigError) as error:
        mesh_of(*asked)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_table():
    m = mesh_of(2, 2, 2)
    spec = {
        ("vocab", "embed"): P("tensor", "fsdp"),
        ("embed", "heads", "head_width"): P("fsdp", "tensor"),
        ("heads", "head_width", "embed"): P("tensor", None, "fsdp"),
        ("layers", "embed", "mlp"): P(None, "fsdp", "tensor"),
        ("positions", "embed"): P(None, "fsdp"),
        ("norm",): P(),
        (None, "mlp"): P(None, "tensor"),
        ("embed", "embed"): P("fsdp"),  # a mesh axis is used once per array
        ("heads", "mlp"): P("tensor"),
    }
    for axes, expected in spec.items():
        assert mesh.partition((8,) * len(axes), axes, m) == expected, axes


def test_mesh_axes_of_size_one_are_left_out():
    assert mesh.partition((8, 8), ("embed", "mlp"), mesh_of(8, 1, 1)) == P()


def test_an_axis_that_does_not_divide_frees_its_mesh_axis():
    assert mesh.partition((3, 8), ("heads", "mlp"), mesh_of(4, 1, 2)) == P(None, "tensor")


def test_unknown_axis_is_named():
    with pytest.raises(ConfigError, match=r"blocks\.w: logical axis 'head' has no rule.*did you mean heads\?"):
        mesh.param_shardings({"blocks": {"w": ParamSpec((4,), ("head",), zeros, "bias")}}, mesh_of())


def test_small_arrays_stay_whole_large_ones_raise():
    m = mesh_of(2, 1, 4)
    assert mesh.partition((64, 6), ("embed", "heads"), m) == P()
    with pytest.raises(ConfigError) as error:
        mesh.param_shardings({"w": ParamSpec((2**19, 6), ("embed", "heads"), zeros, "hidden")}, m)
    text = str(error.value)
    assert text.startswith("config.mesh.tensor: 4 does not divide heads 6 of w") and "3145728" in text
    assert "\n" not in text
    # split along another dimension by the same mesh axis, it is not replicated
    assert mesh.partition((6, 2**19), ("heads", "mlp"), m) == P(None, "tensor")
    # fewer key/value heads than devices is multi-query attention, not a mistake
    assert mesh.partition((2**19, 1, 8), ("embed", "kv_heads", "head_width"), m) == P()


def test_batch_rows():
    m = mesh_of(2, 2, 2)
    assert mesh.batch_sharding(m).spec == P(("data", "fsdp"))
    assert mesh.batch_sharding(m, 1).spec == P(None, ("data", "fsdp"))
    x = jax.device_put(np.zeros((8, 3)), mesh.batch_sharding(m))
    assert {s.data.shape for s in x.addressable_shards} == {(2, 3)}
    assert mesh.batch_shards(m) == 4
    np.testing.assert_array_equal(mesh.host_rows(12, m), np.arange(12))


def test_check_batch():
    mesh.check_batch(16, 2, mesh_of(8, 1, 1))
    mesh.check_batch(2, 1, mesh_of(2, 1, 4))
    for rows, micro in ((12, 1), (8, 2)):
        with pytest.raises(ConfigError, match=rf"config\.train\.global_batch_size: {rows} in .* 8 devices") as error:
            mesh.check_batch(rows, micro, mesh_of(4, 2, 1))
        assert f"accepted: multiples of {8 * micro}" in str(error.value)


def test_slices_lie_along_the_first_axes():
    assert mesh.across_slices((8, 4, 1, 2), 4) == (4, 1, 1, 1)
    assert mesh.across_slices((1, 8, 2, 2), 4) == (1, 4, 1, 1)
    assert mesh.across_slices((2, 6, 1, 1), 6) == (2, 3, 1, 1)
    with pytest.raises(ConfigError, match="data 1 x fsdp 2 cannot be laid over 4 slices"):
        mesh.across_slices((1, 2, 2, 2), 4)


def test_a_mesh_over_slices_has_whole_slices_inside(monkeypatch):
    class Device:
        platform, device_kind, process_index = "gpu", "made up", 0

        def __init__(self, number):
            self.id, self.slice_index = number, number // 4

    class MeshOf:
        def __init__(self, devices, names, axis_types):
            self.devices, self.axis_names = devices, names

    monkeypatch.setattr(mesh, "Mesh", MeshOf)
    m = mesh.make_mesh(MeshConfig(2, 2, 2), [Device(i) for i in range(8)])
    assert m.devices.shape == (2, 2, 1, 2) and m.axis_names == mesh.AXES
    assert {d.slice_index for d in m.devices[0].flat} == {0} and {d.slice_index for d in m.devices[1].flat} == {1}

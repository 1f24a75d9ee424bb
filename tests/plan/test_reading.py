"""What is read from a compiled program agrees with programs whose costs are known by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.config import from_mapping
from jaxformer.masks import Mask
from jaxformer.plan import collectives, costs, hlo, kernel_costs, topology
from jaxformer.plan.grouped_costs import grouped_shares


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices())


def read(mesh, local, shape, spec, out):
    """The program of `local` run by shard_map on one float32 array."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))
    return hlo.read(program.lower(x).compile().as_text())


def test_collectives_of_known_bytes(mesh):
    """One of each kind; what one device sends, by hand: n devices, N bytes of the whole."""

    def local(x):  # [2, 64] on each device
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)  # to [8, 64]
        summed = jax.lax.psum(whole * 2, ("fsdp", "tensor"))
        part = jax.lax.psum_scatter(summed * whole, "tensor", scatter_dimension=1, tiled=True)  # to [8, 32]
        moved = jax.lax.ppermute(part, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.all_to_all(moved, "tensor", 0, 1, tiled=True)

    program = read(mesh, local, (8, 64), P("fsdp"), P("fsdp"))
    found = {c.kind: c for c in collectives.find(program, dict(mesh.shape))}
    expected = {
        "all-gather": ("fsdp", 3 * 2 * 64 * 4),
        "all-reduce": ("fsdp+tensor", 2 * 7 / 8 * 8 * 64 * 4),
        "reduce-scatter": ("tensor", 1 / 2 * 8 * 64 * 4),
        "collective-permute": ("fsdp", 8 * 32 * 4),
        "all-to-all": ("tensor", 1 / 2 * 8 * 32 * 4),
    }
    assert {kind: (c.axes, c.total) for kind, c in found.items()} == expected


def test_a_collective_in_a_loop_counts_each_time(mesh):
    """Inside two scans, of 5 and 3; what follows the loop counts once."""

    def local(x):
        def inner(x, _):
            return jnp.tanh(jax.lax.psum(x, "tensor")), None

        def outer(x, _):
            return jax.lax.scan(inner, x, None, length=3)[0], None

        x, _ = jax.lax.scan(outer, x, None, length=5)
        return jax.lax.psum(x, "fsdp")

    found = collectives.find(read(mesh, local, (16, 8), P(("fsdp", "tensor")), P()), dict(mesh.shape))
    assert {(c.axes, c.times) for c in found} == {("tensor", 15.0), ("fsdp", 1.0)}


def test_a_loop_of_unknown_length_counts_once(mesh):
    """As the loop over the updates of a dispatch does: the plan is of one update."""

    def local(x):
        return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda i, x: jax.lax.psum(x, "fsdp") + i, x)

    (found,) = collectives.find(read(mesh, local, (4, 8), P("fsdp"), P("fsdp")), dict(mesh.shape))
    assert found.times == 1.0


def loop(start: int, bound: int, step: int) -> str:
    """A program in the words of a TPU's compiler, which notes no trip count."""
    return f"""
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=0
  %x = f32[8]{{0:T(128)}} get-tuple-element(%s), index=1
  %by = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%i, %by)
  %sum = f32[8]{{0:T(128)}} all-reduce(%x), channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=2] {{'axis_1'}}
  ROOT %out = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%next, %sum)
}}

%condition (s: (s32[], f32[8])) -> pred[] {{
  %s = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %bound = s32[]{{:T(128)}} constant({bound})
  %i = s32[]{{:T(128)}} get-tuple-element(%s), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%i, %bound), direction=LT
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0:T(128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant({start})
  %first = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) tuple(%zero, %x)
  %loop = (s32[]{{:T(128)}}, f32[8]{{0:T(128)}}) while(%first), condition=%condition, body=%body
  ROOT %y = f32[8]{{0:T(128)}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("start", "bound", "step", "trips"), [(0, 12, 1, 12), (1, 12, 1, 11), (0, 8, 2, 4), (3, 8, 2, 3)]
)
def test_trips_follow_from_the_condition(start, bound, step, trips):
    (found,) = collectives.find(hlo.read(loop(start, bound, step)), {"data": 1, "fsdp": 4, "tensor": 2})
    assert (found.axes, found.times, found.total) == ("tensor", trips, trips * 32.0)


def test_start_and_done_are_one_and_pieces_of_one_gather_too():
    text = """
%piece (p: f32[2]) -> f32[8] {
  %p = f32[2]{0} parameter(0)
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], frontend_attributes={chain_id="0"}
}

ENTRY %main (x: f32[2]) -> f32[8] {
  %x = f32[2]{0} parameter(0)
  %a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %b = f32[8]{0} all-gather-done(%a)
  %c = f32[8]{0} fusion(%x), kind=kCustom, calls=%piece
  ROOT %d = f32[8]{0} fusion(%x), kind=kCustom, calls=%piece
}
"""
    found = collectives.find(hlo.read(text), {"fsdp": 4})
    assert [(c.kind, c.axes, c.total) for c in found] == [("all-gather", "fsdp", 24.0)] * 2


def test_flops_and_traffic_of_a_loop_of_products():
    """Six products of [32, 32] with weights that the loop slices from one stack: 2 N^3 each, one weight read each."""

    def run(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 32), (6, 32, 32)))
    program = hlo.read(jax.jit(run).lower(x, w).compile().as_text())
    assert costs.flops(program) == 6 * 2 * 32**3
    one = 32 * 32 * 4
    assert 6 * 3 * one <= costs.traffic(program) <= 6 * 8 * one


def test_traffic_of_the_first_halves_of_pairs():
    """Their results name what they read, too. S(1) is a TPU's memory beside the product: a slice comes in from the main
    memory, is cut there at no cost, goes out again, and is sent to the neighbour."""
    text = """
ENTRY %main (a: bf16[64,32]) -> bf16[16,32] {
  %a = bf16[64,32]{1,0} parameter(0)
  %in = ((bf16[64,32]{1,0}), bf16[16,32]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[16:32], [0:32]}
  %part = bf16[16,32]{1,0:S(1)} slice-done(%in)
  %less = bf16[8,32]{1,0:S(1)} slice(%part), slice={[0:8], [0:32]}
  %out = (bf16[16,32]{1,0}, bf16[16,32]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%part)
  %there = bf16[16,32]{1,0} copy-done(%out)
  %sent = (bf16[16,32]{1,0}, bf16[16,32]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%there)
  ROOT %got = bf16[16,32]{1,0} collective-permute-done(%sent)
}
"""
    part = 16 * 32 * 2
    assert costs.traffic(hlo.read(text)) == part + part + 2 * part


def test_a_product_written_as_a_convolution():
    """A TPU's way: heads as a window that reaches into padding, where nothing is multiplied."""
    window = "window={size=1x6 pad=0_0x5_5 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f"
    text = f"""
ENTRY %main (a: bf16[16,1024,96,1], b: bf16[6,64,96,1]) -> bf16[16,1024,6,64] {{
  %a = bf16[16,1024,96,1]{{1,2,3,0}} parameter(0)
  %b = bf16[6,64,96,1]{{2,1,0,3}} parameter(1)
  ROOT %c = bf16[16,1024,6,64]{{1,3,2,0}} convolution(%a, %b), {window}
}}
"""
    assert costs.flops(hlo.read(text)) == 2 * 16 * 1024 * 96 * 6 * 64


@pytest.mark.parametrize("rows", ["", "2,"], ids=["one row", "two"])
def test_products_of_the_tpus_attention_kernel(rows):
    """Scores and their product with the values, whether or not a device has more than one row."""
    text = f"""HloModule attention, is_scheduled=true

ENTRY %main (a: s8[1,2,2], q: bf16[{rows}12,1024,64], k: bf16[{rows}4,512,64]) -> bf16[{rows}12,1024,64] {{
  %a = s8[1,2,2]{{2,1,0}} parameter(0)
  %q = bf16[{rows}12,1024,64]{{2,1,0}} parameter(1)
  %k = bf16[{rows}4,512,64]{{2,1,0}} parameter(2)
  ROOT %splash_mha_fwd.1 = bf16[{rows}12,1024,64]{{2,1,0}} custom-call(%a, %q, %k), custom_call_target="tpu_custom_call"
}}
"""
    assert (
        costs.flops(hlo.read(text), {"splash_mha_fwd": 0.5}) == 0.5 * 2 * (2 if rows else 1) * 12 * 2 * 1024 * 512 * 64
    )


@pytest.mark.parametrize(
    ("names", "products", "width"),
    [
        ('custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "flash_gpu_forward"}', 2, 128),
        ('custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "flash_gpu_queries"}', 3, 128),
        ('custom_call_target="triton_kernel_call_ffi", backend_config={name = "flash_gpu_keys"}', 4, 128),
        ('custom_call_target="__cudnn$fmhaSoftmax"', 2, 80),
        ('custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"bmm1_grad_gemm1": 1}', 5, 80),
    ],
)
def test_products_and_bytes_of_a_gpus_attention_kernels(names, products, width):
    """Of each pair of a query and a key so many products of a head's width (ours: padded to a power of two); operands
    and results go through memory once."""
    text = f"""
ENTRY %main (v: s32[2,8,4], q: bf16[2,1024,12,80], k: bf16[2,512,4,80]) -> (bf16[2,1024,12,80], f32[2,12,1024]) {{
  %v = s32[2,8,4]{{2,1,0}} parameter(0)
  %q = bf16[2,1024,12,80]{{3,2,1,0}} parameter(1)
  %k = bf16[2,512,4,80]{{3,2,1,0}} parameter(2)
  ROOT %call.7 = (bf16[2,1024,12,80]{{3,2,1,0}}, f32[2,12,1024]{{2,1,0}}) custom-call(%v, %q, %k, %k), {names}
}}
"""
    program = hlo.read(text)
    assert costs.flops(program) == products * 2 * (2 * 12 * 1024 * 512) * width
    query, key, log_sum, visits = 2 * 1024 * 12 * 80 * 2, 2 * 512 * 4 * 80 * 2, 2 * 12 * 1024 * 4, 2 * 8 * 4 * 4
    assert costs.traffic(program) == 2 * query + 2 * key + log_sum + visits


@pytest.mark.slow
def test_shares_of_the_scores_that_kernels_visit():
    """By hand: of 4 x 4 tiles causality leaves 10; a window of 65 tokens in tiles of 64 leaves the diagonal and one
    beside it; without causality on both sides."""
    share = kernel_costs.visited_share
    assert share(Mask(causal=True), 256, 64, 64) == 10 / 16
    assert share(Mask(causal=True, window=65), 256, 64, 64) == 7 / 16
    assert share(Mask(window=65), 256, 64, 64) == 10 / 16
    assert share(Mask(causal=True), 256, 128, 64) == 12 / 16
    assert share(Mask(), 256, 128, 64) == 1.0
    config = from_mapping({"model": {"context_length": 1024, "vocab_size": 64, "dtype": "bfloat16"}})
    found = kernel_costs.visited_shares(config, topology.make("cpu:1"))
    assert found.keys() == kernel_costs.ATTENTION_KERNELS.keys()
    assert found["__cudnn$fmhaSoftmax"] == 36 / 64 and all(0.5 < x <= 0.75 for x in found.values())


RAGGED = """
%round (p: f32[32,4]) -> f32[32,4] {
  %p = f32[32,4]{1,0} parameter(0)
  ROOT %sum = f32[32,4]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}
}

%condition (p: f32[32,4]) -> pred[] {
  %p = f32[32,4]{1,0} parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[8,4], y: f32[32,4], n: s32[4]) -> f32[32,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[32,4]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %to = f32[32,4]{1,0} ragged-all-to-all(%x, %y, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3}}
  %back = f32[8,4]{1,0} ragged-all-to-all(%to, %x, %n, %n, %n, /*index=5*/%n), channel_id=2, replica_groups={{0,1,2,3}}
  ROOT %c = f32[32,4]{1,0} while(%to), condition=%condition, body=%round, NAMED
}
"""


def test_a_ragged_exchange_sends_the_rows_of_one_device_and_later_rounds_count_nowhere():
    def found(scope):
        program = hlo.read(RAGGED.replace("NAMED", f'metadata={{op_name="jit(f)/transpose(jvp())/{scope}/while"}}'))
        return [(c.kind, c.total) for c in collectives.find(program, {"expert": 4})], costs.traffic(program)

    sent = [("all-to-all", 3 / 4 * 8 * 4 * 4)] * 2
    assert found("seldom") == (sent, 2 * 2 * 8 * 4 * 4)
    assert found("often")[0] == [("all-reduce", 2 * 3 / 4 * 32 * 4 * 4), *sent]


def test_kernels_of_groups_move_the_rows_that_have_a_group():
    text = """
ENTRY %main (owners: s32[8], x: bf16[512,64], w: bf16[4,64,128]) -> bf16[512,128] {
  %owners = s32[8]{0} parameter(0)
  %x = bf16[512,64]{1,0} parameter(1)
  %w = bf16[4,64,128]{2,1,0} parameter(2)
  ROOT %y = bf16[512,128]{1,0} custom-call(%owners, %x, %w), backend_config={name="grouped_gpu_product"}
}
"""
    shares = grouped_shares({"expert": 4}, "ragged_all_to_all")
    moved = 8 * 4 + 512 * (64 + 128) * 2 / 2 + 4 * 64 * 128 * 2
    assert costs.traffic(hlo.read(text), shares) == moved
    assert costs.flops(hlo.read(text), shares) == 2 * 512 / 2 * 64 * 128

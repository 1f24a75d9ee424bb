"""What XLA compiles for NVIDIA GPUs without one: attention's kernels with every option on every chip, and train steps
in which nothing grows with the square of the row. In processes of their own, as their devices are others."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
        reason="needs the extra `cuda`",
    ),
]
# Attention alone: gradients of queries, keys and values, bfloat16 unless said otherwise.
ATTENTION = """
import functools, json, sys
from jaxformer.plan import topology
chip = sys.argv[1]
topology.prepare(chip + ":1x1")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jaxformer import masks
from jaxformer.functional import positions
from jaxformer.kernels.attention import distance_bias, flash_gpu, flash_gpu_decode

devices = topology.make(chip + ":1x1").devices
device = SingleDeviceSharding(devices[0])
jax.set_mesh(Mesh(np.array(devices), ("x",)))  # from JAX 0.11 on, Pallas asks the mesh which GPU it compiles for

def compiled(mask, length, heads=8, groups=8, width=64, dtype="bfloat16", bias=None, rows=2, **options):
    def loss(q, k, v, segments, table):
        made = None if bias is None else bias(table)
        options_ = {"soft_cap": None, "dropout_rate": 0.0, "rng": jax.random.key(0), **options}
        out = flash_gpu.attend(q, k, v, mask(segments), made, scale=0.1, **options_)
        return out.astype(jnp.float32).sum()
    shapes = [(rows, length, heads, width), *[(rows, length, groups, width)] * 2]
    given = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    given += [jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    given += [jax.ShapeDtypeStruct((32, heads), jnp.float32)]
    return jax.jit(jax.grad(loss, (0, 1, 2) if bias is None else (0, 1, 2, 4))).lower(*given).compile()

def packed(segments):
    return masks.causal() & masks.segments(segments)
"""
# A train step, from a config as JSON.
STEP = """
import json, re, sys
from jaxformer.plan import measures, topology
topology.prepare(sys.argv[1])
from jaxformer.config import from_mapping
from jaxformer.plan.compiled_step import compile_step
target = topology.make(sys.argv[1])
step = compile_step(from_mapping(json.loads(sys.argv[2])), target)
sizes = {tuple(map(int, found.split(","))) for found in re.findall(r"[a-z]+[0-9]*[a-z0-9]*\\[([0-9,]+)\\]", step.text)}
plan = measures.describe(step, target)
print(json.dumps({"attention": step.config.execution.attention, "sizes": sorted(sizes), "flops": plan["flops"],
                  "traffic": plan["traffic"], "memory": plan["memory"], "kernels": step.text.count("flash_gpu_keys"),
                  "collectives": plan["collectives"], "minimum": plan["minimum"],
                  "conditionals": step.text.count(" conditional(")}))
"""


def run(program, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_temporaries_of_packed_rows():
    """Forward and backward, 8 heads of 64: 20 MiB at 2 x 4096, 160 MiB at 2 x 32768. Nothing over [T, S]."""
    program = (
        ATTENTION
        + """
found = {n: compiled(packed, n) for n in (4096, 32768)}
print(json.dumps([[n, c.memory_analysis().temp_size_in_bytes / 2**20] for n, c in found.items()]))
"""
    )
    temporaries = dict(run(program, "h100"))
    assert temporaries[4096] <= 20 and temporaries[32768] <= 160, temporaries


def test_one_token_and_a_long_cache():
    """Joining the pieces takes little memory beside a cache of 128 MiB."""
    program = (
        ATTENTION
        + """
def one(query, key, value, places):
    mask = masks.Mask(key_index=places)
    return flash_gpu_decode.attend_one(query, key, value, mask, scale=0.1, soft_cap=None)

shapes = {"query": (1, 1, 32, 128), "key": (8, 65536, 128), "value": (8, 65536, 128)}
given = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=device) for shape in shapes.values()]
given += [jax.ShapeDtypeStruct((1, 65536), jnp.int32, sharding=device)]
print(json.dumps(jax.jit(one).lower(*given).compile().memory_analysis().temp_size_in_bytes))
"""
    )
    assert run(program, "h100") < 8 * 2**20


@pytest.mark.parametrize("chip", ["h100", "a100", "h200", "b200"])
def test_every_option_compiles(chip):
    """Three kernels, with Triton's own limits on registers and shared memory of the chip."""
    program = (
        ATTENTION
        + """
def t5(table, both=False):
    function = functools.partial(positions.t5_bias, bidirectional=both)
    return distance_bias.stepwise(function, table, *positions.t5_steps(both))

def alibi(table):
    return distance_bias.linear(functools.partial(positions.alibi, num_heads=8), positions.alibi_slopes(8))

cases = {
    **{f"{width} {dtype}": (packed, {"width": width, "dtype": dtype, "groups": 4})
       for width in (32, 80, 128, 256) for dtype in ("bfloat16", "float32")},
    "float16": (packed, {"dtype": "float16"}), "alibi": (packed, {"bias": alibi}), "t5": (packed, {"bias": t5}),
    "t5 both ways": (lambda s: masks.segments(s), {"bias": functools.partial(t5, both=True)}),
    "soft cap": (packed, {"soft_cap": 30.0}), "dropout": (packed, {"dropout_rate": 0.1}),
    "window": (lambda s: masks.causal() & masks.window(700) & masks.segments(s), {}),
    "prefix": (lambda s: masks.prefix(s[:, 0]), {}), "padding": (lambda s: masks.padding(s > 0), {}),
    "index": (lambda s: masks.Mask(causal=True, query_index=s, key_index=s), {}),
    "nothing": (lambda s: masks.Mask(), {}),
    "prefixes of documents": (lambda s: masks.prefix(s > 3) & masks.segments(s), {}),
    "odd": (packed, {"length": 1001, "heads": 6, "groups": 2}), "one key head": (packed, {"groups": 1}),
}
print(json.dumps({name: compiled(mask, **{"length": 2048, **options}).as_text().count("__gpu$xla.gpu.triton")
                  for name, (mask, options) in cases.items()}))
"""
    )
    assert set(run(program, chip).values()) == {3}


def test_every_pattern_compiles():
    """Three kernels for each group of patterns that share an order of tokens; nothing over [T, S]."""
    program = (
        ATTENTION
        + """
from jaxformer import patterns
table = patterns.random_table(64, 3, seed=0, heads=8)
cases = {
    "local": (1, lambda s: [patterns.local(256)]), "dilated": (1, lambda s: [patterns.dilated(64, 4)]),
    "strided": (2, lambda s: [patterns.strided(64)]), "fixed": (2, lambda s: [patterns.fixed(64, 8)]),
    "global": (1, lambda s: [patterns.local(64), patterns.global_tokens(4)]),
    "marked": (1, lambda s: [patterns.local(64), patterns.global_tokens(s > 100)]),
    "bigbird": (1, lambda s: [patterns.neighbours(64), patterns.random_blocks(64, table), patterns.global_tokens(64)]),
    "all": (2, lambda s: [patterns.strided(64), patterns.global_tokens(s > 100)]),
}
found = {}
for name, (calls, of) in cases.items():
    made = compiled(lambda s: packed(s) & masks.either(*of(s)), 4096)
    text = made.as_text()
    found[name] = [text.count("__gpu$xla.gpu.triton") - 3 * calls, text.count("[2,8,4096,4096]"),
                   made.memory_analysis().temp_size_in_bytes / 2**20]
print(json.dumps(found))
"""
    )
    for name, (more, squares, temporaries) in run(program, "h100").items():
        assert more == squares == 0 and temporaries < 90, (name, more, squares, temporaries)


def test_products_of_groups_are_kernels_on_every_chip():
    """Three of them, forward and backward; `ragged_dot` alone would hold the rows of every group, E times as many."""
    program = """
import json, sys
from jaxformer.plan import topology
topology.prepare(sys.argv[1] + ":1x1")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jaxformer.kernels.grouped import blocks_gpu
devices = topology.make(sys.argv[1] + ":1x1").devices
device = SingleDeviceSharding(devices[0])
jax.set_mesh(Mesh(np.array(devices), ("x",)))
found = {}
for dtype in ("bfloat16", "float16", "float32"):
    for rows, block in ((8192, 128), (512, 16)):
        def loss(x, w, sizes):
            return blocks_gpu.products_of(jax.nn.silu, (x,), (w,), sizes, block)[0].astype(jnp.float32).sum()
        given = [jax.ShapeDtypeStruct((rows, 1024), dtype), jax.ShapeDtypeStruct((8, 1024, 1088), jnp.float32),
                 jax.ShapeDtypeStruct((8,), jnp.int32)]
        made = jax.jit(jax.value_and_grad(loss, (0, 1)), in_shardings=device).lower(*given).compile()
        found[f"{dtype} {rows}"] = [made.as_text().count("__gpu$xla.gpu.triton"),
                                    made.memory_analysis().temp_size_in_bytes / 2**20]
print(json.dumps(found))
"""
    for chip in ("a100", "h100", "b200"):
        for name, (kernels, temporaries) in run(program, chip).items():
            assert kernels == 3 and temporaries < 100, (chip, name, kernels, temporaries)


SMALL = {"num_layers": 2, "width": 256, "num_heads": 4, "vocab_size": 1024, "dtype": "bfloat16", "layers": "scan"}


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("length, remat", [(8192, "none"), (32768, "full")])
def test_no_array_of_a_train_step_grows_with_the_square(family, length, remat):
    config = {
        "model": {**SMALL, "family": family, "context_length": length, "remat": remat},
        "mesh": {"fsdp": 8}, "train": {"batch_rows": 8, "steps_per_dispatch": 1},
    }  # fmt: skip
    if family == "bert":
        config["data"] = {"objective": "masked"}
    found = run(STEP, "h100:1x8", json.dumps(config))
    assert found["attention"] == "flash_gpu" and found["kernels"] >= 1
    for sizes in found["sizes"]:
        total = 1
        for size in sizes:
            total *= size
        assert total < length * length and list(sizes).count(length) < 2, sizes
    assert found["memory"]["fits"]


def test_the_plan_prices_the_kernels():
    """By hand: two causal layers of 4 heads of 64, one row a device, every layer computed again but for the product
    whose result nothing needs. Kernels multiply each pair of tokens that they visit 2, 2 again, 4 and 3 times."""
    length, width, hidden, vocab = 4096, 256, 1024, 1024
    config = {
        "model": {**SMALL, "context_length": length, "remat": "full"},
        "mesh": {"fsdp": 8}, "train": {"batch_rows": 8, "steps_per_dispatch": 1},
    }  # fmt: skip
    found = run(STEP, "h100:1x8", json.dumps(config))
    layer = 2 * length * (4 * width * width + 2 * width * hidden)
    logits = 2 * length * width * vocab
    pairs = 2 * width * length * length
    visited = 65 / 128  # in tiles of 64 x 64, and of 64 x 32
    expected = 2 * (4 * layer - 2 * length * width * hidden + (2 + 2 + 4 + 3) * visited * pairs)
    assert found["flops"]["program"] == pytest.approx(expected + 3 * logits, rel=0.002)
    assert found["attention"] == "flash_gpu"


@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_a_weight_is_gathered_twice_in_all(remat):
    """For the forward and the backward pass, though that computes with it twice."""
    config = {
        "model": {**SMALL, "num_layers": 8, "context_length": 1024, "remat": remat, "tie_embeddings": False},
        "mesh": {"fsdp": 8}, "train": {"batch_rows": 64, "steps_per_dispatch": 1},
    }  # fmt: skip
    found = run(STEP, "h100:1x8", json.dumps(config))
    gathered = sum(each["bytes"] for each in found["collectives"] if each["kind"] == "all-gather")
    once = 8 * 12 * 256**2 * 2 * 7 / 8  # layers, matrices, bytes, from others
    assert 2 * once < gathered < 2.2 * once, found["collectives"]  # what is more are tables


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_experts_get_the_chosen_tokens_alone(dispatch):
    """And no conditional waits for the host, but in the loop of later rounds."""
    config = {
        "model": {
            **SMALL, "context_length": 1024, "remat": "full",
            "feed_forward": {"kind": "experts", "count": 8, "top_k": 2, "width": 512, "dispatch": dispatch},
        },
        "mesh": {"data": 1, "fsdp": 2, "expert": 4}, "train": {"batch_rows": 64, "steps_per_dispatch": 1},
    }  # fmt: skip
    found = run(STEP, "h100:1x8", json.dumps(config))
    sent = sum(
        each["bytes"] for each in found["collectives"] if (each["kind"], each["axes"]) == ("all-to-all", "expert")
    )
    rows, width, layers = 64 * 1024 / 8 * 2 * 3 / 4, 256 * 2, 2
    gates = 3 * 4 * rows * layers  # one number there and two back
    assert sent == pytest.approx(5 * rows * width * layers + gates, rel=0.01)
    assert found["conditionals"] == 0


def test_experts_in_micro_batches():
    """What balances them is summed first; the loss is not needed there."""
    model = {**SMALL, "context_length": 256, "feed_forward": {"kind": "experts", "count": 4, "top_k": 2, "width": 128}}
    made = {"model": model, "execution": {"gradient_accumulation_steps": 2}}
    made["train"] = {"batch_rows": 8, "steps_per_dispatch": 1}
    assert run(STEP, "h100:1x1", json.dumps(made))["memory"]["fits"]

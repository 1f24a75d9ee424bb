"""The TPU kernel under masks of patterns, interpreted: equal to float64, nothing where nothing is seen; compiled."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import SEGMENTS, B, T, check

from jaxformer import masks, patterns
from jaxformer.config import from_mapping
from jaxformer.kernels.attention import splash, splash_patterns
from jaxformer.models.attention_support import unsupported_by
from jaxformer.plan.kernel_costs import visited_share

ROOT = Path(__file__).parent.parent.parent
TABLE = np.array([[1], [0]])
# name -> (patterns, which pairs meet, said once more)
CASES = {
    "strided": (patterns.strided(16), lambda t, s: abs(t - s) < 16 or (t - s) % 16 == 0),
    "dilated": ((patterns.dilated(5, 8),), lambda t, s: (t - s) % 8 == 0 and abs(t - s) < 40),
    "fixed": (patterns.fixed(64, 4), lambda t, s: t // 64 == s // 64 or s % 64 >= 60),
    "random": (
        (patterns.local(20), patterns.random_blocks(128, TABLE)),
        lambda t, s: abs(t - s) < 20 or s // 128 == TABLE[t // 128, 0],
    ),
}


def pairs_of(name, length):
    return np.array([[CASES[name][1](t, s) for s in range(length)] for t in range(length)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_exact(name, monkeypatch):
    monkeypatch.setattr(splash, "INTERPRET", True)
    dense = np.broadcast_to(pairs_of(name, T), (B, 1, T, T))
    causal = name != "dilated"
    mask = masks.either(*CASES[name][0]) & masks.segments(jnp.array(SEGMENTS))
    mask = masks.causal() & mask if causal else mask
    check("splash", mask, {"dense": dense, "segments": SEGMENTS, "causal": causal}, groups=2)


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 30)])
@pytest.mark.parametrize("name", CASES)
def test_lazy_masks_tile_by_tile(name, causal, window):
    """Also those tiles that tables of blocks decide; and the share of the tiles that hold a pair."""
    found = splash_patterns.lazy_mask(T, causal, window, CASES[name][0])
    t, s = np.arange(T)[:, None], np.arange(T)[None]
    wanted = pairs_of(name, T) & (s <= t if causal else True) & (abs(t - s) < (window or T))
    tiles = 0
    for row in range(0, T, 64):
        for column in range(0, T, 64):
            where = slice(row, row + 64), slice(column, column + 64)
            np.testing.assert_array_equal(found[where], wanted[where])
            tiles += bool(wanted[where].any())
    assert tiles / 16 <= splash_patterns.visited(T, 64, causal, window, CASES[name][0])
    assert found == splash_patterns.lazy_mask(T, causal, window, CASES[name][0])
    assert found != splash_patterns.lazy_mask(T, not causal, window, CASES[name][0])


def test_what_is_visited():
    near = (patterns.local(512),)
    assert splash.visited(2048, True, None, near) == splash.visited(2048, True, 512)
    assert splash.visited(2048, True, None, patterns.strided(64)) == visited_share(masks.causal(), 2048, 512, 512)
    own = patterns.random_blocks(128, np.arange(16)[:, None])  # its own block, which is a neighbour
    assert splash.visited(2048, False, None, (patterns.neighbours(128), own)) == 46 / 256


def test_what_it_refuses():
    sizes = {"width": 128, "context_length": 1024, "vocab_size": 64, "positions": "rotary"}
    for kind, why in (
        ("strided", None), ("fixed", None), ("dilated", None),
        ("longformer", "global tokens, which documents in a row have each their own"),
        ("bigbird", "global tokens, which documents in a row have each their own"),
    ):  # fmt: skip
        cfg = from_mapping({"model": {**sizes, "attention": {"kind": kind, "num_heads": 2}}}).model
        assert unsupported_by("splash", cfg) == why, kind

    def why(*found):
        return splash_patterns.unsupported(masks.either(*found))

    assert why(*patterns.fixed(8, 1)[1:]) == "patterns in which a token does not see itself"
    near, tables = patterns.local(3), np.zeros((2, 4, 1), int)
    assert (
        why(near, patterns.random_blocks(64, tables[0])) == "random blocks of 64 tokens (one table, multiples of 128)"
    )
    assert why(near, patterns.random_blocks(128, tables)).startswith("random blocks of 128 tokens of each head (one")
    assert splash_patterns.unsupported(masks.causal()) is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra `plan` (libtpu)")
def test_it_compiles_for_tpus():
    """A train step of a Sparse Transformer for a v5e slice: the kernel is in the program, the scores are not."""
    program = """
from jaxformer.config import from_mapping
from jaxformer.plan import topology
from jaxformer.plan.compiled_step import compile_step
topology.prepare("v5e:2x2")
model = {"num_layers": 2, "width": 256, "attention": {"kind": "strided", "num_heads": 4, "stride": 128},
         "context_length": 2048, "vocab_size": 1024, "dtype": "bfloat16", "positions": "rotary"}
config = from_mapping({"model": model, "mesh": {"fsdp": 4}, "train": {"batch_rows": 4, "steps_per_dispatch": 1}})
step = compile_step(config, topology.make("v5e:2x2"))
assert step.config.execution.attention == "splash"
print(step.text.count("tpu_custom_call"), "2048,2048]" in step.text)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels, scores = done.stdout.split()
    assert int(kernels) >= 3 and scores == "False"

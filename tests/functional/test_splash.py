"""The TPU kernel, interpreted: equal to the reference, exactly nothing where nothing is to be seen; what it refuses."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config
from kernel_cases import MASKS, H, T, arrays, check

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.attention import attention
from jaxformer.functional.attention_choice import choose
from jaxformer.kernels.attention import splash
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(splash, "INTERPRET", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, groups, soft_cap", [(name, *((2, None), (1, 1.5))[n % 2]) for n, name in enumerate(MASKS)]
)
def test_the_kernel_is_exact_for_every_mask_it_takes(name, groups, soft_cap):
    """Numbers of key heads and soft caps in turn: the kernel applies them in the same place whatever the mask."""
    check("splash", *MASKS[name], groups, soft_cap)


@pytest.mark.slow
def test_on_a_mesh_every_device_does_its_own_rows_and_heads():
    """Two key heads for four devices, which are repeated, as one would be."""
    mask, _ = MASKS["causal_window_segments"]
    q, k, v = arrays(2)

    def grads(q, k, v, mask):
        return jax.grad(lambda *x: jnp.sum(jnp.cos(attention(*x, mask, implementation="splash"))), (0, 1, 2))(q, k, v)

    alone = jax.jit(grads)(q, k, v, mask)
    with jax.set_mesh(make_mesh(MeshConfig(2, 1, 4), jax.devices())):
        compiled = jax.jit(grads).lower(q, k, v, mask).compile()
        found = compiled(q, k, v, mask)
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_exactly_is_refused():
    q, k, v = arrays(H)
    refused = [
        ((q, k[:, :128], v[:, :128]), {}, "different numbers of queries and keys"),
        ((q[:, :100], k[:, :100], v[:, :100]), {}, "rows of 100 tokens"),
        ((q[..., :32], k[..., :32], v), {}, "values of another width"),
        ((q[..., :32], k[..., :32], v[..., :32]), {}, "heads 32 wide"),
        ((q, k, v), {"bias": jnp.zeros((T, T))}, "a bias"),
        ((q, k, v), {"dropout_rate": 0.1, "rng": jax.random.key(0)}, "dropout"),
        ((q, k, v), {"mask": masks.prefix(jnp.array([1, 2]))}, "a mask with prefix"),
        ((q, k, v), {"mask": masks.dense(jnp.ones((T, T), bool))}, "a mask with dense"),
    ]
    for given, options, why in refused:
        with pytest.raises(ValueError, match=f"'splash' cannot do {why}.*accepted there: auto, xla, chunked"):
            attention(*given, implementation="splash", **options)
    for model, why in (({"positions": "alibi"}, "a bias"), ({"attention_dropout": 0.1}, "dropout"),
                       ({"context_length": 100}, "rows of 100 tokens"), ({"width": 128}, "heads 32 wide")):  # fmt: skip
        config = model_config(**{"width": 256, "vocab_size": 64, **model})
        with pytest.raises(ConfigError, match=f"config.execution.attention: splash cannot do {why}"):
            make_model(config, LossConfig(), Execution(attention="splash"))


def test_auto_takes_it_on_tpus_only_and_only_where_it_can():
    assert choose(1024, 1024, platform="tpu", able=("splash",)) == "splash"
    assert choose(1024, 1024, platform="tpu") == "xla"
    assert choose(512, 512, platform="tpu", able=("splash",)) == "xla"
    assert choose(1024, 1024, platform="cuda", able=("splash",)) == "xla"
    assert choose(1024, 1024, 2, platform="tpu") == "chunked"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra `plan` (libtpu)")
def test_it_compiles_for_tpus():
    """A train step for a v5e slice, packed documents on a mesh: the kernel is in the program, the scores are not."""
    program = """
from jaxformer.config import from_mapping
from jaxformer.plan import measures, topology
from jaxformer.plan.compiled_step import compile_step
topology.prepare("v5e:2x2")
model = {"num_layers": 2, "width": 256, "num_heads": 4, "num_kv_heads": 2, "context_length": 1024, "vocab_size": 1024,
         "dtype": "bfloat16", "layers": "scan", "positions": "rotary"}
config = from_mapping({"model": model, "mesh": {"fsdp": 2, "tensor": 2},
                       "train": {"batch_rows": 4, "steps_per_dispatch": 1}})
target = topology.make("v5e:2x2")
step = compile_step(config, target)
assert step.config.execution.attention == "splash"
print(step.text.count("tpu_custom_call"), "1024,1024]" in step.text, measures.describe(step, target)["flops"]["useful"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels, scores, useful = done.stdout.split()
    assert int(kernels) >= 3 and scores == "False"  # forward, and the backward pass's two
    assert 0.7 < float(useful) < 1.05  # the plan counts what the kernels compute

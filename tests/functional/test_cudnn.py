"""What cuDNN is asked for, as JAX's own `xla` path understands it: equal to the reference for every mask. The kernel
itself needs a GPU: `test_the_kernel_itself` runs wherever there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config
from kernel_cases import MASKS, B, H, T, arrays, check

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.attention import attention
from jaxformer.functional.attention_choice import choose, unavailable
from jaxformer.kernels.attention import cudnn
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh

PREFIX = np.array([3, 100])
DENSE = np.random.default_rng(0).random((B, 1, T, T)) < 0.02
ALL = MASKS | {
    "prefix": (masks.prefix(jnp.array(PREFIX)), {"prefix": PREFIX}),
    "causal_dense": (masks.causal() & masks.dense(jnp.array(DENSE)), {"causal": True, "dense": DENSE}),
}


@pytest.fixture
def as_xla(monkeypatch):
    monkeypatch.setattr(cudnn, "BACKEND", "xla")
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32, jnp.float64))


FAST = ("causal_dense",)


@pytest.mark.parametrize(
    "name, groups",
    [
        *(pytest.param(name, 2, marks=() if name in FAST else pytest.mark.slow) for name in ALL),
        pytest.param("causal_window_segments", 1, marks=pytest.mark.slow),
    ],
)
def test_it_is_asked_for_exactly_what_the_mask_says(name, groups, as_xla):
    mask, rules = ALL[name]
    check("cudnn", mask, rules, groups)


@pytest.mark.slow
def test_places_that_the_mask_numbers_itself(as_xla):
    q, k, v = arrays(H)
    index = jnp.arange(T)[::-1]
    mask = masks.Mask(causal=True, query_index=index, key_index=index)
    run = jax.jit(attention, static_argnames="implementation")
    for few, asked in ((q, mask), (q[:, :8], masks.causal())):
        found, right = (run(few, k, v, asked, implementation=name) for name in ("cudnn", "xla"))
        np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, groups", [("causal_window_segments", 2), ("causal_window_segments", 1), ("causal_dense", 2), ("none", 1)]
)
def test_on_a_mesh_every_device_does_its_own_rows_and_heads(name, groups, as_xla):
    mask, _ = ALL[name]
    q, k, v = arrays(groups)

    def grads(q, k, v, mask):
        return jax.grad(lambda *x: jnp.sum(jnp.cos(attention(*x, mask, implementation="cudnn"))), (0, 1, 2))(q, k, v)

    alone = jax.jit(grads)(q, k, v, mask)
    with jax.set_mesh(make_mesh(MeshConfig(2, 1, 4), jax.devices())):
        found = jax.jit(grads)(q, k, v, mask)
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_exactly_is_refused():
    q, k, v = arrays(H, jnp.bfloat16)
    refused = [
        (arrays(H), {}, r"float32 \(float16 and bfloat16\)"),
        ((q, k, v.astype(jnp.float32)), {}, "arrays of different dtypes"),
        ((q[..., :4], k[..., :4], v[..., :4]), {}, "heads 4 wide"),
        ((q[..., :8], k[..., :8], v), {}, "values of another width"),
        ((q, k, v), {"bias": jnp.zeros((T, T))}, "a bias"),
        ((q, k, v), {"soft_cap": 30.0}, "a soft cap"),
        ((q, k, v), {"dropout_rate": 0.1, "rng": jax.random.key(0)}, "dropout"),
        ((q[:, :9], k[:, :9], v[:, :9]), {"mask": masks.causal()}, "a mask over an odd number of tokens"),
    ]
    for given, options, why in refused:
        with pytest.raises(ValueError, match=f"'cudnn' cannot do {why}.*accepted there: auto, xla, chunked"):
            attention(*given, implementation="cudnn", **options)
    for model, why in (({"positions": "t5"}, "a bias"), ({"dtype": "float32"}, "float32"),
                       ({"attention_soft_cap": 30.0}, "a soft cap")):  # fmt: skip
        config = model_config(**{"dtype": "bfloat16", "vocab_size": 64, **model})
        with pytest.raises(ConfigError, match=f"config.execution.attention: cudnn cannot do {why}"):
            make_model(config, LossConfig(), Execution(attention="cudnn"))


def test_auto_takes_it_on_cuda_only_and_only_where_it_can():
    assert choose(1024, 1024, platform="cuda", able=("splash", "cudnn")) == "cudnn"
    assert choose(256, 256, platform="cuda", able=("cudnn",)) == "xla"
    assert choose(1024, 1024, platform="cuda", able=("splash",)) == "xla"
    assert choose(1024, 1024, platform="tpu", able=("cudnn",)) == "xla"


@pytest.mark.skipif(unavailable("cudnn") is not None, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ALL)
def test_the_kernel_itself(name):
    mask, _ = ALL[name]
    given = arrays(2, jnp.bfloat16)

    def run(implementation, q, k, v):
        return jnp.sum(jnp.cos(attention(q, k, v, mask, implementation=implementation).astype(jnp.float32)))

    for found, right in zip(*(jax.grad(run, (1, 2, 3))(i, *given) for i in ("cudnn", "xla")), strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(right), atol=0.03)

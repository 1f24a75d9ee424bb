"""One token's attention to a cache by the GPU kernels, interpreted: equal to the products that XLA does otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.functional import attention_layer, key_value_cache
from jaxformer.functional.layer import DecodeProgress
from jaxformer.kernels.attention import decode, flash_gpu, flash_gpu_blocks, flash_gpu_decode
from jaxformer.specs import abstract_params


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(flash_gpu, "INTERPRET", True)


def arrays(rows, heads, groups, slots, width, dtype="float32"):
    rng = np.random.default_rng(0)
    cache = (jnp.asarray(rng.normal(size=(rows * groups, slots, width)), dtype) for _ in range(2))
    return jnp.asarray(rng.normal(size=(rows, 1, heads, width)), dtype), *cache


@pytest.mark.parametrize(
    "shape, soft_cap",
    [
        pytest.param((2, 4, 2, 600, 24), 3.0, id="2 pieces, a part of a tile, capped"),
        pytest.param((2, 6, 2, 1024, 16), None, id="4 pieces", marks=pytest.mark.slow),
        pytest.param((3, 4, 1, 40, 64), None, id="1 piece", marks=pytest.mark.slow),
    ],
)
def test_equals_the_products(shape, soft_cap):
    query, key, value = arrays(*shape)
    places = np.tile(np.arange(shape[3], dtype=np.int32), (shape[0], 1))
    places[0, shape[3] // 3 :] = -1  # whole pieces are empty
    places[1, :5] = -1
    poisoned = np.repeat(places < 0, shape[2], axis=0)[..., None]
    options = {"scale": 0.3, "soft_cap": soft_cap}
    mask = masks.Mask(query_index=jnp.full((shape[0], 1), shape[3]), key_index=jnp.asarray(places))
    got = jax.jit(functools.partial(flash_gpu_decode.attend_one, **options))(
        query, np.where(poisoned, np.float32(np.nan), key), value, mask
    )
    with jax.enable_x64(True):
        wide = (np.asarray(x, np.float64) for x in (query, np.where(poisoned, 0, key), value))
        wanted = jax.jit(lambda *x: decode.attend_one(*x, mask, None, **options))(*wide)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_is_taken_where_it_was_measured_to_be_faster(monkeypatch):
    """And nowhere else: not for shorter caches, other widths, dtypes or chips."""
    row = {"chip": "CPU", "kernel": "decode", "width": 16, "bytes": 4, "length": 64, "block": [16, 16, 4, 1]}
    monkeypatch.setattr(flash_gpu_blocks, "measured", lambda: (row,))
    found = {args: flash_gpu_blocks.decodes(*args) for args in [
        ("cpu", 16, "float32", 64), ("cpu", 16, "float32", 65), ("cpu", 16, "float32", 63), ("cpu", 24, "float32", 64),
        ("cpu", 16, "bfloat16", 64), ("tpu", 16, "float32", 64),
    ]}  # fmt: skip
    assert list(found.values()) == [True, True, False, False, False, False]
    calls = []
    monkeypatch.setattr(flash_gpu_decode, "attend_one", lambda *args, **options: calls.append(args) or args[0])
    from jaxformer import ModelConfig

    cfg = ModelConfig(width=64, vocab_size=8)
    starts = DecodeProgress(jnp.ones(1, jnp.int32), jnp.zeros((), jnp.int32))
    for slots in (64, 32):
        cache = key_value_cache.LayerCache(*[jnp.ones((4, slots, 16))] * 2)
        context = attention_layer.Context(masks.causal(), cache=cache, progress=starts)
        run = lambda params, x, context=context: attention_layer.apply(params, x, cfg, context)[0]  # noqa: E731
        jax.eval_shape(run, abstract_params(attention_layer.specs(cfg)), jax.ShapeDtypeStruct((1, 1, 64), "float32"))
    assert len(calls) == 1

"""Decoding step by step equals the full forward pass, whatever the positions, window, heads and block arrangement."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config, params_of

from jaxformer import decoding
from jaxformer.config import MeshConfig
from jaxformer.functional import key_value_cache
from jaxformer.low_rank import Columns
from jaxformer.models import gpt
from jaxformer.parallel.mesh import make_mesh
from jaxformer.parallel.platforms import compiled_for

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")
WINDOWS = (None, 5)
KV_HEADS = (4, 2, 1)
BLOCKS = ("pre_norm", "post_norm", "parallel")
# Every two of these options meet once at least; one of them in the fast tests.
PAIRS = [
    (positions, WINDOWS[(i + j) % 2], kv_heads, BLOCKS[(i + j) % 3])
    for i, positions in enumerate(POSITIONS)
    for j, kv_heads in enumerate(KV_HEADS)
]
FAST = [PAIRS[13]]
# Positions whose bias is made of queries and keys, the cached ones in decoding.
DISENTANGLED = ({"kind": "disentangled", "span": 4, "max_distance": 9}, 5, 2, "pre_norm")
LENGTHS = np.array([3, 9, 1])  # prompts shorter and longer than the window
TOTAL = 14


def make(positions, window, kv_heads, block, **changes):
    # Schemes that can extend get a context that the sequence leaves behind.
    context = TOTAL if positions == "learned" else 6
    extra = {"rotary_scaling": "yarn", "rotary_factor": 2.0} if positions == "rotary" and block == "parallel" else {}
    return config(
        positions=positions,
        window=window,
        num_kv_heads=kv_heads,
        block=block,
        context_length=context,
        **extra,
        **changes,
    )


prefill = jax.jit(decoding.prefill, static_argnames=("cfg", "length"))


@functools.partial(jax.jit, static_argnames=("cfg", "length"))
def step_by_step(params, tokens, lengths, cfg, length):
    """Logits after the prompt and after each later token of every row, [B, TOTAL, V], and those of one full pass."""
    full = gpt.apply(params, tokens, cfg)
    hidden, cache = decoding.prefill(params, tokens, lengths, cfg, length)
    params = decoding.prepare_decode_params(params, cfg)

    def add(cache, _):
        fed = jnp.take_along_axis(tokens, jnp.minimum(lengths + cache.steps, TOTAL - 1)[:, None], axis=1)[:, 0]
        hidden, cache = decoding.step(params, fed, cfg, cache)
        return cache, decoding.logits(params, hidden)

    _, later = jax.lax.scan(add, cache, None, length=TOTAL - 1)
    return jnp.concatenate([decoding.logits(params, hidden)[None], later]).swapaxes(0, 1), full


def differences(cfg, params):
    """Largest difference from the full forward pass, relative to the largest logit."""
    tokens = np.random.default_rng(1).integers(0, cfg.vocab_size, (len(LENGTHS), TOTAL))
    got, full = map(np.asarray, step_by_step(params, tokens, LENGTHS, cfg, 2 * TOTAL))
    worst = [
        np.abs(got[b, : TOTAL - n + 1] - full[b, n - 1 :]).max() / np.abs(full).max() for b, n in enumerate(LENGTHS)
    ]
    assert got[0, 0].std() > 0.1  # not a model that says the same everywhere
    return max(worst)


def test_every_two_options_meet():
    options = (POSITIONS, WINDOWS, KV_HEADS, BLOCKS)
    for one, other in itertools.combinations(range(4), 2):
        wanted = set(itertools.product(options[one], options[other]))
        assert {(case[one], case[other]) for case in PAIRS} == wanted


@pytest.mark.parametrize(
    "case",
    [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in [DISENTANGLED, *PAIRS] if case not in FAST)],
    ids=str,
)
def test_each_step_equals_the_full_forward_pass(case):
    with jax.enable_x64(True):
        cfg = make(*case, dtype="float64")
        # Sinusoidal, ALiBi and T5 positions are float32 by definition, in both passes alike.
        assert differences(cfg, params_of(cfg, dtype=np.float64)) < 1e-12


@pytest.mark.slow
def test_each_step_of_experts_equals_the_full_forward_pass():
    with jax.enable_x64(True):
        kind = {"kind": "experts", "count": 4, "activation": "swiglu", "shared": 1, "every": 2}
        cfg = make("rotary", None, 2, "pre_norm", dtype="float64", feed_forward=kind)
        assert differences(cfg, params_of(cfg, dtype=np.float64)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", [PAIRS[8], PAIRS[15]], ids=str)
def test_each_step_equals_the_full_forward_pass_in_float32(case):
    changes = {"qk_norm": True, "attention_soft_cap": 5.0, "tie_embeddings": False}
    cfg = make(*case, **changes, norm="rms_norm", activation="swiglu")
    assert differences(cfg, params_of(cfg)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_bfloat16_matrices_by_columns_or_by_rows_are_the_same_model(rows):
    cfg = config(dtype="bfloat16", num_kv_heads=2, activation="swiglu", num_layers=1)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (rows, 4))

    @jax.jit
    def outs(params):
        _, cache = decoding.prefill(params, tokens, np.full(rows, 4), cfg, 8)
        assert cache.layers[0]["attention"].key.dtype == jnp.bfloat16
        ready = (decoding.prepare_decode_params(params, cfg, columns=columns) for columns in (False, True))
        return [decoding.logits(p, decoding.step(p, tokens[:, 0], cfg, cache)[0]) for p in (params, *ready)]

    plain, by_rows, by_columns = outs(params_of(cfg))
    np.testing.assert_allclose(by_rows, plain, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(by_columns, plain, rtol=0.02, atol=0.02)


def test_a_windowed_cache_has_window_size_whatever_the_length():
    def slots(cfg, length):
        return jax.eval_shape(lambda: key_value_cache.init_cache(cfg, 3, length, "float32")).key.shape[1]

    assert [slots(config(window=5), length) for length in (7, 5000, 3)] == [5, 5, 3]
    assert slots(config(), 128) == 128


def cost(cfg, length, rows=2):
    """FLOPs of one compiled step."""
    params, tokens = params_of(cfg), np.ones((rows, 4), np.int32)
    fill = functools.partial(decoding.prefill, cfg=cfg, length=length)
    _, cache = jax.eval_shape(fill, params, tokens, np.full(rows, 4))
    step = jax.jit(decoding.step, static_argnums=2)
    analysis = step.lower(params, tokens[:, 0], cfg, cache).compile().cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


@pytest.mark.slow
def test_work_per_token_is_one_compiled_step_that_grows_with_the_slots_only():
    cfg = config(positions="rotary", num_kv_heads=2, qk_norm=True)
    params = params_of(cfg)
    traces = []

    @jax.jit
    def step(token, cache):
        traces.append(cache.steps)
        return decoding.step(params, token, cfg, cache)

    _, cache = prefill(params, jnp.ones((1, 4), int), jnp.array([4]), cfg, 64)
    for _ in range(70):  # round the ring, too
        _, cache = step(jnp.array([1]), cache)
    assert len(traces) == 1
    flops = [cost(cfg, slots) for slots in (64, 1024)]
    products = (
        2 * cfg.num_layers * 2 * 2 * cfg.attention.num_heads * cfg.head_size
    )  # rows, layers, q.k and w.v, multiply-add
    assert products <= (flops[1] - flops[0]) / 960 < 2 * products  # reads grow with the slots and no faster
    windowed = config(positions="rotary", window=8)
    short, long = (cost(windowed, 4 + new) for new in (128, 4096))
    assert short == long


@pytest.mark.parametrize(("rows", "kv_heads"), [pytest.param(1, 4, marks=pytest.mark.slow), (3, 2)])
def test_no_step_of_the_loop_copies_the_cache(rows, kv_heads):
    cfg = config(num_kv_heads=kv_heads, width=64, context_length=128)
    params = params_of(cfg)

    @jax.jit
    def run(params, tokens, until):
        hidden, cache = decoding.prefill(params, tokens, jnp.full(rows, 4), cfg, 112)
        params = decoding.prepare_decode_params(params, cfg)

        def add(carry):
            hidden, cache = carry
            return decoding.step(params, jnp.argmax(decoding.logits(params, hidden), axis=-1), cfg, cache)

        return jax.lax.while_loop(lambda carry: carry[1].steps < until, add, (hidden, cache))

    text = run.lower(params, jnp.ones((rows, 4), int), 5).compile().as_text()
    assert re.search(r"body=", text)
    shape = rf"\[{rows * kv_heads},112,16\]"
    assert re.search(rf"dynamic-update-slice[^\n]*= f32{shape}|= f32{shape}[^\n]*dynamic-update-slice", text)
    body = re.search(r" while\(.*body=(%[\w.\-]+)", text)[1]
    lines = text.split(f"\n{body} ")[1].split("\n}")[0].splitlines()
    made = [line for line in lines if re.search(rf"= \w+{shape}", line) and "get-tuple-element(" not in line]
    assert len(made) == 2 * cfg.num_layers, made  # one write in place for each key and value, and nothing else
    assert not [line for line in made if "copy" in line or "transpose" in line]


def on_devices(**axes):
    sizes = MeshConfig(**{"data": 1, "fsdp": 1, "tensor": 1, **axes})
    return jax.set_mesh(make_mesh(sizes, jax.devices()[: math.prod(axes.values())]))


def test_weights_are_stored_by_columns_where_that_is_faster():
    cfg = config(num_layers=1)
    params = params_of(cfg)

    def stored(platform):
        with compiled_for(platform):
            block = decoding.prepare_decode_params(params, cfg)["blocks"][0]
        return {name: isinstance(block["mlp"][name], Columns) for name in ("w_up", "b_up")}

    with on_devices(fsdp=2):
        assert stored("cpu") == {"w_up": False, "b_up": False}
    assert stored("cpu") == {"w_up": True, "b_up": False}
    assert stored("tpu") == {"w_up": False, "b_up": False}


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 2}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("columns", [None, True], ids=["made_ready_there", "by_columns"])
def test_decoding_on_several_devices_writes_the_same(axes, columns):
    cfg = config(num_kv_heads=2, num_layers=1)
    params = params_of(cfg)
    ready = params if columns is None else decoding.prepare_decode_params(params, cfg, columns=columns)
    options = {"sampling": decoding.Sampling(temperature=0), "max_new_tokens": 5}
    prompts = [[1, 2, 3], [4, 5]]
    alone = decoding.generate(params, prompts, cfg, **options)
    beams = decoding.beam_search(params, prompts, cfg, beams=2, max_new_tokens=5)
    with on_devices(**axes):
        found = decoding.generate(ready, prompts, cfg, **options)
        same_beams = decoding.beam_search(ready, prompts, cfg, beams=2, max_new_tokens=5)
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_array_equal(same_beams.tokens, beams.tokens)

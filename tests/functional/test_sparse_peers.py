"""Longformer and BigBird compute what transformers computes, with random weights in float64, gradients too."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import attention, masks, patterns
from jaxformer.config import ModelConfig
from jaxformer.functional.layer import Context
from jaxformer.functional.longformer import longformer
from jaxformer.functional.sublayers import MIXERS
from jaxformer.kernels.attention import block_tables

pytestmark = pytest.mark.peers

ROWS, HEADS, WIDTH = 2, 2, 4
FLOAT32 = {"rtol": 1e-5, "atol": 2e-6}  # transformers' Longformer computes its softmax in float32
EACH = pytest.mark.parametrize("name", ["xla", "chunked"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_tables, "SMALLEST", 4)
    monkeypatch.setattr(block_tables, "LARGEST", 8)


def their_longformer():
    import torch
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    cfg = LongformerConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_window=[8], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0, vocab_size=10, sep_token_id=2,
    )  # fmt: skip
    return LongformerSelfAttention(cfg, 0).double().eval()


@pytest.mark.parametrize("packed", [False, True])
def test_longformer_s_layer(packed):
    """The sublayer with the first two tokens global, with and without documents in the row."""
    import torch

    theirs, length = their_longformer(), 24
    x = torch.randn(ROWS, length, HEADS * WIDTH).double()
    cfg = ModelConfig(
        family="bert", width=HEADS * WIDTH, context_length=length, positions="none",
        attention={"kind": "longformer", "num_heads": HEADS, "attention_window": 8, "global_tokens": 2},
    )  # fmt: skip
    scores = torch.zeros(ROWS, length).double()
    scores[:, :2] = 10000.0
    with torch.no_grad():
        wanted = theirs(
            x.clone(), attention_mask=scores, is_index_masked=scores < 0, is_index_global_attn=scores > 0,
            is_global_attn=True,
        )[0].numpy()  # fmt: skip
    with jax.enable_x64(True):
        params = {"w_out": np.eye(HEADS * WIDTH).reshape(HEADS, WIDTH, -1), "b_out": np.zeros(HEADS * WIDTH)}
        for name in ("query", "key", "value"):
            for ours, of in (("", name), ("global_", f"{name}_global")):
                weight, bias = (x.detach().numpy() for x in getattr(theirs, of).parameters())
                params[f"{ours}w_{name}"] = weight.T.reshape(-1, HEADS, WIDTH)
                params[f"{ours}b_{name}"] = bias.reshape(HEADS, WIDTH)
        assert params.keys() == MIXERS["longformer"].specs(cfg).keys()
        mask = masks.segments(jnp.zeros((ROWS, length), int)) if packed else None
        run = jax.jit(lambda params, x: MIXERS["longformer"].apply(params, x, cfg, Context(mask))[0])
        found = run(params, x.numpy())
        np.testing.assert_allclose(found, wanted, **FLOAT32)


@pytest.mark.parametrize("name, padded", [("xla", False), ("chunked", False), ("chunked", True)])
def test_longformer(name, padded):
    """Global tokens anywhere; outputs of real tokens, and gradients of all projections. In transformers these are NaN
    with padding, or with a row that has fewer global tokens than another."""
    import torch

    theirs, half, length = their_longformer(), 4, 24
    x = torch.randn(ROWS, length, HEADS * WIDTH).double()
    is_global, there = torch.zeros(ROWS, length, dtype=torch.bool), torch.ones(ROWS, length, dtype=torch.bool)
    is_global[0, [0, 7]] = True
    is_global[1, [3, 11] if not padded else [3]] = True
    there[1, 20:] = not padded
    scores = torch.zeros(ROWS, length).double()
    scores[is_global], scores[~there] = 10000.0, -10000.0
    wanted = theirs(
        x.clone(), attention_mask=scores, is_index_masked=scores < 0, is_index_global_attn=scores > 0,
        is_global_attn=True,
    )[0]  # fmt: skip
    torch.sum(torch.sin(wanted)[there]).backward()
    with jax.enable_x64(True):
        names = "query", "key", "value", "query_global", "key_global", "value_global"
        layers = [getattr(theirs, name) for name in names]
        weights = [
            (jnp.array(layer.weight.detach().numpy()), jnp.array(layer.bias.detach().numpy())) for layer in layers
        ]
        mask = masks.padding(jnp.array(there.numpy()))
        of = patterns.global_tokens(jnp.array(is_global.numpy()))

        def ours(weights):
            made = [
                (jnp.array(x.numpy()) @ w.T + b[None, None]).reshape(ROWS, length, HEADS, WIDTH) for w, b in weights
            ]
            out = longformer(
                tuple(made[:3]), tuple(made[3:]), mask, half + 1, of,
                lambda q, k, v, mask: attention(q, k, v, mask, implementation=name),
            )  # fmt: skip
            real = out.reshape(ROWS, length, -1)[there.numpy()]
            return jnp.sum(jnp.sin(real)), real

        (_, found), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(weights)
        np.testing.assert_allclose(found, wanted.detach().numpy()[there.numpy()], **FLOAT32)
        for layer, (weight, bias) in zip(layers, grads, strict=True) if not padded else ():
            np.testing.assert_allclose(weight, layer.weight.grad.numpy(), **FLOAT32)
            np.testing.assert_allclose(bias, layer.bias.grad.numpy(), **FLOAT32)


@EACH
def test_bigbird(name):
    """With the random blocks that it drew in training mode; in evaluation it counts block 0 more than once."""
    import torch
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    torch.manual_seed(0)
    block, blocks = 8, 12
    length = block * blocks
    cfg = BigBirdConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, block_size=block, num_random_blocks=2,
        max_position_embeddings=length, attention_type="block_sparse", hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_hidden_layers=1, vocab_size=20, intermediate_size=8,
    )  # fmt: skip
    theirs = BigBirdBlockSparseAttention(cfg, seed=0).double().train()
    x = torch.randn(ROWS, length, HEADS * WIDTH).double()
    there = torch.ones(ROWS, length).double()
    there[1, 50:] = 0
    blocked, band, start, end = BigBirdModel.create_masks_for_block_sparse_attn(there, block)
    drawn, draw = [], theirs._bigbird_block_rand_mask_with_head

    def spy(*args, **options):
        drawn.append(np.stack(draw(*args, **options)))
        return drawn[-1]

    theirs._bigbird_block_rand_mask_with_head = spy
    wanted, _ = theirs(
        x, band_mask=band, from_mask=start, to_mask=end, from_blocked_mask=blocked, to_blocked_mask=blocked
    )
    real = there.bool()
    torch.sum(torch.sin(wanted)[real]).backward()
    table = np.repeat(np.arange(blocks)[None, :, None], HEADS, 0).repeat(2, 2)
    table[:, 1:-1] = drawn[0]
    with jax.enable_x64(True):
        layers = [getattr(theirs, name) for name in ("query", "key", "value")]
        weights = [jnp.array(layer.weight.detach().numpy()) for layer in layers]
        biases = [jnp.array(layer.bias.detach().numpy()) for layer in layers]
        ends = patterns.global_tokens(block, last=block, length=length)
        mask = masks.either(patterns.neighbours(block), patterns.random_blocks(block, table), ends)
        mask = mask & masks.padding(jnp.array(real.numpy()))

        def ours(weights):
            made = [
                (jnp.array(x.numpy()) @ w.T + b[None, None]).reshape(ROWS, length, HEADS, WIDTH)
                for w, b in zip(weights, biases, strict=True)
            ]
            out = attention(*made, mask, scale=1 / math.sqrt(WIDTH), implementation=name)
            out = out.reshape(ROWS, length, -1)[real.numpy()]
            return jnp.sum(jnp.sin(out)), out

        (_, found), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(weights)
        np.testing.assert_allclose(found, wanted.detach().numpy()[real.numpy()], rtol=1e-10, atol=1e-12)
        for layer, grad in zip(layers, grads, strict=True):
            np.testing.assert_allclose(grad, layer.weight.grad.numpy(), rtol=1e-8, atol=1e-10)

"""LSH attention and reversible layers against transformers' Reformer, with its rotations: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import from_mapping, masks
from jaxformer.functional import lsh_layer, reversible
from jaxformer.functional.layer import Context
from jaxformer.functional.lsh import lsh_attention

pytestmark = pytest.mark.peers

B, T, H, K, CHUNK, BUCKETS, ROUNDS = 2, 32, 2, 4, 8, 8, 3
D, V = H * K, 11


def settings(causal, num_buckets=BUCKETS, **more):
    import transformers

    return transformers.ReformerConfig(
        hidden_size=D, num_attention_heads=H, attention_head_size=K, lsh_attn_chunk_length=CHUNK, num_hashes=ROUNDS,
        num_buckets=num_buckets, is_decoder=causal, lsh_attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
        hash_seed=0, lsh_num_chunks_before=1, lsh_num_chunks_after=0, axial_pos_embds=False, **more,
    )  # fmt: skip


def rotations(values=BUCKETS):
    """Those that the seed gives there."""
    import torch

    torch.manual_seed(0)
    return torch.randn((H, K, ROUNDS, values // 2), dtype=torch.float64).numpy()


def array(parameter):
    return parameter.detach().numpy()


@pytest.mark.parametrize(
    "causal, length, factors",
    [(False, T, None), (True, T, None), (True, 6, None), (False, T, [4, 6]), (True, T, [6, 4])],
)
def test_attention(causal, length, factors):
    import torch
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    torch.manual_seed(1)
    theirs = LSHSelfAttention(settings(causal, factors or BUCKETS), 0).double().eval()
    x = torch.randn(B, length, D).double().requires_grad_()
    wanted = theirs(x).hidden_states
    wanted.sin().sum().backward()

    def run(x, w_query, w_value):
        query_key, value = ((x @ w).reshape(B, length, H, K) for w in (w_query, w_value))
        out = lsh_attention(
            query_key, value, drawn, chunk=CHUNK, causal=causal, across_buckets=True, duplicates=True
        ).reshape(B, length, D)
        return jnp.sum(jnp.sin(out)), out

    weights = theirs.query_key.weight, theirs.value.weight
    with jax.enable_x64(True):
        drawn = jnp.asarray(rotations(sum(factors or [BUCKETS])))
        drawn = drawn if factors is None else tuple(jnp.split(drawn, [factors[0] // 2], axis=-1))
        given = jnp.asarray(array(x)), *(jnp.asarray(array(w).T) for w in weights)
        grads, out = jax.jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(*given)
    np.testing.assert_allclose(out, array(wanted), atol=1e-10)
    for found, other in zip(grads, (x.grad, *(w.grad.T for w in weights)), strict=True):
        np.testing.assert_allclose(found, other.numpy(), atol=1e-10)


def test_a_language_model(monkeypatch):
    """Its layers are ours; its head reads both streams side by side, where ours reads their mean."""
    import torch
    import transformers

    torch.manual_seed(1)
    cfg = settings(True, attn_layers=["lsh", "lsh"], feed_forward_size=12, vocab_size=V, max_position_embeddings=T,
                   tie_word_embeddings=False, hidden_act="relu")  # fmt: skip
    theirs = transformers.ReformerModelWithLMHead(cfg).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(0, V, (B, T))
    wanted = array(theirs(tokens).logits)
    w = {name: array(parameter) for name, parameter in theirs.state_dict().items()}

    def layer(n):
        at = f"reformer.encoder.layers.{n}."

        def normed(name):
            return {"scale": w[f"{at}{name}.layer_norm.weight"], "bias": w[f"{at}{name}.layer_norm.bias"]}

        return {
            "attention_norm": normed("attention"),
            "mlp_norm": normed("feed_forward"),
            "attention": {
                "w_query_key": w[at + "attention.self_attention.query_key.weight"].T.reshape(D, H, K),
                "w_value": w[at + "attention.self_attention.value.weight"].T.reshape(D, H, K),
                "w_out": w[at + "attention.output.dense.weight"].T.reshape(H, K, D),
            },
            "mlp": {
                "w_up": w[at + "feed_forward.dense.dense.weight"].T, "b_up": w[at + "feed_forward.dense.dense.bias"],
                "w_down": w[at + "feed_forward.output.dense.weight"].T,
                "b_down": w[at + "feed_forward.output.dense.bias"],
            },
        }  # fmt: skip

    monkeypatch.setattr(lsh_layer, "rotations_of", lambda cfg, rng: jnp.asarray(rotations()))
    ours = from_mapping({"model": {
        "num_layers": 2, "width": D, "context_length": T, "block": "reversible", "norm_epsilon": cfg.layer_norm_eps,
        "attention": {"kind": "lsh", "num_heads": H, "chunk": CHUNK, "rounds": ROUNDS, "buckets": BUCKETS,
                      "across_buckets": True, "duplicates": True},
        "feed_forward": {"width": 12, "activation": "relu"},
    }}).model  # fmt: skip
    x = w["reformer.embeddings.word_embeddings.weight"][tokens.numpy()]
    x = x + w["reformer.embeddings.position_embeddings.embedding.weight"][:T]
    with jax.enable_x64(True):
        layers = jax.tree.map(jnp.asarray, [layer(0), layer(1)])
        context = Context(masks.causal())
        run = jax.jit(lambda p, x: reversible.reversible_streams(p, (x, x), ours, context, x.dtype, False)[0])
        both = np.concatenate(run(layers, jnp.asarray(x)), axis=-1)
    centred = both - both.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + cfg.layer_norm_eps)
    normed = normed * w["reformer.encoder.layer_norm.weight"] + w["reformer.encoder.layer_norm.bias"]
    out = normed @ w["lm_head.decoder.weight"].T + w.get("lm_head.decoder.bias", w.get("lm_head.bias", 0))
    np.testing.assert_allclose(out, wanted, atol=1e-9)

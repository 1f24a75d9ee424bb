"""Funnel-Transformers against transformers', with both of its ways to compute relative attention: logits, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import from_mapping
from jaxformer.models import funnel

pytestmark = pytest.mark.peers
B, T, D, H, K, F, V = 2, 16, 16, 2, 8, 20, 30
BLOCKS = [1, 2, 1]


def theirs(way, separate):
    import torch
    import transformers

    torch.manual_seed(0)
    cfg = transformers.FunnelConfig(
        vocab_size=V, block_sizes=BLOCKS, num_decoder_layers=1, d_model=D, n_head=H, d_head=K, d_inner=F,
        layer_norm_eps=1e-9,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, attention_type=way, separate_cls=separate,
        truncate_seq=separate, pool_q_only=True, hidden_act="gelu_new",
    )  # fmt: skip
    made = transformers.FunnelForMaskedLM(cfg).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def as_ours(of):
    """Our parameters, from a function of the names that parameters have there."""

    def norm(name):
        return {"scale": of(f"{name}.weight"), "bias": of(f"{name}.bias")}

    def layer(at):
        a, f = f"funnel.{at}.attention.", f"funnel.{at}.ffn."
        return {
            "attention": {
                **{f"w_{ours}": of(f"{a}{name}_head.weight").T.reshape(D, H, K)
                   for ours, name in (("query", "q"), ("key", "k"), ("value", "v"))},
                "b_key": of(a + "k_head.bias").reshape(H, K), "b_value": of(a + "v_head.bias").reshape(H, K),
                "w_out": of(a + "post_proj.weight").T.reshape(H, K, D), "b_out": of(a + "post_proj.bias"),
                "w_position": of(a + "r_kernel"), "segment_keys": of(a + "seg_embed")[::-1],
                "content_bias": of(a + "r_w_bias"), "position_bias": of(a + "r_r_bias"),
                "segment_bias": of(a + "r_s_bias"),
            },
            "mlp": {"w_up": of(f + "linear_1.weight").T, "b_up": of(f + "linear_1.bias"),
                    "w_down": of(f + "linear_2.weight").T, "b_down": of(f + "linear_2.bias")},
            "attention_norm": norm(a + "layer_norm"), "mlp_norm": norm(f + "layer_norm"),
        }  # fmt: skip

    names = [f"encoder.blocks.{b}.{n}" for b, layers in enumerate(BLOCKS) for n in range(layers)]
    return {
        "embedding": {"tokens": of("funnel.embeddings.word_embeddings.weight")},
        "embedding_norm": norm("funnel.embeddings.layer_norm"),
        "blocks": jax.tree.map(lambda *each: np.stack(each), *map(layer, [*names, "decoder.layers.0"])),
        "head": {"bias": of("lm_head.bias")},
    }


@pytest.mark.parametrize("separate", [True, False])
def test_logits_and_gradients(separate):
    """With padding, which there is left out as keys, and sentence types."""
    import torch

    torch.manual_seed(1)
    tokens, real = torch.randint(1, V, (B, T)), torch.ones(B, T)
    real[1, 13 if separate else 12 :] = 0  # where all blocks end with whole pairs
    types = torch.zeros(B, T, dtype=torch.long)
    types[:, T // 2 :], types[:, 0] = 1, 2  # theirs for [CLS], which is of both sentences
    there = real.numpy().astype(bool)

    def of_theirs(way):
        """Logits of real tokens, and the parameters with their gradients."""
        model = theirs(way, separate)
        wanted = model(tokens, attention_mask=real, token_type_ids=types).logits
        (wanted.sin() * real[..., None]).sum().backward()
        return wanted.detach().numpy()[there], dict(model.named_parameters())

    ways = {way: of_theirs(way) for way in (("relative_shift", "factorized") if separate else ("relative_shift",))}
    cfg = from_mapping({"data": {"objective": "masked", "pairs": separate}, "model": {
        "family": "funnel", "attention": {"kind": "funnel", "num_heads": H}, "positions": "none", "block": "post_norm",
        "num_layers": 1 + sum(BLOCKS), "width": D, "context_length": T, "vocab_size": V, "norm_epsilon": 1e-9,
        "feed_forward": {"width": F, "activation": "gelu_tanh"},
        "funnel": {"blocks": BLOCKS, "decoder_layers": 1, "separate_cls": separate},
    }}).model  # fmt: skip

    def total(params):
        out = funnel.apply(
            params, jnp.asarray(tokens.numpy()), cfg, segments=jnp.asarray(there.astype(np.int32)),
            token_types=jnp.asarray(np.where(types == 2, -1, types)),
        )  # fmt: skip
        return jnp.sum(jnp.where(there[..., None], jnp.sin(out), 0)), out

    with jax.enable_x64(True):
        parameters = ways["relative_shift"][1]
        ours = as_ours(lambda name: parameters[_tied(name, parameters)].detach().numpy())
        grads, out = jax.jit(jax.grad(total, has_aux=True))(ours)
    for wanted, parameters in ways.values():
        np.testing.assert_allclose(out[there], wanted, atol=1e-5, rtol=1e-5)
        found = as_ours(lambda name, parameters=parameters: parameters[_tied(name, parameters)].grad.numpy())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), grads, found)


def _tied(name, parameters):
    return name if name in parameters else "lm_head.weight"

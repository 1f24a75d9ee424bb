"""Mixtures of experts against transformers' layers with the same weights: Mixtral, OLMoE, Qwen3-MoE, Switch."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import router
from jaxformer.functional.experts import capacity_mlp, expert_mlp

pytestmark = pytest.mark.peers
B, T, D, F, E, K = 2, 12, 8, 6, 5, 2


def array(x):
    return x.detach().numpy()


def block_of(name, normalized):
    """Their layer, with random weights, and the names of its fields."""
    import torch
    import transformers as peers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shape = {"hidden_size": D, "num_experts_per_tok": K, "hidden_act": "silu"}
    made = {
        "mixtral": (MixtralSparseMoeBlock, peers.MixtralConfig, {"intermediate_size": F, "num_local_experts": E}),
        "olmoe": (OlmoeSparseMoeBlock, peers.OlmoeConfig, {"intermediate_size": F, "num_experts": E}),
        "qwen3": (Qwen3MoeSparseMoeBlock, peers.Qwen3MoeConfig, {"moe_intermediate_size": F, "num_experts": E}),
    }
    block, config, more = made[name]
    fields = {} if name == "mixtral" else {"norm_topk_prob": normalized}
    torch.manual_seed(0)
    layer = block(config(**shape, **more, **fields)).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("name, normalized", [("mixtral", True), ("olmoe", False), ("olmoe", True), ("qwen3", False)])
def test_sparse_block(name, normalized):
    import torch

    layer = block_of(name, normalized)
    x = torch.randn(B, T, D)
    wanted = layer(x)
    wanted = array(wanted[0] if isinstance(wanted, tuple) else wanted)
    gate_up = np.swapaxes(array(layer.experts.gate_up_proj), 1, 2)
    weights = {"w_gate": gate_up[..., :F], "w_up": gate_up[..., F:]}
    weights["w_down"] = np.swapaxes(array(layer.experts.down_proj), 1, 2)
    flat = jnp.asarray(array(x).reshape(-1, D))
    gates, chosen = router.route(flat @ array(layer.gate.weight).T, K, renormalize=normalized)
    for how in ("blocks", "ragged"):
        got = expert_mlp(flat, gates, chosen, **weights, activation="swiglu", implementation=how)
        np.testing.assert_allclose(got.reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("capacity", [1, 3, T])
def test_switch_layer(capacity):
    import torch
    import transformers
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    torch.manual_seed(0)
    cfg = transformers.SwitchTransformersConfig(
        d_model=D, d_ff=F, num_experts=E, expert_capacity=capacity, dropout_rate=0.0, router_jitter_noise=0.0
    )
    layer = SwitchTransformersSparseMLP(cfg).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(B, T, D)
    wanted = array(layer(x))
    experts = [layer.experts[f"expert_{e}"] for e in range(E)]
    w_up, w_down = (np.stack([array(getattr(e, name).weight).T for e in experts]) for name in ("wi", "wo"))
    tokens = jnp.asarray(array(x))
    gates, chosen = router.route(tokens @ array(layer.router.classifier.weight).T, 1)
    got = capacity_mlp(tokens, gates, chosen, capacity, w_up, w_down, activation="relu")
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    assert (capacity == T) == (np.abs(wanted).sum(axis=-1) > 0).all()

"""XLNet in `transformers` and here, with the same random weights: both streams, logits and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config
from test_peers import check_shapes

from jaxformer.models import transformer_xl, xlnet

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings

B, T, P, L, D, H, F, V = 2, 13, 4, 2, 16, 2, 20, 30
K = D // H
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))
SEGMENTS = np.array([[1] * 6 + [2] * 7, [1] * T])


def orders():
    """Two orders of which each document has context, and the places that are predicted, not from left to right."""
    places = np.array([[4, 9, 1, 11], [12, 3, 7, 0]])
    order = np.zeros((B, T), int)
    for row, each in enumerate(places):
        order[row, each] = np.arange(1, P + 1)
    return order, places


def model_of(**fields):
    """A model of `transformers` in float64, every weight random; its positions in float64 too."""
    import torch
    from transformers import XLNetConfig, XLNetLMHeadModel

    torch.manual_seed(0)
    model = XLNetLMHeadModel(XLNetConfig(
        vocab_size=V, d_model=D, n_layer=L, n_head=H, d_inner=F, ff_activation="gelu", dropout=0.0,
        summary_last_dropout=0.0, layer_norm_eps=1e-5, **fields,
    ))  # fmt: skip
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.mean() > 0.9))

    def encoding(qlen, klen, bsz=None, device=None):
        inverse = 1 / torch.pow(10000, torch.arange(0, D, 2.0).double() / D)
        last = -qlen if fields.get("attn_type", "bi") == "bi" else -1
        return model.transformer.positional_embedding(torch.arange(klen, last, -1.0).double(), inverse, bsz)

    model.transformer.relative_positional_encoding = encoding
    return model


def ours_of(w):
    """Their parameters, or the gradients of those, as ours; a linear map. Biases that they have not are zeros."""

    def norm(name):
        return {"scale": w[f"{name}.layer_norm.weight"], "bias": w[f"{name}.layer_norm.bias"]}

    def linear(name, suffix):
        return {f"w_{suffix}": w[f"{name}.weight"].T, f"b_{suffix}": w[f"{name}.bias"]}

    def block(layer):
        h = f"transformer.layer.{layer}"
        a = f"{h}.rel_attn"
        none, attention = np.zeros((H, K)), {}
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            attention |= {f"w_{ours}": w[f"{a}.{theirs}"], f"b_{ours}": none}
        attention |= {"w_out": w[f"{a}.o"].transpose(1, 2, 0), "b_out": np.zeros(D)}
        attention["positions"] = {
            "w_distance": w[f"{a}.r"], "content_bias": w[f"{a}.r_w_bias"], "distance_bias": w[f"{a}.r_r_bias"],
        }  # fmt: skip
        return {
            "attention": attention, "attention_norm": norm(a), "mlp_norm": norm(f"{h}.ff"),
            "mlp": linear(f"{h}.ff.layer_1", "up") | linear(f"{h}.ff.layer_2", "down"),
        }  # fmt: skip

    return {
        "embedding": {"tokens": w["transformer.word_embedding.weight"]}, "head": {"bias": w["lm_loss.bias"]},
        "query": {"start": w["transformer.mask_emb"].reshape(D)},
        "blocks": jax.tree.map(lambda *layers: np.stack(layers), *map(block, range(L))),
    }  # fmt: skip


def exact(**fields):
    from decoding.small_models import Exact

    return model_config(
        Exact, block="post_norm", num_layers=L, width=D, num_heads=H, mlp_width=F, context_length=T, vocab_size=V,
        positions="relative", dtype="float64", **fields,
    )  # fmt: skip


def compare(model, theirs, ours):
    """Their logits [B, N, V] and gradients, and those of `ours(params)`."""
    import torch

    parameters = dict(model.named_parameters())
    weight = np.random.default_rng(1).normal(size=theirs.shape)
    pulled = torch.autograd.grad((theirs * torch.tensor(weight)).sum(), list(parameters.values()), allow_unused=True)
    g = {
        name: np.zeros(p.shape) if each is None else each.numpy()
        for (name, p), each in zip(parameters.items(), pulled, strict=True)
    }
    params = jax.tree.map(jnp.asarray, ours_of({name: p.detach().numpy() for name, p in parameters.items()}))

    @jax.jit
    def both(params, weight):
        found, back = jax.vjp(ours, params)
        return found, *back(weight)

    found, mine = both(params, jnp.asarray(weight))
    np.testing.assert_allclose(found, theirs.detach().numpy(), atol=1e-10)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(ours_of(g)), strict=True):
        name = jax.tree_util.keystr(path)
        if "b_query" in name or "b_key" in name or "b_value" in name or "b_out" in name:
            continue  # which they have not
        np.testing.assert_allclose(a, b, atol=1e-9, err_msg=name)
    return params


def test_both_streams():
    import torch

    order, places = orders()
    o_i, o_j = order[:, :, None], order[:, None, :]
    seen = ((o_j < o_i) | ((o_i == 0) & (o_j == 0))) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    mapping = np.zeros((B, P, T))
    mapping[np.arange(B)[:, None], np.arange(P)[None], places] = 1
    model = model_of()
    theirs = model(
        torch.tensor(TOKENS), perm_mask=torch.tensor(~seen).double(), target_mapping=torch.tensor(mapping)
    ).logits
    cfg = exact(family="xlnet")
    fields = {"order": jnp.asarray(order), "predicted": jnp.asarray(places), "segments": jnp.asarray(SEGMENTS)}
    with jax.enable_x64(True):
        params = compare(model, theirs, lambda p: xlnet.apply(p, jnp.asarray(TOKENS), cfg, **fields))
    check_shapes(params, xlnet.specs(cfg))


def test_the_memory_of_a_transformer_xl():
    """Their one-directional model with `mems` is a Transformer-XL; its memory are the states of an earlier call."""
    import torch

    model, memory = model_of(attn_type="uni", mem_len=5, use_mems_eval=True), 5
    before, row = torch.tensor(TOKENS[:, :memory]), torch.tensor(TOKENS[:, memory:])
    theirs = model(row, mems=model(before).mems).logits
    cfg = exact(family="transformer_xl", memory=memory)

    def ours(params):
        fields = {"memory_tokens": jnp.asarray(TOKENS[:, :memory])}
        gpt = {name: params[name] for name in ("embedding", "blocks")}
        logits = transformer_xl.apply(gpt, jnp.asarray(TOKENS[:, memory:]), cfg, **fields)
        return logits + params["head"]["bias"][None, None]

    with jax.enable_x64(True):
        compare(model, theirs, ours)

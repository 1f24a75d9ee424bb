"""DeBERTa v1 and v2/v3 in `transformers` and here, with the same random weights: states and every gradient; and the
enhanced mask decoder, which `transformers` has not, from its own last layer called twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_peers import check_shapes

from jaxformer.config import Bert, Dense, Disentangled, Execution, ModelConfig, Softmax
from jaxformer.functional.block import stack
from jaxformer.functional.layer import Context
from jaxformer.functional.layers import layer_norm
from jaxformer.functional.position_encodings import shared_positions
from jaxformer.masks import segments
from jaxformer.models import bert, mask_decoder

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings

B, T, L, D, H, F, V = 2, 19, 2, 16, 2, 20, 30
K = D // H
TOKENS = np.random.default_rng(0).integers(1, V, (B, T))
REAL = np.array([[1] * T, [1] * (T - 5) + [0] * 5])
KINDS = {
    "v3": Disentangled(span=4, max_distance=16),
    "v2 of its own projections": Disentangled("both", "clipped", 5, shared_projections=False, norm=False),
    "v2 c2p": Disentangled("c2p", span=4, max_distance=16, norm=False),
    "v1": Disentangled("both", "clipped", 6, shared_projections=False, norm=False),
}


def model_of(name, kind):
    """A model of `transformers` in float64, every weight random."""
    import torch
    from transformers import DebertaConfig, DebertaModel, DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    types = {"both": ["c2p", "p2c"]}.get(kind.terms, [kind.terms])
    fields = {
        "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "intermediate_size": F,
        "relative_attention": True, "pos_att_type": types, "max_position_embeddings": 32, "type_vocab_size": 0,
        "position_biased_input": False, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
    }  # fmt: skip
    log = kind.distance == "log"
    fields["max_relative_positions"] = kind.max_distance if log else kind.span
    if name == "v1":
        model = DebertaModel(DebertaConfig(**fields))
    else:
        model = DebertaV2Model(DebertaV2Config(
            position_buckets=kind.span if log else -1, share_att_key=kind.shared_projections,
            norm_rel_ebd="layer_norm" if kind.norm else "none", **fields,
        ))  # fmt: skip
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ours_of(w, kind):
    """Their parameters, or the gradients of those, as ours; a linear map."""

    def norm(name):
        return {"scale": w[f"{name}.LayerNorm.weight"], "bias": w[f"{name}.LayerNorm.bias"]}

    def linear(name, suffix):
        return {f"w_{suffix}": w[f"{name}.weight"].T, f"b_{suffix}": w[f"{name}.bias"]}

    def heads(name, suffix):
        return {f"{key}": value.reshape(*value.shape[:-1], H, K) for key, value in linear(name, suffix).items()}

    def block(layer):
        h = f"encoder.layer.{layer}"
        theirs, attention = f"{h}.attention.self", {}
        if f"{theirs}.in_proj.weight" in w:  # v1
            q, k, v = np.split(w[f"{theirs}.in_proj.weight"].reshape(H, 3 * K, D).transpose(2, 0, 1), 3, axis=-1)
            q_bias, v_bias = w[f"{theirs}.q_bias"].reshape(H, K), w[f"{theirs}.v_bias"].reshape(H, K)
            attention |= {"w_query": q, "w_key": k, "w_value": v, "b_query": q_bias, "b_key": 0 * q_bias,
                          "b_value": v_bias}  # fmt: skip
            key = w[f"{theirs}.pos_proj.weight"].T.reshape(D, H, K)
            attention["positions"] = {"w_key": key, "b_key": 0 * q_bias, **heads(f"{theirs}.pos_q_proj", "query")}
        else:
            for name in ("query", "key", "value"):
                attention |= heads(f"{theirs}.{name}_proj", name)
            if not kind.shared_projections:
                attention["positions"] = heads(f"{theirs}.pos_key_proj", "key")
                attention["positions"] |= heads(f"{theirs}.pos_query_proj", "query")
        out = linear(f"{h}.attention.output.dense", "out")
        attention |= {**out, "w_out": out["w_out"].reshape(H, K, D)}
        return {
            "attention": attention, "attention_norm": norm(f"{h}.attention.output"), "mlp_norm": norm(f"{h}.output"),
            "mlp": linear(f"{h}.intermediate.dense", "up") | linear(f"{h}.output.dense", "down"),
        }  # fmt: skip

    embedding = {"tokens": w["embeddings.word_embeddings.weight"]}
    embedding["distances"] = w["encoder.rel_embeddings.weight"][: 2 * kind.span]
    if kind.norm:
        embedding |= {f"distance_{name}": value for name, value in norm("encoder").items()}
    return {
        "embedding": embedding, "embedding_norm": norm("embeddings"),
        "blocks": jax.tree.map(lambda *layers: np.stack(layers), *map(block, range(L))),
    }  # fmt: skip


def config_of(kind, **fields):
    scale = 1 / float(np.sqrt(np.float32(K) * kind.num_terms))  # theirs is rounded to float32
    return ModelConfig(
        family="bert", block="post_norm", num_layers=L, width=D, attention=Softmax(H, scale=scale),
        feed_forward=Dense(F), context_length=32, vocab_size=V, norm_epsilon=1e-7, positions=kind, **fields,
    )  # fmt: skip


def states(params, cfg, layers=stack):
    """Ours in float64, which no config has: what `backbone.run` does."""
    e = params["embedding"]
    x = layer_norm(e["tokens"][TOKENS], **params["embedding_norm"], epsilon=1e-7)
    mask, execution = segments(jnp.asarray(REAL)), Execution(attention="xla", layers="scan")
    context = Context(mask, shared=shared_positions(e, cfg), execution=execution)
    return layers(params["blocks"], x, cfg, [context])[0]


def compare(theirs, parameters, ours, params, kind, tolerance):
    """The value of a scalar function of the states, and its gradient by every parameter."""
    import torch

    weight = np.random.default_rng(1).normal(size=(B, T, D)) * REAL[:, :, None]
    out = theirs()
    gradients = torch.autograd.grad((out * torch.tensor(weight)).sum(), list(parameters.values()), allow_unused=True)

    @jax.jit
    def both(params, weight):
        found, pulled = jax.vjp(ours, params)
        return found, *pulled(weight)

    found, mine = both(params, jnp.asarray(weight))
    np.testing.assert_allclose(found * REAL[:, :, None], out.detach().numpy() * REAL[:, :, None], atol=tolerance)
    g = {
        name: np.zeros(p.shape) if each is None else each.numpy()
        for (name, p), each in zip(parameters.items(), gradients, strict=True)
    }
    wanted = {**ours_of(g, kind), **{name: value for name, value in g.items() if name == "mask_decoder"}}
    for path, each in jax.tree_util.tree_leaves_with_path(wanted):
        name = jax.tree_util.keystr(path)
        if "b_key" in name and "in_proj" in " ".join(g):
            continue  # which v1 has not
        mine_here = mine
        for key in path:
            mine_here = mine_here[key.key]
        np.testing.assert_allclose(mine_here, each, atol=30 * tolerance, err_msg=name)


@pytest.mark.parametrize("name", KINDS)
def test_the_states_and_gradients_of_transformers(name):
    import torch

    kind = KINDS[name]
    model, cfg = model_of(name, kind), config_of(kind)
    tokens, real = torch.tensor(TOKENS), torch.tensor(REAL)

    def theirs():
        return model(tokens, attention_mask=real).last_hidden_state

    parameters = dict(model.named_parameters())
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, ours_of({n: p.detach().numpy() for n, p in parameters.items()}, kind))
        check_shapes(params, {name: bert.specs(cfg)[name] for name in params})
        # v1's norm is float32 there.
        compare(theirs, parameters, lambda p: states(p, cfg), params, kind, 2e-6 if name == "v1" else 1e-10)
    rounded = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), params)
    x = jax.jit(lambda p: bert.hidden(p, jnp.asarray(TOKENS), cfg, segments=jnp.asarray(REAL)))(rounded)
    wanted = theirs().detach().numpy()
    np.testing.assert_allclose(np.asarray(x)[REAL == 1], wanted[REAL == 1], atol=2e-5)


def test_the_enhanced_mask_decoder_is_their_last_layer_twice():
    import torch

    kind = KINDS["v3"]
    model, cfg = model_of("v3", kind), config_of(kind, bert=Bert(0, mask_decoder="enhanced"))
    table = torch.randn(32, D, dtype=torch.float64, requires_grad=True)
    real = torch.tensor(REAL)

    def theirs():
        hidden = model(torch.tensor(TOKENS), attention_mask=real, output_hidden_states=True).hidden_states[-2]
        encoder = model.encoder
        query, distances = hidden + table[:T], encoder.get_rel_embedding()
        mask, places = encoder.get_attention_mask(real), encoder.get_rel_pos(hidden)
        for _ in range(2):
            query = encoder.layer[-1](hidden, mask, query_states=query, relative_pos=places, rel_embeddings=distances)[
                0
            ]
        return query

    parameters = dict(model.named_parameters()) | {"mask_decoder": table}
    with jax.enable_x64(True):
        params = ours_of({n: p.detach().numpy() for n, p in parameters.items()}, kind)
        params = jax.tree.map(jnp.asarray, {**params, "mask_decoder": table.detach().numpy()})

        def ours(p):
            def layers(*args):
                return mask_decoder.layers({"positions": p["mask_decoder"]}, jnp.arange(T), *args)

            return states(p, cfg, layers)

        compare(theirs, parameters, ours, params, kind, 1e-10)
    assert bert.specs(cfg)["mask_decoder"]["positions"].shape == (32, D)

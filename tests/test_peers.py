"""The same weights in `transformers` (on torch) and here give the same numbers: GPT-2, Llama, BERT, positions.

Torch's own attention is there to be measured.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config

from jaxformer.benchmarks import attention
from jaxformer.functional import positions as pos
from jaxformer.models import bert, gpt
from jaxformer.specs import abstract_params

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings

B, T, L, D, H, K, F, V = 2, 24, 2, 32, 4, 8, 48, 50
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))


def weights_of(model):
    """name -> float32 NumPy; every parameter moved away from its initial value, so that none is forgotten."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def run(model, *names, **inputs):
    import torch

    with torch.no_grad():
        out = model(**{k: torch.tensor(v) for k, v in inputs.items()})
    return [getattr(out, name).numpy() for name in names]


def stacked(get):
    """Blocks' parameters, `get(layer)` of each, on a leading layer axis."""
    return jax.tree.map(lambda *layers: np.stack(layers), *[get(layer) for layer in range(L)])


def check_shapes(params, specs):
    """Every parameter of ours has been given, in its own shape."""
    shapes = jax.tree.map(lambda a: a.shape, abstract_params(specs), is_leaf=lambda x: hasattr(x, "shape"))
    assert jax.tree.map(np.shape, params) == shapes


def test_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=L, n_embd=D, n_head=H, n_inner=F, n_positions=T, vocab_size=V))
    w = {name.removeprefix("transformer."): value for name, value in weights_of(model).items()}

    def norm(name):
        return {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

    def block(layer):
        h = f"h.{layer}"
        matrices, biases = (np.split(w[f"{h}.attn.c_attn.{kind}"], 3, axis=-1) for kind in ("weight", "bias"))
        attention = {f"w_{n}": m.reshape(D, H, K) for n, m in zip(("query", "key", "value"), matrices, strict=True)}
        attention |= {f"b_{n}": b.reshape(H, K) for n, b in zip(("query", "key", "value"), biases, strict=True)}
        attention |= {"w_out": w[f"{h}.attn.c_proj.weight"].reshape(H, K, D), "b_out": w[f"{h}.attn.c_proj.bias"]}
        return {
            "attention": attention, "attention_norm": norm(f"{h}.ln_1"), "mlp_norm": norm(f"{h}.ln_2"),
            "mlp": {"w_up": w[f"{h}.mlp.c_fc.weight"], "b_up": w[f"{h}.mlp.c_fc.bias"],
                    "w_down": w[f"{h}.mlp.c_proj.weight"], "b_down": w[f"{h}.mlp.c_proj.bias"]},
        }  # fmt: skip

    params = {
        "embedding": {"tokens": w["wte.weight"], "positions": w["wpe.weight"]},
        "blocks": stacked(block), "final_norm": norm("ln_f"),
    }  # fmt: skip
    cfg = model_config(num_layers=L, width=D, num_heads=H, mlp_width=F, context_length=T, vocab_size=V,
                      activation="gelu_tanh")  # fmt: skip
    check_shapes(params, gpt.specs(cfg))
    (wanted,) = run(model, "logits", input_ids=TOKENS)
    np.testing.assert_allclose(jax.jit(lambda p: gpt.apply(p, TOKENS, cfg))(params), wanted, rtol=1e-5, atol=2e-5)


SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn"}


def llama(scaling, factor=4.0):
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": SCALINGS[scaling], "rope_theta": 10_000.0}
    if scaling != "none":
        rope["factor"] = factor
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = 16
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=L, hidden_size=D, num_attention_heads=H, num_key_value_heads=2, intermediate_size=F,
        vocab_size=V, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters=rope,
    ))  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_llama(scaling):
    model = llama(scaling)
    w = {name.removeprefix("model."): value for name, value in weights_of(model).items()}

    def heads(name):
        return w[f"{name}.weight"].T.reshape(D, -1, K)

    def block(layer):
        h = f"layers.{layer}"
        return {
            "attention": {"w_query": heads(f"{h}.self_attn.q_proj"), "w_key": heads(f"{h}.self_attn.k_proj"),
                          "w_value": heads(f"{h}.self_attn.v_proj"),
                          "w_out": w[f"{h}.self_attn.o_proj.weight"].T.reshape(H, K, D)},
            "attention_norm": {"scale": w[f"{h}.input_layernorm.weight"]},
            "mlp_norm": {"scale": w[f"{h}.post_attention_layernorm.weight"]},
            "mlp": {"w_gate": w[f"{h}.mlp.gate_proj.weight"].T, "w_up": w[f"{h}.mlp.up_proj.weight"].T,
                    "w_down": w[f"{h}.mlp.down_proj.weight"].T},
        }  # fmt: skip

    params = {
        "embedding": {"tokens": w["embed_tokens.weight"]}, "blocks": stacked(block),
        "final_norm": {"scale": w["norm.weight"]}, "head": {"table": w["lm_head.weight"]},
    }  # fmt: skip
    cfg = model_config(
        num_layers=L, width=D, num_heads=H, num_kv_heads=2, mlp_width=F, context_length=64, vocab_size=V,
        norm="rms_norm", norm_epsilon=1e-6, activation="swiglu", use_bias=False, positions="rotary",
        tie_embeddings=False, rotary_scaling=scaling, rotary_factor=1.0 if scaling == "none" else 4.0,
    )  # fmt: skip
    check_shapes(params, gpt.specs(cfg))
    (wanted,) = run(model, "logits", input_ids=TOKENS)
    np.testing.assert_allclose(jax.jit(lambda p: gpt.apply(p, TOKENS, cfg))(params), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("linear", 4.0), ("yarn", 4.0), ("yarn", 32.0)])
def test_rotary_frequencies(scaling, factor):
    rotary = llama(scaling, factor).model.rotary_emb
    frequencies, scale = pos.rotary_frequencies(K, 10_000.0, scaling, factor, 16)
    np.testing.assert_allclose(rotary.inv_freq.numpy(), frequencies, rtol=1e-6)
    assert rotary.attention_scaling == pytest.approx(scale)


def test_bert_with_pooler_and_next_sentence():
    from transformers import BertConfig, BertForPreTraining

    model = BertForPreTraining(BertConfig(
        num_hidden_layers=L, hidden_size=D, num_attention_heads=H, intermediate_size=F, max_position_embeddings=T,
        vocab_size=V, type_vocab_size=2,
    ))  # fmt: skip
    w = weights_of(model)

    def norm(name):
        return {"scale": w[f"{name}.LayerNorm.weight"], "bias": w[f"{name}.LayerNorm.bias"]}

    def linear(name, suffix=""):
        return {f"w{suffix}": w[f"{name}.weight"].T, f"b{suffix}": w[f"{name}.bias"]}

    def block(layer):
        h = f"bert.encoder.layer.{layer}"
        attention = {}
        for name in ("query", "key", "value"):
            attention[f"w_{name}"] = w[f"{h}.attention.self.{name}.weight"].T.reshape(D, H, K)
            attention[f"b_{name}"] = w[f"{h}.attention.self.{name}.bias"].reshape(H, K)
        out = linear(f"{h}.attention.output.dense", "_out")
        attention |= {**out, "w_out": out["w_out"].reshape(H, K, D)}
        return {
            "attention": attention, "attention_norm": norm(f"{h}.attention.output"), "mlp_norm": norm(f"{h}.output"),
            "mlp": linear(f"{h}.intermediate.dense", "_up") | linear(f"{h}.output.dense", "_down"),
        }  # fmt: skip

    e, head = "bert.embeddings", "cls.predictions"
    params = {
        "embedding": {"tokens": w[f"{e}.word_embeddings.weight"], "positions": w[f"{e}.position_embeddings.weight"],
                      "types": w[f"{e}.token_type_embeddings.weight"]},
        "embedding_norm": norm(e), "blocks": stacked(block),
        "head": {**linear(f"{head}.transform.dense"), "norm": norm(f"{head}.transform"), "bias": w[f"{head}.bias"]},
        "pooler": linear("bert.pooler.dense"), "next_sentence": linear("cls.seq_relationship"),
    }  # fmt: skip
    cfg = model_config(
        family="bert", block="post_norm", num_layers=L, width=D, num_heads=H, mlp_width=F, context_length=T,
        vocab_size=V, norm_epsilon=1e-12, token_types=2, next_sentence=True,
    )  # fmt: skip
    check_shapes(params, bert.specs(cfg))
    types = (np.arange(T) >= T // 2).astype(int)[None].repeat(B, axis=0)
    real = np.array([[1] * T, [1] * (T - 5) + [0] * 5])  # padding, which here is a segment of its own
    wanted, pairs = run(model, "prediction_logits", "seq_relationship_logits", input_ids=TOKENS, token_type_ids=types,
                        attention_mask=real)  # fmt: skip

    @jax.jit
    def ours(params):
        fields = {"segments": jnp.array(real), "token_types": jnp.array(types)}
        x = bert.hidden(params, TOKENS, cfg, **fields)
        return bert.apply(params, TOKENS, cfg, **fields), bert.next_sentence_logits(params, x)

    logits, pair_logits = ours(params)
    np.testing.assert_allclose(np.asarray(logits)[real == 1], wanted[real == 1], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(pair_logits, pairs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(bidirectional):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = np.arange(-1000, 1000)
    wanted = T5Attention._relative_position_bucket(torch.tensor(relative), bidirectional, 32, 128).numpy()
    np.testing.assert_array_equal(pos.t5_buckets(jnp.array(relative), bidirectional), wanted)


@pytest.mark.parametrize("heads", [8, 12, 16])
def test_alibi_slopes(heads):
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    by_key = build_alibi_tensor(torch.ones((1, 2)), heads, torch.float32)  # slope * key position
    np.testing.assert_allclose(by_key[:, 0, 1].numpy(), pos.alibi_slopes(heads), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_measured_beside_torchs_and_flaxs(dtype):
    """Every contestant gets done what it is asked for; torch's in its own process."""
    found = attention.contestants(SimpleNamespace(tokens=64, dtype=dtype)).contestants
    assert {"xla", "chunked", "jax.nn.dot_product_attention", "flax.linen.dot_product_attention"} < found.keys()
    assert "torch's scaled_dot_product_attention" in found
    for run in found.values():
        assert run() is None

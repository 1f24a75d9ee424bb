"""Models of transformers with random weights, read here; ours, opened there: logits, gradients, generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import decoding
from jaxformer.interchange.architectures import ARCHITECTURES, model_of
from jaxformer.interchange.exporting import export_model
from jaxformer.interchange.importing import import_model
from jaxformer.models.families import family_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings
V, T = 50, 24
TOKENS = np.random.default_rng(0).integers(3, V, (2, T))  # 0 and 1 are padding to some, which gets no gradient
SOURCE = np.random.default_rng(2).integers(3, V, (2, T - 3))
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": V,
    "max_position_embeddings": T,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 12,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
T5 = {
    "vocab_size": V, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6}
GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": V,
    "n_positions": T,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DEBERTA = {
    **SIZES, "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True, "position_buckets": 4, "max_relative_positions": 16, "norm_rel_ebd": "layer_norm",
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# name -> (class of the model, class of its config, fields)
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2 untied": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "n_inner": 40, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "num_key_value_heads": 1, "sliding_window": 9}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    "llama scaled": (
        "LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2, "rope_parameters": LLAMA3},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "num_key_value_heads": 2}),
    "phi3": (
        "Phi3ForCausalLM", "Phi3Config",
        {**SIZES, "num_key_value_heads": 2, "hidden_size": 64, "pad_token_id": 0, "sliding_window": 9,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**SIZES, **EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 20},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**SIZES, **EXPERTS, "pad_token_id": 1}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "gpt_neox one after the other": (
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**SIZES, "num_key_value_heads": 1, "head_dim": 12}),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 10,
         "sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**SIZES, "num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 10,
         "sliding_window": 7, "sliding_window_pattern": 2,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "bert with pairs": ("BertForPreTraining", "BertConfig", SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, "max_position_embeddings": T + 2, "pad_token_id": 1}),
    "distilbert": (
        "DistilBertForMaskedLM", "DistilBertConfig",
        {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 48, "vocab_size": V, "max_position_embeddings": T},
    ),
    "longformer": (
        "LongformerForMaskedLM", "LongformerConfig",
        {**SIZES, "max_position_embeddings": T + 2, "pad_token_id": 1, "attention_window": [8, 8]},
    ),
    "deberta-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA),
    "deberta-v2 clipped": (
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        {**DEBERTA, "share_att_key": False, "position_buckets": -1, "max_relative_positions": 6, "type_vocab_size": 2,
         "norm_rel_ebd": "none"},
    ),
    "deberta-v2 one term": (
        "DebertaV2ForMaskedLM", "DebertaV2Config", {**DEBERTA, "pos_att_type": ["c2p"], "share_att_key": False},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5 of version 1.1": (
        "T5ForConditionalGeneration", "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": (
        "BartForConditionalGeneration", "BartConfig",
        {"d_model": 32, "vocab_size": V, "max_position_embeddings": T, "encoder_layers": 1, "decoder_layers": 2,
         **{f"{side}_{name}": size for side in ("encoder", "decoder")
            for name, size in (("attention_heads", 4), ("ffn_dim", 48))}},
    ),
}  # fmt: skip
# Those with layers that tests/decoding has not: a window, part of a head turned, layers that differ, scores unscaled.
GENERATING = ("mistral", "gpt_neox", "gemma3_text", "t5")


def theirs(name):
    """Every parameter moved away from its initial value, so that none is forgotten."""
    import torch
    import transformers

    torch.manual_seed(0)
    model, config, fields = MODELS[name]
    eager = {"attn_implementation": "eager"}  # the others leave the cap of the scores out
    made = getattr(transformers, model)(getattr(transformers, config)(**fields, **eager)).eval()
    if name == "t5 of version 1.1":  # which has two tables, and in transformers 5 only if they differ
        made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def logits_of(model):
    import torch

    if model.config.is_encoder_decoder:
        return model(input_ids=torch.tensor(SOURCE), decoder_input_ids=torch.tensor(TOKENS)).logits
    first = {"global_attention_mask": torch.arange(T).expand(len(TOKENS), T) == 0}
    given = first if model.config.model_type == "longformer" else {}
    out = model(input_ids=torch.tensor(TOKENS), **given)
    return out.prediction_logits if hasattr(out, "prediction_logits") else out.logits


@pytest.mark.parametrize("name", MODELS)
def test_both_ways(name, tmp_path):
    from safetensors.numpy import load_file

    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    found = import_model(tmp_path / "theirs")
    source = {} if found.config.encoder is None else {"source_tokens": jnp.asarray(SOURCE)}
    wanted = logits_of(model)
    weight = np.random.default_rng(1).normal(size=wanted.shape).astype(np.float32)

    def weighted(params):
        logits = family_of(found.config).apply(params, jnp.asarray(TOKENS), found.config, **source)
        return jnp.sum(logits * weight), logits

    quickly = {"xla_backend_optimization_level": 0}  # to compile
    compiled = jax.jit(jax.grad(weighted, has_aux=True), compiler_options=quickly)
    grads, logits = compiled(found.params)
    largest = float(wanted.abs().max())
    np.testing.assert_allclose(logits, wanted.detach().numpy(), rtol=1e-5, atol=1e-6 * max(10, largest))

    kind = export_model(found.config, found.params, tmp_path / "ours")
    assert kind == name.split()[0]
    a, b = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    again = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert (logits_of(again) == wanted).all()

    # Gradients, by the names that they have there.
    import torch

    (wanted * torch.tensor(weight)).sum().backward()
    export_model(found.config, grads, tmp_path / "grads")
    ours = load_file(tmp_path / "grads" / "model.safetensors")
    for key, parameter in model.named_parameters():
        if parameter.grad is not None and key in ours:
            largest = float(parameter.grad.abs().max())
            np.testing.assert_allclose(ours[key], parameter.grad.numpy(), rtol=1e-4, atol=1e-5 * (1 + largest))
    parameters = dict(model.named_parameters())
    unused = {key for key in ours if key in parameters and parameters[key].grad is None}
    assert all(("pooler" in key or "seq_relationship" in key) and not ours[key].any() for key in unused)


@pytest.mark.parametrize("name", GENERATING)
def test_both_generate_the_same(name, tmp_path):
    import torch

    model = theirs(name)
    model.save_pretrained(tmp_path)
    found = import_model(tmp_path)
    reads = found.config.encoder is not None
    prompt, source = [3, 11, 4, 11, 5], SOURCE[:1].tolist() if reads else None
    ours = decoding.generate(
        found.params, [[2]] if reads else [prompt], found.config, rng=jax.random.key(0), max_new_tokens=12,
        sampling=decoding.Sampling(temperature=0.0), sources=source,
    )  # fmt: skip
    # Without a cache, in which transformers has a layer for each of T5's encoder.
    start = {"decoder_start_token_id": 2, "forced_eos_token_id": None, "use_cache": False} if reads else {}
    wanted = model.generate(
        torch.tensor(source or [prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **start
    )
    new = wanted[0, 1 if reads else len(prompt) :].tolist()
    assert np.asarray(ours.tokens)[0, :12].tolist() == new


WITH_HEADS = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
NOT_LEFT_OUT = {*WITH_HEADS, "layer_types", "num_experts", "num_local_experts", "moe_intermediate_size", "model_type"}


@pytest.mark.parametrize(
    "name",
    [
        name for name, (model, _, fields) in MODELS.items()
        if model.endswith(("ForCausalLM", "ForMaskedLM")) and name.isidentifier() and "hidden_size" in fields
    ],
)  # fmt: skip
def test_a_field_that_is_left_out_is_what_their_class_has(name):
    import transformers

    def read(fields):
        return model_of(ARCHITECTURES[name].read_config({"model_type": name, **fields}, ()))

    made = getattr(transformers, MODELS[name][1])
    usual, whole = made().to_dict(), made(**WITH_HEADS).to_dict()
    for field in whole.keys() & usual.keys() - NOT_LEFT_OUT:
        said = read({**whole, field: usual[field]})
        assert read({key: value for key, value in whole.items() if key != field}) == said, field

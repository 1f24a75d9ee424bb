"""config.json of other libraries: what its fields mean here, and what is refused in one line."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxformer.config import from_mapping, load
from jaxformer.errors import ConfigError
from jaxformer.interchange import export_model, hf_bart, hf_gemma, hf_llama, import_model
from jaxformer.interchange.architectures import ARCHITECTURES, model_of, read_model, type_for
from jaxformer.interchange.foreign import Fields
from jaxformer.interchange.rotary_fields import FULL, LLAMA3, SLIDING, read_layers, read_rotary, write_layers
from jaxformer.models import encoder_decoder
from jaxformer.specs import is_spec

SIZES = {
    "num_hidden_layers": 7, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
    "max_position_embeddings": 64,
}  # fmt: skip


def test_layers_as_they_are_written():
    for every, types in ((None, [SLIDING] * 3), (2, [SLIDING, FULL, SLIDING]), (3, [SLIDING, SLIDING, FULL] * 2)):
        assert read_layers(9, types) == {"window": 9, "global_every": every}
    assert read_layers(9, [FULL] * 3) == read_layers(None, [SLIDING] * 3) == {}
    for types in ([FULL, SLIDING], [SLIDING, FULL, FULL], [SLIDING, FULL, SLIDING, SLIDING], [SLIDING, "chunked"]):
        with pytest.raises(ConfigError, match=r"^config.json: layer_types: .*; accepted: full_attention in every n-th"):
            read_layers(9, types)
    cfg = model_of(hf_gemma.read_config({**SIZES, "model_type": "gemma3_text", "sliding_window_pattern": 3}, ()))
    assert write_layers(cfg) == [SLIDING, SLIDING, FULL] * 2 + [SLIDING]


def test_both_ways_to_write_gemma_3():
    """Files of transformers 4 and 5 say the same in other words."""
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaled}
    new = {
        "rope_parameters": {FULL: {**scaled, "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    }
    sizes = {**SIZES, "model_type": "gemma3_text", "sliding_window": 16}
    a, b = (model_of(hf_gemma.read_config({**sizes, **way}, ())) for way in (old, new))
    assert a == b and (a.positions.base, a.positions.local_base, a.positions.factor) == (1e6, 1e4, 8.0)
    assert (a.attention.global_every, a.attention.scale, a.head_size) == (6, None, 256)


def test_windows_of_qwen_begin_at_a_layer():
    sliding = {**SIZES, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert model_of(hf_llama.read_config({**sliding, "max_window_layers": 7}, ())).attention.window is None
    assert model_of(hf_llama.read_config({**sliding, "max_window_layers": 0}, ())).attention.window == 8
    with pytest.raises(ConfigError, match=r"^config.json: layer_types: full_attention, full_attention, sliding_"):
        hf_llama.read_config({**sliding, "max_window_layers": 2}, ())


@pytest.mark.parametrize(("fields", "line"), [
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, **LLAMA3, "low_freq_factor": 2.0}},
     r"^config.json: rope_parameters: .*; accepted: llama3 with \{'low_freq_factor': 1.0, 'high_freq_factor': 4.0\}$"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}},
     r"^config.json: rope_parameters.partial_rotary_factor: 0.5; accepted: 1.0$"),
    ({"rope_parameters": 3}, r"^config.json: rope_parameters: 3 is not an object$"),
])  # fmt: skip
def test_rotary_positions_that_are_not_here(fields, line):
    with pytest.raises(ConfigError, match=line):
        read_rotary(Fields(fields))


def read(kind, **fields):
    return model_of(ARCHITECTURES[kind].read_config({**SIZES, "model_type": kind, **fields}, ()))


def test_what_a_file_does_not_say_is_what_its_type_has():
    experts = {"num_experts": 8, "moe_intermediate_size": 8}
    assert [read(kind, **experts).norm_epsilon for kind in ("llama", "phi3", "mixtral", "olmoe", "qwen3_moe")] == [
        1e-6, 1e-5, 1e-5, 1e-5, 1e-6,
    ]  # fmt: skip
    assert [read(kind, **experts).positions.base for kind in ("llama", "mixtral", "olmoe")] == [1e4, 1e6, 1e4]
    assert read("mistral").attention.window == 4096 and read("mistral", sliding_window=None).attention.window is None
    cfg = read("gemma2", num_key_value_heads=4)
    assert (cfg.attention.soft_cap, cfg.logit_soft_cap) == (50.0, 30.0)
    cfg = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert cfg.attention.soft_cap is cfg.logit_soft_cap is None


def test_scaled_rotary_positions_begin_from_the_length_of_the_model():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read("llama", rope_scaling=yarn).positions.original_length == 64
    own = {**yarn, "original_max_position_embeddings": 16}
    assert read("llama", rope_scaling=own).positions.original_length == 16
    assert read("llama", rope_scaling=own, original_max_position_embeddings=32).positions.original_length == 32


@pytest.mark.parametrize(("kind", "fields", "line"), [
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type: 'yarn'; accepted: default"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu'; accepted: 'gelu_pytorch_tanh'"),
    ("gemma3_text", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping: 2.0; accepted: None"),
])  # fmt: skip
def test_what_transformers_computes_in_another_way_is_refused(kind, fields, line):
    with pytest.raises(ConfigError, match=f"^config.json: {line}$"):
        read(kind, **fields)


def test_what_is_written_says_that_there_is_no_window():
    """transformers has one of 4096 in a Mistral that says nothing, and opens no Gemma 3 without one."""
    found = {kind: ARCHITECTURES[kind].write_config(read(kind, sliding_window=None, layer_types=[FULL] * 7))
             for kind in ("mistral", "gemma2", "gemma3_text")}  # fmt: skip
    assert found["mistral"]["sliding_window"] is None
    assert found["gemma2"]["sliding_window"] == found["gemma3_text"]["sliding_window"] == 64
    assert type_for(read("gemma3_text", layer_types=[FULL] * 7)) == "gemma3_text"


def test_a_gemma_3_with_capped_scores_is_not_written():
    cfg = read("gemma3_text")
    capped = dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, soft_cap=2.0))
    with pytest.raises(ConfigError, match=r"^config.model.attention.soft_cap: 2.0 -> None: gemma3_text, the nearest"):
        type_for(capped)


def test_stacks_of_other_heads_are_refused():
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    with pytest.raises(
        ConfigError, match=r"^config.json: encoder_attention_heads: 4; accepted: as decoder_attention_h"
    ):
        hf_bart.read_config({**heads, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}, ())


def test_an_encoder_as_deep_as_its_decoder_need_not_say_so():
    for name in ("t5_tiny", "t5_small"):
        assert type_for(from_mapping(load(name), {"model.vocab_size": "512"}).model) == "t5"


def test_a_bias_of_logits_that_is_not_zero(tmp_path):
    """BART's files hold one, which no training moves."""
    from safetensors.numpy import load_file, save_file

    fields = {"d_model": 8, "vocab_size": 5, "max_position_embeddings": 4, **{
        f"{side}_{name}": size for side in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))
    }}  # fmt: skip
    cfg = model_of(hf_bart.read_config(fields, ()))
    params = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), encoder_decoder.specs(cfg), is_leaf=is_spec)
    assert export_model(cfg, params, tmp_path) == "bart"
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["final_logits_bias"].shape == (1, 5) and not tensors["final_logits_bias"].any()
    save_file(tensors | {"final_logits_bias": np.ones((1, 5), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^final_logits_bias: is not zero; accepted: zeros$"):
        import_model(tmp_path)


DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}


def test_distances_of_deberta():
    """What the published files say: of v3, and of v2 without buckets."""
    v3 = read("deberta-v2", **DEBERTA, position_buckets=256, max_relative_positions=-1, share_att_key=True,
              norm_rel_ebd="layer_norm", max_position_embeddings=512).positions  # fmt: skip
    assert v3 == from_mapping(load("deberta_base")).model.positions
    plain = read("deberta-v2", **DEBERTA | {"pos_att_type": ["c2p"]}).positions
    assert (plain.terms, plain.distance, plain.span, plain.shared_projections, plain.norm) == (
        "c2p", "clipped", 64, False, False
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "line"), [
    ("deberta-v2", {"relative_attention": False}, "relative_attention: False; accepted: True"),
    ("deberta-v2", {"position_biased_input": True}, "position_biased_input: True; accepted: False"),
    ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size: 3; accepted: 0"),
    ("deberta-v2", {"embedding_size": 16}, "embedding_size: 16; accepted: 32"),
    ("deberta-v2", {"attention_head_size": 4}, "attention_head_size: 4; accepted: 8"),
    ("deberta-v2", {"pos_att_type": "p2p"}, "pos_att_type: 'p2p'; accepted: c2p, p2c, or both"),
    ("deberta-v2", {"pos_att_type": 5}, "pos_att_type: 5; accepted: c2p, p2c, or both"),
    ("deberta-v2", {"pos_att_type": [["c2p"]]}, r"pos_att_type: \[\['c2p'\]\]; accepted: c2p, p2c, or both"),
    ("longformer", {"attention_window": [8] * 6}, r"attention_window: \[8, .*\]; accepted: one for each of 7 layers"),
    ("bert", {"hidden_dropout_prob": [1]}, r"hidden_dropout_prob: \[1\] is not a number"),
    ("deberta-v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd: 'batch_norm'; accepted: 'none', 'layer_norm'"),
    ("longformer", {"attention_window": [8, 4], "num_hidden_layers": 2},
     r"attention_window: \[8, 4\]; accepted: the same in all layers"),
])  # fmt: skip
def test_fields_of_bidirectional_models_that_are_not_here(kind, fields, line):
    with pytest.raises(ConfigError, match=f"^config.json: {line}$"):
        read(kind, **(DEBERTA if kind == "deberta-v2" else {}) | fields)


@pytest.mark.parametrize(("kind", "fields", "line"), [
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"rope_parameters: .*; accepted: linear with a factor"),
    ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, r"rope_parameters.rope_type: \['linear'\]; accepted: .*"),
    ("llama", {"rope_theta": "x"}, r"cannot be read as llama \(ValueError: .*; accepted: values as its class .*"),
    ("llama", {"num_hidden_layers": 10**30}, r"num_hidden_layers: \d+; accepted: 1 to 9999"),
    ("gemma2", {"num_hidden_layers": 1.5}, "num_hidden_layers: 1.5; accepted: 1 to 9999"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0; accepted: above 0"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern: 0; accepted: above 0"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters: .*; accepted: one object for full_.*"),
    ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 4.0}}},
     "rope_parameters.sliding_attention: .*; accepted: rope_type default"),
    ("gemma", {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"}, "hidden_act: 'relu'; accepted: .*"),
    ("deberta-v2", {**DEBERTA, "position_buckets": 5}, "position_buckets: 5; accepted: even numbers from 4 on, or -1"),
    ("deberta-v2", {**DEBERTA, "position_buckets": 2}, "position_buckets: 2; accepted: even numbers from 4 on, or -1"),
    ("deberta-v2", {**DEBERTA, "num_attention_heads": 0}, r"model.attention.num_heads: 0; accepted: at least 1"),
    ("qwen2", {"use_sliding_window": True, "layer_types": [1]}, "cannot be read as qwen2 .*"),
])  # fmt: skip
def test_values_that_are_none_or_mean_what_is_not_here(kind, fields, line):
    """What transformers refuses, reads in another way than ours could, or cannot read either."""
    about = {**SIZES, "model_type": kind, **fields}
    with pytest.raises(ConfigError, match=f"^config.(json: )?{line}$"):
        read_model(ARCHITECTURES[kind], about, ())


def test_what_transformers_looks_at_first():
    """Where two fields say the same thing: of a long context, of NeoX, and of the first Gemmas."""
    both = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    assert read("llama", **both).positions.factor == 2.0
    found = read("gpt_neox", rotary_pct=0.5, partial_rotary_factor=0.25, rotary_emb_base=300, rope_theta=7000).positions
    assert (found.fraction, found.base) == (0.5, 300)
    assert read("gemma2", sliding_window_pattern=3).attention.global_every == 2
    assert read("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 5e5}}).positions.factor == 8.0  # fmt: skip
    assert read("qwen3").head_size == 128


def test_t5_of_another_activation():
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    assert read_model(ARCHITECTURES["t5"], {**t5, "dense_act_fn": "relu"}, ()).feed_forward.activation == "relu"
    with pytest.raises(ConfigError, match=r"^config.json: dense_act_fn: 'gelu'; accepted: 'relu'$"):
        read_model(ARCHITECTURES["t5"], {**t5, "dense_act_fn": "gelu"}, ())

"""Configuration: every error is one line that names the field, the value and what is accepted; nothing is lost."""

import dataclasses
import json
import typing

import ml_collections
import pytest
from flat_config import model_config

from jaxformer import config as configs
from jaxformer.config import Config, Dense, Execution, from_mapping
from jaxformer.config.fields import field_types, is_section, options
from jaxformer.config.reference import reference
from jaxformer.errors import ConfigError
from jaxformer.functional.attention import IMPLEMENTATIONS
from jaxformer.functional.layers import ACTIVATIONS
from jaxformer.storage.credentials import is_credential
from jaxformer.training.optim import make_schedule


def bert(**model):
    return {"model": {"family": "bert", **model}, "data": {"objective": "masked"}}


# (mapping, the whole message). One row for every way a config can be wrong.
JOINING = {"coordinator_address": "node1:8476", "num_processes": 2, "process_id": 0}
TASK = {"model": {"family": "bert"}, "data": {"objective": "token_classification"}}
EXPERTS = {"kind": "experts"}
WRONG = [
    (
        {"model": {"attention": {"joint_qk_norm": True}}},
        "config.model.attention.joint_qk_norm: True; accepted with qk_norm=true",
    ),
    *(
        ({"model": {"feed_forward": {**EXPERTS, name: value}}}, f"config.model.feed_forward.{name}: {line}")
        for name, value, line in (
            ("count", 1, "1; accepted: at least 2"),
            ("top_k", 0, "0; accepted: at least 1"),
            ("top_k", 9, "9; accepted: at most count 8"),
            ("shared", -1, "-1; accepted: at least 0"),
            ("capacity_factor", 0.0, "0.0; accepted: 0.01 to 1000.0"),
            ("balance", -1.0, "-1.0; accepted: 0.0 to 1000.0"),
            ("z_loss", -1.0, "-1.0; accepted: 0.0 to 1000.0"),
            ("bias_rate", 2.0, "2.0; accepted: 0.0 to 1.0"),
            (
                "capacity_factor",
                1.0,
                "1.0; accepted with dispatch=capacity or expert_choice: a number; with dropless: none",
            ),
        )
    ),
    (
        {"model": {"feed_forward": {**EXPERTS, "top_k": 1, "renormalize": True}}},
        "config.model.feed_forward.renormalize: True; with top_k=1 the gate would always be 1, and the router "
        "would not learn; accepted: none or false",
    ),
    (
        {"model": {"feed_forward": {**EXPERTS, "dispatch": "expert_choice"}}},
        "config.model.feed_forward.dispatch: expert_choice compares a token with later ones; model.family=gpt is "
        "causal; accepted: dropless, capacity",
    ),
    *(
        (
            {"model": {"family": "bert", "feed_forward": {**EXPERTS, "dispatch": "expert_choice", name: 0.5}}},
            f"config.model.feed_forward.{name}: 0.5; with expert_choice all experts are equally busy; accepted: 0",
        )
        for name in ("balance", "bias_rate")
    ),
    (
        {"model": {"feed_forward": {**EXPERTS, "every": 0}}},
        "config.model.feed_forward.every: 0; accepted: at least 1",
    ),
    (
        {"model": {"feed_forward": {**EXPERTS, "every": 3}}},
        "config.model.feed_forward.every: 3 does not divide model.num_layers 4; accepted: a divisor of 4",
    ),
    *(
        (
            {"model": {"feed_forward": {**EXPERTS, "every": 2}} | of},
            f"config.model.feed_forward.every: 2; {what} has one kind of feed-forward layer; accepted: 1",
        )
        for of, what in (
            ({"block": "parallel_norms"}, "model.block=parallel_norms"),
            ({"attention": {"window": 4, "global_every": 2}}, "model.attention.global_every=2"),
            ({"family": "encoder_decoder", "encoder": {"source_length": 8}}, "model.family=encoder_decoder"),
            (
                {"family": "bert", "positions": "disentangled", "bert": {"mask_decoder": "enhanced"}},
                "model.bert.mask_decoder=enhanced",
            ),
        )
    ),
    (
        {"model": {"feed_forward": {**EXPERTS, "dense_activation": "relu"}}},
        "config.model.feed_forward.dense_activation: relu; with every=1 no layer is dense; accepted: none",
    ),
    (
        {"model": {"feed_forward": EXPERTS}, "execution": {"expert_exchange": "all_to_all"}},
        "config.execution.expert_exchange: all_to_all; with dispatch=dropless experts have no slots; accepted: auto, "
        "gather, ragged_all_to_all",
    ),
    (
        {"execution": {"expert_exchange": "gather"}},
        "config.execution.expert_exchange: gather; model.feed_forward.kind=dense has no experts; accepted: auto",
    ),
    (
        {"execution": {"experts": "blocks"}},
        "config.execution.experts: blocks; model.feed_forward.kind=dense has no experts; accepted: auto",
    ),
    (
        {
            "model": {"family": "bert", "feed_forward": {**EXPERTS, "dispatch": "expert_choice"}},
            "data": {"objective": "masked"},
            "execution": {"expert_exchange": "ragged_all_to_all"},
        },
        "config.execution.expert_exchange: ragged_all_to_all; with dispatch=expert_choice experts fill all their "
        "slots; accepted: auto, gather, all_to_all",
    ),
    (
        {"model": {"feed_forward": EXPERTS}, "execution": {"feed_forward_chunks": 2}},
        "config.execution.feed_forward_chunks: 2; layers of experts are computed whole, because their losses are of "
        "all tokens at once; accepted: 1",
    ),
    (
        {"model": {"feed_forward": EXPERTS, "block": "reversible"}},
        "config.model.block: reversible computes layers again from rounded activations, which may choose other "
        "experts; accepted with model.feed_forward.kind=experts: any other block",
    ),
    (
        {"model": {"feed_forward": EXPERTS, "family": "xlnet", "positions": "relative"}},
        "config.model.feed_forward.kind: experts; model.family=xlnet has more than one stream of tokens; "
        "accepted: dense",
    ),
    ({"model": {"memory": 0}}, "config.model.memory: 0; accepted: at least 1"),
    (
        {"data": {"objective": "permutation", "permutation": {"predict": 0}}},
        "config.data.permutation.predict: 0; accepted: 1 to 10000",
    ),
    *(
        ({"model": {"positions": {"kind": "disentangled", name: value}}}, f"config.model.positions.{line}")
        for name, value, line in (
            ("span", 1, "span: 1; accepted: 2 to 1048576"),
            ("max_distance", 1, "max_distance: 1; accepted: at least 2"),
        )
    ),
    *(
        (
            {**TASK, "data": {**TASK["data"], "labelled": {name: 0}}},
            f"config.data.labelled.{name}: 0; accepted: at least 1",
        )
        for name in ("stride", "max_answer", "max_examples")
    ),
    ({"model": {"head": {"outputs": 0}}}, "config.model.head.outputs: 0; accepted: at least 1"),
    (
        {"model": {"head": {"activation": "elu"}}},
        "config.model.head.activation: 'elu' is not one of tanh, gelu, relu; did you mean relu?",
    ),
    ({"model": {"head": {"dropout": 1.0}}}, "config.model.head.dropout: 1.0; accepted: 0.0 to 0.999"),
    (
        {"model": {"head": {}}},
        "config.model.head: a head for a task; data.objective is next_token; accepted: none given, which is filled in",
    ),
    ({"tune": {"trained_layers": -1}}, "config.tune.trained_layers: -1; accepted: at least 0"),
    ({"tune": {"trained_layers": 5}}, "config.tune.trained_layers: 5; accepted: at most model.num_layers 4"),
    ({"tune": {"layer_decay": 0.0}}, "config.tune.layer_decay: 0.0; accepted: 0.01 to 1.0"),
    ({"tune": {"lora_rank": -1}}, "config.tune.lora_rank: -1; accepted: at least 0"),
    ({"tune": {"lora_rank": 4, "lora_alpha": 0.0}}, "config.tune.lora_alpha: 0.0; accepted: a finite number above 0"),
    (
        {"tune": {"lora_targets": ["up"]}},
        "config.tune.lora_targets: ('up',); tune.lora_rank is 0, and nothing reads it; "
        "accepted: with a rank of at least 1",
    ),
    (
        {"tune": {"lora_rank": 4, "lora_targets": ["up", "up"]}},
        "config.tune.lora_targets: ('up', 'up'); accepted: none, or at least one name, each once",
    ),
    (
        {"tune": {"lora_rank": 4}},
        "config.tune.lora_rank: 4; without init_from the weights that stay are random; "
        "accepted: 0, or with config.init_from, a run's directory",
    ),
    ({"distill": {"temperature": 0.0}}, "config.distill.temperature: 0.0; accepted: a finite number above 0.0"),
    *(
        (
            {"distill": {f"{name}_weight": -1.0}},
            f"config.distill.{name}_weight: -1.0; accepted: a finite number, at least 0.0",
        )
        for name in ("soft", "hard", "cosine")
    ),
    ({"tune": {"metric": "f1"}}, "config.tune.metric: 'f1'; accepted with data.objective=next_token: none or accuracy"),
    *(
        (
            {"data": {"objective": "span_corruption", "span_corruption": {name: value}}},
            f"config.data.span_corruption.{line}",
        )
        for name, value, line in (
            ("noise_rate", 1.2, "noise_rate: 1.2; accepted: above 0, below 1"),
            ("noise_rate", 0.0, "noise_rate: 0.0; accepted: above 0, below 1"),
            ("mean_span", 0.5, "mean_span: 0.5; accepted: a finite number, at least 1.0"),
            ("sentinels", 0, "sentinels: 0; accepted: 1 to 10000"),
        )
    ),
    *(
        (
            {"data": {"objective": "denoising", "denoising": {name: 1.5}}},
            f"config.data.denoising.{name}: 1.5; accepted: 0.0 to 1.0",
        )
        for name in ("rotation_rate", "infilling_rate", "mask_rate", "deletion_rate")
    ),
    (
        {"data": {"objective": "denoising", "denoising": {"mean_span": 0}}},
        "config.data.denoising.mean_span: 0.0; accepted: a finite number, at least 1.0",
    ),
    *(
        (
            {"data": {"objective": "mixture", "ul2": {name: -1}}},
            f"config.data.ul2.{name}: -1.0; accepted: a finite number, at least 0.0",
        )
        for name in ("regular", "sequential", "extreme")
    ),
    ({"data": {"objective": "mixture", "ul2": {"sentinels": 0}}}, "config.data.ul2.sentinels: 0; accepted: 1 to 10000"),
    *(
        (
            {"data": {"objective": "prefix_lm", "prefix_lm": {name: 2}}},
            f"config.data.prefix_lm.{name}: 2.0; accepted: 0.0 to 1.0",
        )
        for name in ("least", "most")
    ),
    *(
        ({"data": {"source": "transduction", name: 0}}, f"config.data.{name}: 0; accepted: 1 to 65536")
        for name in ("language_shortest", "language_longest", "language_block")
    ),
    # names
    ({"modle": {}}, "config.modle: no such field; did you mean model?"),
    ({"positions": "alibi"}, "config.positions: no such field; did you mean model.positions?"),
    ({"model": {"num_layer": 2}}, "config.model.num_layer: no such field; did you mean num_layers?"),
    ({"optimizer": {"lr": 2}}, "config.optimizer.lr: no such field; did you mean learning_rate?"),
    ({"train": {"batch_size": 2}}, "config.train.batch_size: no such field; did you mean global_batch_size?"),
    ({"model": {1: 2}}, "config.model.1: no such field; accepted: family, "),
    ({"model": 3}, "config.model: 3 is not a section of fields"),
    ({"data": None}, "config.data: None is not a section of fields"),
    # types
    ({"model": {"num_layers": 2.0}}, "config.model.num_layers: 2.0 is not an integer"),
    ({"model": {"num_layers": True}}, "config.model.num_layers: True is not an integer"),
    ({"model": {"num_layers": "2"}}, "config.model.num_layers: '2' is not an integer"),
    ({"model": {"num_layers": None}}, "config.model.num_layers: None is not an integer"),
    ({"model": {"num_kv_heads": 1.0}}, "config.model.attention.num_kv_heads: 1.0 is not an integer or none"),
    ({"model": {"dropout": True}}, "config.model.dropout: True is not a number"),
    ({"model": {"dropout": "0.1"}}, "config.model.dropout: '0.1' is not a number"),
    ({"model": {"use_bias": 1}}, "config.model.use_bias: 1 is not true or false"),
    ({"model": {"use_bias": "yes"}}, "config.model.use_bias: 'yes' is not true or false"),
    (
        {"model": {"norm": "layernorm"}},
        "config.model.norm: 'layernorm' is not one of layer_norm, rms_norm, rms_norm_plus_one; did you mean "
        "layer_norm?",
    ),
    ({"model": {"norm": None}}, "config.model.norm: None is not one of layer_norm, rms_norm, rms_norm_plus_one"),
    ({"workdir": 3}, "config.workdir: 3 is not text"),
    ({"data": {"files": 3}}, "config.data.files: 3 is not a comma-separated list"),
    ({"data": {"files": [3]}}, "config.data.files: [3] is not a comma-separated list"),
    ({"data": {"separator": 3}}, "config.data.separator: 3 is not text or none"),
    ({"train": {"steps": {"a": 1}}}, "config.train.steps: {'a': 1} is not an integer"),
    # ranges
    *(
        (
            {"model": {"attention": {"kind": kind, name: value}}},
            f"config.model.attention.{name}: {value}; accepted: at least {value + 1}",
        )
        for kind, name, value in (
            ("longformer", "attention_window", 1),
            ("longformer", "global_tokens", -1),
            ("bigbird", "block", 0),
            ("bigbird", "random_blocks", -1),
            ("bigbird", "global_blocks", -1),
            ("bigbird", "seed", -1),
            ("strided", "stride", 0),
            ("fixed", "block", 0),
            ("fixed", "last", 0),
            ("dilated", "size", 0),
            ("dilated", "step", 0),
        )
    ),
    ({"model": {"num_layers": 0}}, "config.model.num_layers: 0; accepted: at least 1"),
    ({"model": {"width": -8}}, "config.model.width: -8; accepted: at least 1"),
    ({"model": {"num_heads": 0}}, "config.model.attention.num_heads: 0; accepted: at least 1"),
    ({"model": {"context_length": 0}}, "config.model.context_length: 0; accepted: at least 1"),
    ({"model": {"num_kv_heads": 0}}, "config.model.attention.num_kv_heads: 0; accepted: at least 1"),
    ({"model": {"head_width": 0}}, "config.model.attention.head_width: 0; accepted: at least 1"),
    ({"model": {"mlp_width": 0}}, "config.model.feed_forward.width: 0; accepted: at least 1"),
    ({"model": {"vocab_size": 0}}, "config.model.vocab_size: 0; accepted: at least 1"),
    ({"model": {"window": 0}}, "config.model.attention.window: 0; accepted: at least 1"),
    (
        {"model": {"positions": "rotary", "rotary_original_length": 0}},
        "config.model.positions.original_length: 0; accepted: at least 1",
    ),
    ({"model": {"token_types": -1}}, "config.model.bert.token_types: -1; accepted: at least 0"),
    ({"model": {"dropout": 1.0}}, "config.model.dropout: 1.0; accepted: 0.0 to 0.999"),
    ({"model": {"attention_dropout": -0.1}}, "config.model.attention.dropout: -0.1; accepted: 0.0 to 0.999"),
    ({"model": {"norm_epsilon": 1e-320}}, "config.model.norm_epsilon: 1e-320; accepted: a finite number above 0"),
    ({"model": {"norm_epsilon": 0}}, "config.model.norm_epsilon: 0.0; accepted: a finite number above 0"),
    (
        {"model": {"positions": "rotary", "rotary_base": 1}},
        "config.model.positions.base: 1.0; accepted: a finite number above 1",
    ),
    (
        {"model": {"positions": "rotary", "rotary_factor": 0}},
        "config.model.positions.factor: 0.0; accepted: a finite number above 0",
    ),
    ({"model": {"attention": {"global_every": 1}}}, "config.model.attention.global_every: 1; accepted: at least 2"),
    (
        {"model": {"attention": {"global_every": 2}}},
        "config.model.attention.global_every: 2; without model.attention.window all layers see all keys; accepted: "
        "none",
    ),
    (
        {"model": {"positions": {"kind": "learned", "offset": -1}}},
        "config.model.positions.offset: -1; accepted: at least 0",
    ),
    (
        {"model": {"positions": {"kind": "rotary", "fraction": 0}}},
        "config.model.positions.fraction: 0.0; accepted: 0.001 to 1.0",
    ),
    (
        {"model": {"positions": {"kind": "rotary", "fraction": 0.1}}},
        "config.model.positions.fraction: 0.1 of heads of width 32 is 3; accepted: an even number of entries",
    ),
    (
        {"model": {"positions": {"kind": "rotary", "local_base": 1}}},
        "config.model.positions.local_base: 1.0; accepted: a finite number above 1",
    ),
    (
        {"model": {"positions": {"kind": "rotary", "local_base": 10}}},
        "config.model.positions.local_base: 10.0; no layer has a window; accepted with model.attention.window and "
        "global_every",
    ),
    *(
        (
            {"model": {"parametrization": {"kind": "mup", name: value}}},
            f"config.model.parametrization.{name}: {value}; accepted: {accepted}",
        )
        for name, value, accepted in (
            ("base_width", 0, "at least 1"),
            ("base_layers", 0, "at least 1"),
            ("base_head_width", 0, "at least 1"),
            ("alpha", 0.4, "0.5 to 1.0"),
            ("embedding_rate_exponent", 1.5, "-1.0 to 1.0"),
            ("decay_exponent", 1.5, "0.0 to 1.0"),
            ("base_width", 256, "at most model.width 128"),
            ("base_layers", 5, "at most model.num_layers 4"),
            ("base_head_width", 64, "at most the width of a head, 32"),
        )
    ),
    (
        {"model": {"parametrization": "mup"}, "optimizer": {"name": "adafactor"}},
        "config.optimizer.name: adafactor; accepted with model.parametrization.kind=mup: adamw, lion, muon",
    ),
    ({"model": {"logit_soft_cap": 0}}, "config.model.logit_soft_cap: 0.0; accepted: a finite number above 0"),
    (
        {"model": {"logit_soft_cap": 9, "family": "bert"}, "data": {"objective": "masked"}},
        "config.model.logit_soft_cap: 9.0; a bert's logits have no cap; accepted: none",
    ),
    (
        {"model": {"scale_embeddings": True, "positions": "sinusoidal"}},
        "config.model.scale_embeddings: True; model.positions.kind=sinusoidal scales them in any case; accepted: false",
    ),
    ({"model": {"attention": {"scale": 0}}}, "config.model.attention.scale: 0.0; accepted: a finite number above 0"),
    ({"model": {"encoder": {"num_layers": 0}}}, "config.model.encoder.num_layers: 0; accepted: at least 1"),
    ({"model": {"encoder": {"source_length": 0}}}, "config.model.encoder.source_length: 0; accepted: at least 1"),
    (
        {"model": {"attention": {"kind": "alignment", "local_width": 0}}},
        "config.model.attention.local_width: 0; accepted: at least 1",
    ),
    (
        {"model": {"attention": {"kind": "performer", "features": 1}}},
        "config.model.attention.features: 1; accepted: at least 2",
    ),
    (
        {"model": {"attention": {"kind": "linformer", "projected_length": 0}}},
        "config.model.attention.projected_length: 0; accepted: at least 1",
    ),
    ({"model": {"attention": {"kind": "lstm", "units": 0}}}, "config.model.attention.units: 0; accepted: at least 1"),
    ({"model": {"attention": {"kind": "lsh", "rounds": 0}}}, "config.model.attention.rounds: 0; accepted: at least 1"),
    ({"model": {"attention": {"kind": "lsh", "chunk": 0}}}, "config.model.attention.chunk: 0; accepted: at least 1"),
    (
        {"model": {"attention": {"kind": "lsh", "buckets": 1}}},
        "config.model.attention.buckets: 1; accepted: at least 2",
    ),
    (
        {"model": {"attention": {"kind": "lsh", "buckets": (2**10, 2**11)}}},
        "config.model.attention.buckets: 2097152 in all; accepted: at most 1048576",
    ),
    (
        {"model": {"attention": {"kind": "lsh", "seed": -1}}},
        "config.model.attention.seed: -1; accepted: 0 to 2147483647",
    ),
    (
        {"model": {"family": "funnel", "funnel": {"decoder_layers": 0}}},
        "config.model.funnel.decoder_layers: 0; accepted: at least 1",
    ),
    ({"execution": {"pipeline_repeats": 0}}, "config.execution.pipeline_repeats: 0; accepted: at least 1"),
    ({"execution": {"feed_forward_chunks": 0}}, "config.execution.feed_forward_chunks: 0; accepted: at least 1"),
    ({"model": {"attention_soft_cap": 0}}, "config.model.attention.soft_cap: 0.0; accepted: a finite number above 0"),
    ({"loss": {"label_smoothing": 1.0}}, "config.loss.label_smoothing: 1.0; accepted: 0.0 to 0.999"),
    ({"loss": {"z_loss": -1e-4}}, "config.loss.z_loss: -0.0001; accepted: a finite number, at least 0.0"),
    ({"loss": {"chunk_tokens": 0}}, "config.loss.chunk_tokens: 0; accepted: at least 1"),
    ({"data": {"mask_rate": 1.5}}, "config.data.mask_rate: 1.5; accepted: 0.0 to 1.0"),
    ({"data": {"mask_token_rate": -1}}, "config.data.mask_token_rate: -1.0; accepted: 0.0 to 1.0"),
    ({"data": {"mask_random_rate": 2}}, "config.data.mask_random_rate: 2.0; accepted: 0.0 to 1.0"),
    ({"data": {"validation_fraction": 1}}, "config.data.validation_fraction: 1.0; accepted: 0.0 to 0.9"),
    ({"data": {"max_train_bytes": 0}}, "config.data.max_train_bytes: 0; accepted: at least 1"),
    ({"optimizer": {"learning_rate": 0}}, "config.optimizer.learning_rate: 0.0; accepted: a finite number above 0"),
    (
        {"optimizer": {"learning_rate": float("nan")}},
        "config.optimizer.learning_rate: nan; accepted: a finite number above 0",
    ),
    ({"optimizer": {"epsilon": 0}}, "config.optimizer.epsilon: 0.0; accepted: a finite number above 0"),
    ({"optimizer": {"clip_norm": 0}}, "config.optimizer.clip_norm: 0.0; accepted: a finite number above 0"),
    ({"optimizer": {"warmup_steps": -1}}, "config.optimizer.warmup_steps: -1; accepted: at least 0"),
    ({"optimizer": {"decay_steps": 0}}, "config.optimizer.decay_steps: 0; accepted: at least 1"),
    ({"optimizer": {"beta1": 1}}, "config.optimizer.beta1: 1.0; accepted: 0.0 to 0.999999"),
    ({"optimizer": {"beta2": -1}}, "config.optimizer.beta2: -1.0; accepted: 0.0 to 0.999999"),
    ({"optimizer": {"final_fraction": 2}}, "config.optimizer.final_fraction: 2.0; accepted: 0.0 to 1.0"),
    (
        {"optimizer": {"weight_decay": float("inf")}},
        "config.optimizer.weight_decay: inf; accepted: a finite number, at least 0.0",
    ),
    ({"optimizer": {"ema_decay": 1}}, "config.optimizer.ema_decay: 1.0; accepted: 0.0 to 0.999999"),
    ({"mesh": {"data": 0}}, "config.mesh.data: 0; accepted: at least 1"),
    ({"mesh": {"fsdp": 0}}, "config.mesh.fsdp: 0; accepted: at least 1"),
    ({"mesh": {"tensor": -1}}, "config.mesh.tensor: -1; accepted: at least 1"),
    ({"mesh": {"expert": 0}}, "config.mesh.expert: 0; accepted: at least 1"),
    ({"mesh": {"context": 0}}, "config.mesh.context: 0; accepted: at least 1"),
    ({"mesh": {"stage": 0}}, "config.mesh.stage: 0; accepted: at least 1"),
    ({"train": {"steps": 0}}, "config.train.steps: 0; accepted: at least 1"),
    ({"train": {"batch_rows": 0}}, "config.train.global_batch_size: 0; accepted: at least 1"),
    ({"train": {"micro_batches": 0}}, "config.execution.gradient_accumulation_steps: 0; accepted: at least 1"),
    ({"train": {"steps_per_dispatch": 0}}, "config.execution.steps_per_dispatch: 0; accepted: at least 1"),
    ({"train": {"log_every_steps": 0}}, "config.train.log_every_steps: 0; accepted: at least 1"),
    ({"train": {"eval_every_steps": 0}}, "config.train.eval_every_steps: 0; accepted: at least 1"),
    ({"train": {"max_bad_steps": 0}}, "config.train.max_bad_steps: 0; accepted: at least 1"),
    ({"train": {"eval_rows": 0}}, "config.train.eval_rows: 0; accepted: at least 1"),
    ({"train": {"early_stop_evals": 0}}, "config.train.early_stop_evals: 0; accepted: at least 1"),
    ({"checkpoint": {"save_every_steps": 0}}, "config.checkpoint.save_every_steps: 0; accepted: at least 1"),
    ({"checkpoint": {"keep": 0}}, "config.checkpoint.keep: 0; accepted: at least 1"),
    ({"checkpoint": {"keep_every_steps": 0}}, "config.checkpoint.keep_every_steps: 0; accepted: at least 1"),
    (
        {"checkpoint": {"save_every_minutes": 0}},
        "config.checkpoint.save_every_minutes: 0.0; accepted: a finite number above 0",
    ),
    (
        {"distributed": {**JOINING, "num_processes": 0}},
        "config.distributed.num_processes: 0; accepted: at least 1",
    ),
    ({"distributed": {**JOINING, "process_id": 2}}, "config.distributed.process_id: 2; accepted: 0 to 1"),
    *(
        ({"distributed": {name: 0}}, f"config.distributed.{name}: 0; accepted: at least 1")
        for name in ("start_timeout_seconds", "heartbeat_timeout_seconds", "stall_timeout_seconds")
    ),
    ({"seed": -1}, "config.seed: -1; accepted: 0 to 2147483647"),
    ({"seed": 2**31}, "config.seed: 2147483648; accepted: 0 to 2147483647"),
    # combinations
    (
        {"model": {"width": 30}},
        "config.model.attention.num_heads: 4 does not divide model.width 30; accepted: a divisor "
        "of it, or a model.attention.head_width",
    ),
    (
        {"model": {"num_kv_heads": 3}},
        "config.model.attention.num_kv_heads: 3 does not divide model.attention.num_heads 4; accepted: a divisor of it",
    ),
    (
        {"model": {"head_width": 3, "positions": "rotary"}},
        "config.model.attention.head_width: 3 is odd; rotary positions need an even width",
    ),
    (
        {"model": {"family": "recurrent_seq2seq", "encoder": {"source_length": 8}}},
        "config.model.attention.kind: softmax; model.family=recurrent_seq2seq needs one that reads the source; "
        "accepted: alignment",
    ),
    (
        {"model": {"family": "recurrent_seq2seq", "attention": "alignment"}},
        "config.model.encoder: None; model.family=recurrent_seq2seq reads a source; accepted: a section, with "
        "source_length",
    ),
    (
        {"model": {"attention": "alignment"}},
        "config.model.attention.kind: alignment; accepted with model.family=recurrent_seq2seq, not gpt",
    ),
    (
        {"model": {"width": 5, "num_heads": 1, "positions": "sinusoidal"}},
        "config.model.width: 5 is odd; sinusoidal positions need an even width",
    ),
    (
        {"model": {"rotary_scaling": "yarn"}},
        "config.model.positions.scaling: no such field; accepted with config.model.positions.kind=rotary",
    ),
    (
        {"model": {"positions": "rotary", "rotary_factor": 2}},
        "config.model.positions.factor: 2.0 needs model.positions.scaling=linear, ntk, yarn or llama3",
    ),
    (
        {"model": {"positions": "rotary", "rotary_scaling": "yarn", "rotary_factor": 8, "context_length": 4}},
        "config.model.positions.factor: 8.0 is more than model.context_length 4; set model.positions.original_length",
    ),
    (
        {"model": {"token_types": 2}},
        "config.model.bert: Bert(token_types=2, next_sentence=False, mask_decoder='plain'); accepted with "
        "model.family=bert, not gpt",
    ),
    (
        {"model": {"bert": {"token_types": 3}}},
        "config.model.bert: Bert(token_types=3, next_sentence=False, mask_decoder='plain'); accepted with "
        "model.family=bert, not gpt",
    ),
    (bert(next_sentence=True), "config.model.bert.token_types: 0; model.bert.next_sentence needs at least 2"),
    (
        {"model": {"family": "bert"}},
        "config.data.objective: next_token; model.family=bert; accepted: masked or sequence_classification or "
        "token_classification or regression or extractive_qa",
    ),
    (
        {"data": {"objective": "masked"}},
        "config.data.objective: masked; model.family=gpt; accepted: next_token or prefix_lm or "
        "sequence_classification or token_classification or regression or extractive_qa or multiple_choice or "
        "instructions",
    ),
    (
        bert(next_sentence=True, token_types=2),
        "config.data.pairs: False; model.bert.next_sentence is True, and the two must agree",
    ),
    ({"data": {"pairs": True}}, "config.data.pairs: True; model.bert.next_sentence is False, and the two must agree"),
    (
        {"data": {"mask_random_rate": 0.3}},
        "config.data.mask_random_rate: 0.3 and data.mask_token_rate 0.8 add up to more than 1",
    ),
    ({"data": {"separator": ""}}, "config.data.separator: '' is empty (an unset variable?); accepted: text or none"),
    ({"data": {"source": "files"}}, "config.data.files: () is empty; data.source=files needs at least one glob"),
    ({"data": {"source": "tfds"}}, "config.data.tfds_name: None; data.source=tfds needs a name or data.tfds_dir"),
    *(
        ({"data": {"source": source, name: value}}, f"config.data.{name}: {value}; accepted: {accepted}")
        for source, name, value, accepted in (
            ("markov", "language_symbols", 1, "2 to 20000"),
            ("hierarchy", "language_symbols", 20_001, "2 to 20000"),
            ("markov", "language_order", 0, "1 to 20"),
            ("markov", "language_zipf", -0.5, "0.0 to 4.0"),
            ("markov", "language_zipf", float("nan"), "0.0 to 4.0"),
            ("hierarchy", "language_depth", 0, "1 to 16"),
            ("hierarchy", "language_branching", 1, "2 to 16"),
            ("hierarchy", "language_synonyms", 0, "1 to 32"),
            ("hierarchy", "language_synonyms", 33, "1 to 32"),
            ("hierarchy", "language_tokens", 0, "1 to 100000000"),
            ("hierarchy", "language_rule_zipf", 4.5, "0.0 to 4.0"),
            ("markov", "language_seed", -1, "0 to 2147483647"),
        )
    ),
    (
        {"mesh": {"fsdp": None}},
        "config.mesh: data and fsdp are none (what is left); accepted: one of them at most",
    ),
    (
        {"train": {"batch_rows": 16, "micro_batches": 3}},
        "config.execution.gradient_accumulation_steps: 3 does not divide train.global_batch_size 16; "
        "accepted: a divisor of 16",
    ),
    ({"train": {"steps": 50}}, "config.optimizer.warmup_steps: 100 is more than train.steps 50; accepted: at most 50"),
]

# (field, text on the command line, the message)
WRONG_TEXT = [
    ("model.num_layer", "2", "config.model.num_layer: no such field; did you mean num_layers?"),
    ("modl.num_layers", "2", "config.modl: no such field; did you mean model?"),
    ("model", "2", "config.model: '2' is not a section; set one of family, num_layers, "),
    ("seed.value", "2", "config.seed: is a value, not a section; there is nothing inside it to set"),
    ("model.num_layers", "2.0", "config.model.num_layers: '2.0' is not an integer"),
    ("model.num_layers", "none", "config.model.num_layers: 'none' is not an integer"),
    ("model.attention.window", "many", "config.model.attention.window: 'many' is not an integer or none"),
    ("model.dropout", "high", "config.model.dropout: 'high' is not a number"),
    ("model.dropout", "nan", "config.model.dropout: nan; accepted: 0.0 to 0.999"),
    ("model.use_bias", "maybe", "config.model.use_bias: 'maybe' is not true or false"),
    ("model.dtype", "float16", "config.model.dtype: 'float16' is not one of float32, bfloat16; did you mean bfloat16?"),
    ("data.files", "", "config.data.files: '' is empty (an unset variable?); accepted: a comma-separated list, or ()"),
    ("data.separator", r"\x", r"config.data.separator: '\\x' has a broken escape (truncated \xXX escape)"),
    ("data.tokenizer", "", "config.data.tokenizer: '' is not one of bytes, chars, bpe"),
]

# (field, text, the value it becomes)
TEXT = [
    ("model.num_layers", "6", 6),
    ("train.steps", "1_000_000", 1_000_000),
    ("optimizer.learning_rate", "3e-4", 3e-4),
    ("optimizer.learning_rate", "1", 1.0),
    ("model.use_bias", "false", False),
    ("model.use_bias", "True", True),
    ("model.use_bias", "0", False),
    ("model.attention.num_kv_heads", "none", None),
    ("model.attention.num_kv_heads", "None", None),
    ("model.attention.num_kv_heads", "2", 2),
    ("optimizer.clip_norm", "null", None),
    ("mesh.data", "none", None),
    ("data.files", "a.txt", ("a.txt",)),
    ("data.files", "a.txt,b/*.gz", ("a.txt", "b/*.gz")),
    ("data.files", "('a.txt', \"b.txt\")", ("a.txt", "b.txt")),
    ("data.files", "()", ()),
    ("data.separator", r"\n\n", "\n\n"),
    ("data.separator", "—é\\t", "—é\t"),
    ("data.separator", "none", None),
    ("workdir", "none", "none"),
    ("workdir", "C:\\new", "C:\\new"),
    ("seed", "7", 7),
]


def field(config, dotted):
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("mapping, message", WRONG, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_every_wrong_config_is_one_line(mapping, message):
    containers = [dict] if "model.1:" in message else [dict, ml_collections.ConfigDict]  # the latter: string keys only
    for container in containers:
        with pytest.raises(ConfigError) as caught:
            from_mapping(container(mapping))
        assert str(caught.value).startswith(message)
        assert str(caught.value) == message or message.endswith(", ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, text, message", WRONG_TEXT)
def test_every_wrong_override_is_one_line(name, text, message):
    with pytest.raises(ConfigError) as caught:
        from_mapping({}, {name: text})
    assert str(caught.value).startswith(message)
    assert str(caught.value) == message or message.endswith(", ")


def test_an_override_inside_something_that_is_no_section():
    with pytest.raises(ConfigError, match=r"^config.model: 3 is not a section of fields$"):
        from_mapping({"model": 3}, {"model.num_layers": "2"})


@pytest.mark.parametrize("name, text, value", TEXT)
def test_overrides_are_read_by_the_type_of_their_field(name, text, value):
    reading = {"data": {"files": ["a.txt"]}} if name == "data.separator" else {}  # which the library's text has none of
    got = field(from_mapping(reading, {name: text}), name)
    assert got == value and type(got) is type(value)


def test_overrides_win_and_leave_the_mapping_alone():
    mapping = {"model": {"num_layers": 2, "width": 64}}
    config = from_mapping(mapping, {"model.num_layers": "3"})
    assert (config.model.num_layers, config.model.width) == (3, 64)
    assert mapping == {"model": {"num_layers": 2, "width": 64}}


# (config file, command line's steps and more, warm-up and decay of the run)
SHORTER = [
    ({"warmup_steps": 50}, {"steps": "20"}, (2, None)),
    ({"warmup_steps": 50}, {"steps": "60"}, (50, None)),  # which fits
    ({"warmup_steps": 50}, {"steps": "1"}, (0, None)),
    ({"warmup_steps": 0}, {"steps": "1"}, (0, None)),
    ({}, {"steps": "50"}, (11, None)),  # of the default, 100
    ({"warmup_steps": 50, "decay_steps": 100, "schedule": "wsd"}, {"steps": "45"}, (5, 10)),
    ({"warmup_steps": 50, "decay_steps": 100}, {"steps": "60"}, (50, 100)),  # cosine does not read decay_steps
    ({"warmup_steps": 50, "decay_steps": 100}, {"steps": "45", "optimizer.schedule": "wsd"}, (5, 10)),
    ({"warmup_steps": 50}, {"steps": "20", "optimizer.warmup_steps": "7"}, (7, None)),
]


@pytest.mark.parametrize("optimizer, overrides, lengths", SHORTER)
def test_a_shorter_run_has_a_shorter_schedule(optimizer, overrides, lengths):
    named = {f"train.{name}" if name == "steps" else name: text for name, text in overrides.items()}
    got = from_mapping({"optimizer": optimizer, "train": {"steps": 450}}, named)
    assert (got.optimizer.warmup_steps, got.optimizer.decay_steps) == lengths
    make_schedule(got.optimizer, got.train.steps)


def test_a_warmup_given_with_the_steps_has_to_fit():
    with pytest.raises(ConfigError, match=r"^config.optimizer.warmup_steps: 30 is more than train.steps 20; accepted"):
        from_mapping({}, {"train.steps": "20", "optimizer.warmup_steps": "30"})


def test_numbers_are_strict_but_an_int_is_a_float():
    got = from_mapping({"optimizer": {"learning_rate": 1}}).optimizer.learning_rate
    assert got == 1.0 and isinstance(got, float)


@pytest.mark.parametrize("files", ["a.txt", ["a.txt"], ("a.txt",)])
def test_files_select_their_source(files):
    data = from_mapping({"data": {"files": files}}).data
    assert (data.files, data.source) == (("a.txt",), "files")
    mapping = {"data": {"files": files, "source": "tfds", "tfds_name": "lm1b"}}
    assert from_mapping(mapping).data.source == "tfds"


@pytest.mark.parametrize("name", ["tfds_name", "tfds_dir"])
def test_tfds_fields_select_their_source(name):
    """They trained on the standard library."""
    for made in (from_mapping({"data": {name: "lm1b"}}).data, from_mapping({}, {f"data.{name}": "lm1b"}).data):
        assert (getattr(made, name), made.source) == ("lm1b", "tfds")
    assert configs.DataConfig(**{name: "lm1b"}) == made


# (config file's data, overrides of data, what is trained on: source, files, tfds_name)
COMMAND_LINE_WINS = [
    ({"files": ["a.txt"]}, {"source": "stdlib"}, ("stdlib", (), None)),
    ({"source": "files", "files": ["a.txt"]}, {"source": "stdlib"}, ("stdlib", (), None)),
    ({"source": "tfds", "tfds_name": "lm1b"}, {"source": "stdlib"}, ("stdlib", (), None)),
    ({"source": "files", "files": ["a.txt"]}, {"tfds_name": "lm1b"}, ("tfds", (), "lm1b")),
    ({"files": ["a.txt"]}, {"tfds_name": "lm1b"}, ("tfds", (), "lm1b")),
    ({"source": "tfds", "tfds_name": "lm1b"}, {"files": "a.txt"}, ("files", ("a.txt",), None)),
    ({"source": "stdlib"}, {"files": "a.txt"}, ("files", ("a.txt",), None)),
    ({"source": "markov"}, {"files": "a.txt"}, ("files", ("a.txt",), None)),
    ({"source": "tfds", "tfds_name": "lm1b"}, {"tfds_dir": "d"}, ("tfds", (), "lm1b")),
    ({"files": ["a.txt"]}, {"source": "tfds", "tfds_name": "lm1b"}, ("tfds", ("a.txt",), "lm1b")),
    ({"files": ["a.txt"]}, {"files": "()"}, ("stdlib", (), None)),
    ({}, {"files": "a.txt", "validation_files": "b.txt", "separator": "-"}, ("files", ("a.txt",), None)),
    ({}, {"source": "markov", "language_symbols": "3"}, ("markov", (), None)),
    ({}, {"language_symbols": "32"}, ("stdlib", (), None)),  # the default, said
]


@pytest.mark.parametrize("mapping, overrides, wanted", COMMAND_LINE_WINS)
def test_the_command_line_s_source_wins(mapping, overrides, wanted):
    base = from_mapping({"data": mapping})
    config = from_mapping({"data": mapping}, {f"data.{name}": text for name, text in overrides.items()})
    assert (config.data.source, config.data.files, config.data.tfds_name) == wanted
    lines = configs.diff(configs.to_dict(base), configs.to_dict(config))
    if base.data.source != wanted[0]:
        assert f"data.source: {base.data.source!r} -> {wanted[0]!r}" in lines
    if base.data.files != wanted[1]:
        assert f"data.files: {list(base.data.files)} -> {list(wanted[1])}" in lines


LANGUAGE = "markov or data.source=hierarchy or data.source=transduction"
UNREAD = [
    ({"source": "stdlib", "files": "a.txt"}, "files: ('a.txt',); data.source=stdlib", "files"),
    ({"source": "stdlib", "tfds_name": "a"}, "tfds_name: 'a'; data.source=stdlib", "tfds"),
    ({"source": "tfds", "tfds_name": "a", "files": "a.txt"}, "files: ('a.txt',); data.source=tfds", "files"),
    ({"source": "files", "files": "a.txt", "tfds_name": "a"}, "tfds_name: 'a'; data.source=files", "tfds"),
    ({"validation_files": "a.txt"}, "validation_files: ('a.txt',); data.source=stdlib", "files"),
    ({"separator": "-"}, "separator: '-'; data.source=stdlib", "files"),
    (
        {"text_field": "body"},
        "text_field: 'body'; data.source=stdlib",
        "files or data.source=tfds or data.source=huggingface",
    ),
    ({"language_symbols": "3"}, "language_symbols: 3; data.source=stdlib", LANGUAGE),
    ({"source": "markov", "language_depth": "3"}, "language_depth: 3; data.source=markov", "hierarchy"),
    ({"source": "hierarchy", "language_order": "3"}, "language_order: 3; data.source=hierarchy", "markov"),
    (
        {"files": "a.txt", "language_seed": "3"},
        "language_seed: 3; data.source=files",
        LANGUAGE,
    ),
    ({"files": "a", "tfds_train_split": "x"}, "tfds_train_split: 'x'; data.source=files", "tfds"),
]


@pytest.mark.parametrize("overrides, says, accepted", UNREAD)
def test_what_the_source_does_not_read_is_one_line(overrides, says, accepted):
    with pytest.raises(ConfigError) as caught:
        from_mapping({}, {f"data.{name}": text for name, text in overrides.items()})
    assert str(caught.value) == f"config.data.{says} does not read it; accepted with data.source={accepted}"


def test_another_objective_drops_the_settings_of_the_old_one():
    """Unless the command line gives those too."""
    tree = {
        "model": {"family": "encoder_decoder", "encoder": {}},
        "data": {"objective": "mixture", "ul2": {"regular": 3}},
    }
    assert from_mapping(tree).data.ul2.regular == 3.0
    data = from_mapping(tree, {"data.objective": "span_corruption", "data.span_corruption.roll": "true"}).data
    assert data.ul2 is None and data.span_corruption.roll
    with pytest.raises(
        ConfigError, match=r"^config.data.ul2: .* does not read it; accepted with data.objective=mixture$"
    ):
        from_mapping(tree, {"data.objective": "denoising", "data.ul2.regular": "2"})


def test_two_sources_at_once():
    line = r"^config.data.source: None, and data.files and data.tfds_name are given; accepted: files or tfds$"
    for mapping, overrides in (
        ({"files": ["a"], "tfds_name": "b"}, {}),
        ({}, {"data.files": "a", "data.tfds_name": "b"}),
        ({"source": "stdlib"}, {"data.files": "a", "data.tfds_name": "b"}),
    ):
        with pytest.raises(ConfigError, match=line):
            from_mapping({"data": mapping}, overrides)
    with pytest.raises(ConfigError, match=r"^config.data.files: \('a',\); data.source=stdlib does not read it"):
        dataclasses.replace(configs.DataConfig(), files=("a",))  # the source has been chosen
    with pytest.raises(
        ConfigError, match=r"^config.data.source: 'file' is not one of stdlib, .*; did you mean files\?$"
    ):
        from_mapping({}, {"data.source": "file", "data.files": "a"})


def test_a_config_dict_with_references_and_placeholders():
    c = ml_collections.ConfigDict()
    c.model = ml_collections.ConfigDict({"width": 64, "num_heads": 2})
    c.model.head_width = c.model.get_ref("width") // 2
    c.model.num_kv_heads = ml_collections.config_dict.placeholder(int)
    c.data = {"files": ("a", "b")}
    config = from_mapping(c)
    assert (config.model.attention.head_width, config.model.attention.num_kv_heads, config.data.files) == (
        32,
        None,
        ("a", "b"),
    )


def test_defaults_are_a_config():
    assert from_mapping({}) == Config()
    assert from_mapping(ml_collections.ConfigDict()) == Config()


def test_to_dict_and_back_through_json():
    config = from_mapping(
        {"model": {"window": 3, "family": "bert"}, "data": {"objective": "masked", "files": ["a", "b"]}, "seed": 3}
    )
    assert from_mapping(json.loads(json.dumps(configs.to_dict(config)))) == config


def test_configs_are_frozen_and_hashable():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert hash(config) == hash(Config())


def test_diff_names_every_leaf_that_differs():
    old, new = configs.to_dict(Config()), configs.to_dict(from_mapping({"model": {"window": 3}, "seed": 1}))
    assert configs.diff(old, new) == ["model.attention.window: None -> 3", "seed: 0 -> 1"]
    assert configs.diff(old, old) == []
    assert configs.diff({}, {"a": {"b": 1}}) == ["a.b: None -> 1"]
    assert configs.diff({"a": {"b": 1}}, {"a": 3}) == ["a: {'b': 1} -> 3"]


def test_derived_sizes():
    def sizes(cfg):
        feed = cfg.feed_forward
        return cfg.attention.kv_heads, cfg.head_size, feed.hidden_width(cfg.width), feed.gated, cfg.causal

    assert sizes(model_config(width=96, num_heads=6)) == (6, 16, 384, False, True)
    cfg = model_config(width=96, num_heads=6, num_kv_heads=2, head_width=8, mlp_width=7, family="bert")
    assert sizes(cfg) == (2, 8, 7, False, False)
    for width, activation, hidden in ((768, "swiglu", 2048), (96, "geglu", 256), (100, "geglu", 320)):
        assert Dense(activation=activation).hidden_width(width) == hidden  # 8/3 of it, rounded up to 64


def test_what_the_config_accepts_is_what_the_functions_have():
    assert set(typing.get_args(typing.get_type_hints(Dense)["activation"])) == set(ACTIVATIONS)
    assert set(typing.get_args(typing.get_type_hints(Execution)["attention"])) == {"auto", *IMPLEMENTATIONS}
    for activation, (_, gated) in ACTIVATIONS.items():
        assert Dense(activation=activation).gated == gated


# Its own trainer says what the tokenizer needs.
UNBOUNDED = {"tokenizer_vocab", "null_threshold"}  # the latter may be any number


def sections(cls, where="config"):
    """(where, class) of every section in a section, each kind of a choice for itself."""
    for name, kind in field_types(cls).items():
        for option in options(kind):
            if is_section(option):
                for each in option.registered.values() if issubclass(option, configs.Choice) else [option]:
                    yield f"{where}.{name}", each
                    yield from sections(each, f"{where}.{name}")


def test_every_number_has_a_wrong_value_in_the_table():
    messages = [message for _, message in WRONG]
    for where, cls in sections(Config):
        for name, kind in field_types(cls).items():
            if kind in (int, float, int | None, float | None) and name not in UNBOUNDED:
                accepted = [line for line in messages if line.startswith(f"{where}.{name}: ")]
                assert any("; accepted: " in line for line in accepted), f"{where}.{name}"


def test_section_objects_in_a_mapping_take_overrides():
    tree = {"mesh": configs.MeshConfig(), "model": configs.ModelConfig(positions=configs.Rotary(base=5.0))}
    made = from_mapping(tree, {"mesh.fsdp": "2", "model.positions.base": "7"})
    assert made.mesh.fsdp == 2 and made.model.positions == configs.Rotary(base=7.0)


@pytest.mark.parametrize(("tree", "line"), [
    ({"execution": 3, "train": {"micro_batches": 2}}, "config.execution: 3 is not a section of fields"),
    ({"model": {"family": "bert", "token_types": 2, "bert": {"token_types": 3}}},
     "config.model.token_types: 2; it is config.model.bert.token_types now, which is given as well"),
])  # fmt: skip
def test_old_names_replace_nothing_silently(tree, line):
    with pytest.raises(ConfigError, match=line):
        from_mapping(tree)


def test_no_field_has_the_name_of_a_credential():
    """Its value would be masked in the manifest, which could not be read again."""
    assert [field.path for field in reference() if is_credential(field.path)] == []

"""What a misspelt name, or one of another library, most likely means. Only error lines use it."""

import difflib
from collections.abc import Iterable
from typing import Any

# Field -> what other libraries call it.
CALLED = {
    "model.num_layers": "n_layer n_layers layers depth num_hidden_layers num_blocks n_blocks",
    "model.width": "dim d_model n_embd n_embed hidden_size hidden_dim model_dim embed_dim embedding_dim",
    "model.attention.num_heads": "n_head n_heads heads num_attention_heads",
    "model.attention.num_kv_heads": "kv_heads n_kv_head n_kv_heads num_key_value_heads num_query_groups",
    "model.attention.head_width": "head_dim head_size d_head d_kv",
    "model.attention.window": "sliding_window window_size local_window",
    "model.attention.dropout": "attn_pdrop attn_dropout attention_dropout attention_probs_dropout_prob",
    "model.context_length": "seq_len seq_length sequence_length max_seq_len max_length block_size n_positions n_ctx "
                            "max_position_embeddings",
    "model.feed_forward.width": "d_ff ffn_dim ff_dim mlp mlp_dim mlp_width intermediate_size n_inner ffn_hidden_size",
    "model.feed_forward.activation": "activation_function hidden_act act_fn",
    "model.positions": "rope pos_emb position_embedding position_embeddings position_embedding_type",
    "model.positions.base": "rope_theta rope_base theta",
    "model.norm_epsilon": "layer_norm_eps rms_norm_eps layer_norm_epsilon norm_eps",
    "model.tie_embeddings": "tie_word_embeddings weight_tying",
    "model.use_bias": "bias",
    "model.dtype": "precision torch_dtype compute_dtype",
    "execution.gradient_accumulation_steps": "micro_batches grad_accum gradient_accumulation accumulation_steps",
    "execution.remat": "remat_policy gradient_checkpointing activation_checkpointing",
    "optimizer.learning_rate": "lr max_lr peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_norm": "max_grad_norm grad_clip clip_grad gradient_clip_norm",
    "optimizer.warmup_steps": "warmup num_warmup_steps warmup_iters",
    "optimizer.epsilon": "adam_epsilon",
    "train.global_batch_size": "batch_size batch bs train_batch_size",
    "train.steps": "max_steps num_steps n_steps total_steps train_steps max_iters iterations",
    "mesh.tensor": "tp tensor_parallel model_parallel",
    "mesh.context": "cp context_parallel",
}  # fmt: skip
SYNONYMS = {name: field for field, names in CALLED.items() for name in names.split()}
# A kind or choice by another name -> ours.
CHOICES = {"rope": "rotary", "absolute": "learned", "nope": "none", "bf16": "bfloat16", "fp32": "float32",
           "gelu_new": "gelu_tanh"}  # fmt: skip


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name most like a misspelt one, whatever the case of its letters, or ""."""
    lower = {each.lower(): each for each in known}
    return next((lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)), "")


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """The end of an error line that names the known name most like `value`; "" if none is."""
    known = list(known)
    near = nearest(CHOICES.get(value.lower(), value), known) if isinstance(value, str) else ""
    return f"; did you mean {near}?" if near else ""

"""transformers' FSMT, the translation models of fairseq, and ours with the same weights: logits and beam search."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config

from jaxformer.config import ModelConfig
from jaxformer.decoding import beam_search
from jaxformer.models import encoder_decoder

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # transformers' own warnings

S, L, D, H, F, V = 9, 2, 24, 3, 40, 30
PAD, END, START, LONGEST = 1, 2, 2, 16  # FSMT's decoder begins with the end token


def params_of(model):
    """Ours; its sinusoids, whose frequencies are others, as learned tables."""
    w = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def attention(name):
        made = {}
        for ours in ("query", "key", "value"):
            weight, bias = (w[f"{name}.{ours[0]}_proj.{part}"] for part in ("weight", "bias"))
            made |= {f"w_{ours}": weight.T.reshape(D, H, D // H), f"b_{ours}": bias.reshape(H, D // H)}
        out = w[f"{name}.out_proj.weight"].T.reshape(H, D // H, D)
        return made | {"w_out": out, "b_out": w[f"{name}.out_proj.bias"]}

    def norm(name):
        return {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

    def block(side, layer):
        h = f"model.{side}.layers.{layer}"
        made = {"attention": attention(f"{h}.self_attn"), "attention_norm": norm(f"{h}.self_attn_layer_norm")}
        made |= {"mlp": {"w_up": w[f"{h}.fc1.weight"].T, "b_up": w[f"{h}.fc1.bias"],
                         "w_down": w[f"{h}.fc2.weight"].T, "b_down": w[f"{h}.fc2.bias"]},
                 "mlp_norm": norm(f"{h}.final_layer_norm")}  # fmt: skip
        if side == "decoder":
            made |= {"cross": attention(f"{h}.encoder_attn"), "cross_norm": norm(f"{h}.encoder_attn_layer_norm")}
        return made

    def stacked(side):
        return jax.tree.map(lambda *each: np.stack(each), *[block(side, layer) for layer in range(L)])

    places = model.model.encoder.embed_positions.get_embedding(LONGEST + PAD + 1, D, PAD).numpy()[PAD + 1 :]
    tokens = w["model.encoder.embed_tokens.weight"]
    made = {
        "embedding": {"tokens": tokens, "positions": places}, "blocks": stacked("decoder"),
        "encoder": {"embedding": {"positions": places}, "blocks": stacked("encoder")},
    }  # fmt: skip
    return jax.tree.map(jnp.asarray, made)


def made(seed):
    import torch
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    torch.manual_seed(seed)
    model = FSMTForConditionalGeneration(FSMTConfig(
        langs=["a", "b"], src_vocab_size=V, tgt_vocab_size=V, d_model=D, encoder_layers=L, decoder_layers=L,
        encoder_attention_heads=H, decoder_attention_heads=H, encoder_ffn_dim=F, decoder_ffn_dim=F, dropout=0.0,
        attention_dropout=0.0, activation_function="relu", scale_embedding=False, pad_token_id=PAD, eos_token_id=END,
        bos_token_id=0, decoder_start_token_id=START, forced_eos_token_id=None, max_position_embeddings=LONGEST,
    ))  # fmt: skip
    decoder = model.model.decoder
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for table in (decoder.embed_tokens, decoder.output_projection):  # one for source, target and output, as ours
            table.weight.copy_(model.model.encoder.embed_tokens.weight)
    return model.eval()


CFG = dataclasses.replace(
    model_config(
        ModelConfig, num_layers=L, width=D, num_heads=H, mlp_width=F, vocab_size=V, context_length=LONGEST,
        family="encoder_decoder", encoder={"num_layers": L, "source_length": LONGEST}, block="post_norm",
        activation="relu", positions="learned",
    )
)  # fmt: skip


def test_logits():
    import torch

    model = made(0)
    rng = np.random.default_rng(0)
    source, target = (rng.integers(3, V, (2, n)) for n in (S, 7))
    with torch.no_grad():
        wanted = model(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target), use_cache=False
        ).logits.numpy()
    found = jax.jit(lambda p: encoder_decoder.apply(p, target, CFG, source_tokens=source))(params_of(model))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_beam_search():
    import torch

    same, beams, new, models = 0, 4, 8, 6
    for seed in range(models):
        model = made(seed)
        source = np.random.default_rng(seed).integers(3, V, (1, S))
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor(source), num_beams=beams, num_return_sequences=beams, do_sample=False, max_new_tokens=new,
                early_stopping="never", length_penalty=0.0, output_scores=True, return_dict_in_generate=True,
                bad_words_ids=[[PAD]],
            )  # fmt: skip
        found = beam_search(
            params_of(model), [[START]], CFG, sources=source, beams=beams, max_new_tokens=new, stop=[END],
            suppress=[PAD],
        )  # fmt: skip
        ends = [row[1:].tolist() for row in theirs.sequences.numpy()]
        ends = [row[: row.index(END) + 1] if END in row else row[:new] for row in ends]
        ours = [row[:n].tolist() for row, n in zip(found.tokens[0], found.lengths[0], strict=True)]
        np.testing.assert_allclose(found.scores[0], theirs.sequences_scores.numpy(), rtol=1e-4, atol=1e-4)
        same += ours == ends
    assert same >= models - 1  # two hypotheses may score alike

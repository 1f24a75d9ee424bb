"""The same weights in `transformers` and in torch's nn.Transformer, and here, give the same logits and gradients."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import model_config

from jaxformer.config import Execution, Learned, ModelConfig
from jaxformer.decoding import beam_search
from jaxformer.interchange.hf_bart import BART as HF_BART
from jaxformer.interchange.hf_t5 import T5
from jaxformer.interchange.tensor_layout import dotted, names_of
from jaxformer.models import encoder_decoder
from jaxformer.specs import abstract_params, is_spec

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own warnings

B, S, T, E, L, D, H, F, V = 2, 11, 9, 2, 3, 24, 3, 40, 30  # E layers of the encoder, L of the decoder
RNG = np.random.default_rng(0)
SOURCE, TARGET = (RNG.integers(1, V, (B, n), dtype=np.int32) for n in (S, T))
THERE = np.array([[1] * S, [1] * (S - 4) + [0] * 4])  # padding, which here is a segment of its own
WEIGHTS = RNG.normal(size=(B, T, V))  # of the logits in the scalar that gradients are taken of


@dataclasses.dataclass(frozen=True)
class Exact(ModelConfig):
    """A model that may be computed in float64, which no program offers."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # type: ignore[assignment]


def make(**fields):
    made = {"num_layers": L, "width": D, "context_length": T, "vocab_size": V, "num_heads": H, "mlp_width": F}
    encoder = {"num_layers": E, "source_length": S}
    return model_config(Exact, **{**made, "family": "encoder_decoder", "encoder": encoder, **fields})


def shaken(model, double=True):
    """A model, every parameter moved away from its initial value, so that none is forgotten."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return (model.double() if double else model).eval()


def compare(model, logits_of, params_of, cfg, double=True):
    """Logits and the gradients of all parameters, in float64; in float32, tests/interchange compares T5 and BART.

    Args:
      logits_of: () -> torch's logits.
      params_of: (name -> array) -> our parameters; linear, so that it maps gradients as well.
    """
    import torch

    tolerance = 1e-10 if double else 1e-5
    out = logits_of()
    (out * torch.tensor(WEIGHTS).to(out.dtype)).sum().backward()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    with jax.enable_x64(double):
        cfg = dataclasses.replace(cfg, dtype="float64" if double else "float32")
        params = params_of(weights)
        shapes = jax.tree.map(lambda a: a.shape, abstract_params(encoder_decoder.specs(cfg)))
        assert jax.tree.map(np.shape, params) == shapes

        def ours(params):
            logits = encoder_decoder.apply(
                params, TARGET, cfg, segments=jnp.ones((B, T), jnp.int32), source_tokens=SOURCE,
                source_segments=jnp.array(THERE, jnp.int32), execution=Execution(layers="scan"),
            )  # fmt: skip
            return jnp.sum(logits * WEIGHTS), logits

        found, logits = jax.jit(jax.grad(ours, has_aux=True))(params)
    logits_of_torch = out.detach().numpy()
    close = {"rtol": tolerance, "atol": tolerance * np.abs(logits_of_torch).max()}
    np.testing.assert_allclose(logits, logits_of_torch, **close)
    wanted = params_of(gradients)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest), found, wanted)


def stacked(layers, get):
    return jax.tree.map(lambda *each: np.stack(each), *[get(layer) for layer in range(layers)])


def lifted(w, cfg, foreign):
    """Theirs as ours, by the library's own map."""

    def leaf(path, spec):
        place = places[dotted(path)]
        each = [place.pattern.read(w[name], spec.shape[spec.num_stacked :]) for name in names_of(place, spec).values()]
        return np.stack(each) if spec.num_stacked else each[0]

    places = foreign.places(cfg)
    return jax.tree_util.tree_map_with_path(leaf, encoder_decoder.specs(cfg), is_leaf=is_spec)


def t5_config(old, width):
    cfg = make(
        norm="rms_norm", norm_epsilon=1e-6, use_bias=False, positions="t5", initializer="t5", tie_embeddings=old,
        scale_output=old, head_width=width, activation="relu" if old else "geglu_tanh",
    )  # fmt: skip
    return dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, scale=1.0))


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_t5(version, monkeypatch):
    """transformers computes norms and softmax in float32 whatever the model's precision; that is undone."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(T5LayerNorm, "forward", norm)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    old, width = version == "v1.0", 6  # heads narrower than D / H
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=V, d_model=D, d_kv=width, d_ff=F, num_layers=E, num_decoder_layers=L, num_heads=H, dropout_rate=0.0,
        decoder_start_token_id=0, feed_forward_proj="relu" if old else "gated-gelu", tie_word_embeddings=old,
    ))  # fmt: skip
    if not old:  # transformers 5 ties these as well
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model = shaken(model)

    cfg = t5_config(old, width)
    inputs = {"input_ids": torch.tensor(SOURCE), "attention_mask": torch.tensor(THERE)}
    compare(
        model, lambda: model(**inputs, decoder_input_ids=torch.tensor(TARGET)).logits,
        lambda w: lifted(w, cfg, T5), cfg,
    )  # fmt: skip


def bart_layers(w, prefix, names=("encoder", "decoder")):
    """Our blocks of both stacks, of the layers that BART and Marian share."""

    def linear(name, suffix):
        return {f"w{suffix}": w[f"{name}.weight"].T, f"b{suffix}": w[f"{name}.bias"]}

    def norm(name):
        return {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

    def attention(name):
        made = {}
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            made[f"w_{ours}"] = w[f"{name}.{theirs}.weight"].T.reshape(D, H, D // H)
            made[f"b_{ours}"] = w[f"{name}.{theirs}.bias"].reshape(H, D // H)
        out = linear(f"{name}.out_proj", "_out")
        return made | {**out, "w_out": out["w_out"].reshape(H, D // H, D)}

    def block(side, layer):
        h = f"{prefix}{side}.layers.{layer}"
        made = {
            "attention": attention(f"{h}.self_attn"), "attention_norm": norm(f"{h}.self_attn_layer_norm"),
            "mlp": linear(f"{h}.fc1", "_up") | linear(f"{h}.fc2", "_down"), "mlp_norm": norm(f"{h}.final_layer_norm"),
        }  # fmt: skip
        if side == "decoder":
            made |= {"cross": attention(f"{h}.encoder_attn"), "cross_norm": norm(f"{h}.encoder_attn_layer_norm")}
        return made

    sides = zip(names, (E, L), strict=True)
    return {side: stacked(count, lambda layer, side=side: block(side, layer)) for side, count in sides}, norm


BART = make(block="post_norm", embedding_norm=True, activation="gelu", context_length=S)  # positions begin at 2
BART = dataclasses.replace(BART, positions=Learned(offset=2))


def bart_params(w):
    return lifted({name.removeprefix("model."): array for name, array in w.items()}, BART, HF_BART)


def test_bart():
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    model = shaken(BartForConditionalGeneration(BartConfig(
        vocab_size=V, d_model=D, encoder_layers=E, decoder_layers=L, encoder_attention_heads=H,
        decoder_attention_heads=H, encoder_ffn_dim=F, decoder_ffn_dim=F, max_position_embeddings=S, dropout=0.0,
        pad_token_id=0, attention_dropout=0.0, activation_function="gelu",
    )))  # fmt: skip

    inputs = {"input_ids": torch.tensor(SOURCE), "attention_mask": torch.tensor(THERE)}
    compare(model, lambda: model(**inputs, decoder_input_ids=torch.tensor(TARGET)).logits, bart_params, BART)


def test_marian():
    """The model of 2017. Marian's sinusoids are all sines, then all cosines; ours alternate: one permutation of D."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    model = shaken(MarianMTModel(MarianConfig(
        vocab_size=V, d_model=D, encoder_layers=E, decoder_layers=L, encoder_attention_heads=H,
        decoder_attention_heads=H, encoder_ffn_dim=F, decoder_ffn_dim=F, max_position_embeddings=S, dropout=0.0,
        pad_token_id=0, attention_dropout=0.0, activation_function="relu", scale_embedding=True,
    )), double=False)  # fmt: skip
    for side in (model.model.encoder, model.model.decoder):
        torch.manual_seed(0)
        side.embed_positions.weight.data = side.embed_positions.create_weight()  # which were shaken as well
        side.embed_positions.weight.requires_grad = False
    order = np.argsort(np.concatenate([np.arange(0, D, 2), np.arange(1, D, 2)]))

    def params_of(w):
        blocks, _ = bart_layers(w, "model.")
        made = {"embedding": {"tokens": w["model.shared.weight"]}, "blocks": blocks["decoder"],
                "encoder": {"blocks": blocks["encoder"]}}  # fmt: skip
        axes = jax.tree.map(lambda spec: spec.axes, encoder_decoder.specs(cfg), is_leaf=lambda x: hasattr(x, "axes"))
        ours = jax.tree.map(lambda a, of: reordered(a, of), made, axes, is_leaf=lambda x: isinstance(x, np.ndarray))
        return ours

    def reordered(array, of):
        for axis, name in enumerate(of):
            if name == "embed" or (name == "norm" and array.shape[axis] == D):
                array = np.take(array, order, axis=axis)
        return array

    cfg = make(block="post_norm", positions="sinusoidal", activation="relu")
    inputs = {"input_ids": torch.tensor(SOURCE), "attention_mask": torch.tensor(THERE)}
    for parameter in (model.model.encoder.embed_positions.weight, model.model.decoder.embed_positions.weight):
        parameter.grad = torch.zeros_like(parameter)
    compare(model, lambda: model(**inputs, decoder_input_ids=torch.tensor(TARGET)).logits, params_of, cfg, double=False)


@pytest.mark.parametrize("block", ["post_norm", "pre_norm"])
def test_torch(block):
    """torch.nn's layers, without the final norms that nn.Transformer adds to post-norm layers too; learned positions
    are given to it as part of the embeddings."""
    import torch
    from torch import nn

    first = block == "pre_norm"
    options = {"dim_feedforward": F, "dropout": 0.0, "norm_first": first, "batch_first": True}

    def final():
        return nn.LayerNorm(D) if first else None

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.source_at, self.target_at = (nn.Embedding(n, D) for n in (V, S, T))
            encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, **options), E, final())
            decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, **options), L, final())
            self.whole = nn.Transformer(D, H, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)

        def forward(self):
            padding = torch.tensor(THERE == 0)
            source, target = self.table(torch.tensor(SOURCE)), self.table(torch.tensor(TARGET))
            after = torch.ones(T, T, dtype=torch.bool).triu(1)
            x = self.whole(
                source + self.source_at.weight, target + self.target_at.weight, tgt_mask=after,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return x @ self.table.weight.T

    model = shaken(Whole())

    def params_of(w):
        def norm(name):
            return {"scale": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

        def attention(name):
            made = {}
            for n, m, b in zip(
                ("query", "key", "value"), np.split(w[f"{name}.in_proj_weight"], 3),
                np.split(w[f"{name}.in_proj_bias"], 3), strict=True,
            ):  # fmt: skip
                made |= {f"w_{n}": m.T.reshape(D, H, D // H), f"b_{n}": b.reshape(H, D // H)}
            out = {"w_out": w[f"{name}.out_proj.weight"].T.reshape(H, D // H, D), "b_out": w[f"{name}.out_proj.bias"]}
            return made | out

        def layer(side, number):
            h, last = f"whole.{side}.layers.{number}", 2 if side == "encoder" else 3
            made = {
                "attention": attention(f"{h}.self_attn"), "attention_norm": norm(f"{h}.norm1"),
                "mlp": {"w_up": w[f"{h}.linear1.weight"].T, "b_up": w[f"{h}.linear1.bias"],
                        "w_down": w[f"{h}.linear2.weight"].T, "b_down": w[f"{h}.linear2.bias"]},
                "mlp_norm": norm(f"{h}.norm{last}"),
            }  # fmt: skip
            return made | ({"cross": attention(f"{h}.multihead_attn"), "cross_norm": norm(f"{h}.norm2")}
                           if last == 3 else {})  # fmt: skip

        encoder = {"embedding": {"positions": w["source_at.weight"]},
                   "blocks": stacked(E, lambda number: layer("encoder", number))}  # fmt: skip
        made = {"embedding": {"tokens": w["table.weight"], "positions": w["target_at.weight"]},
                "blocks": stacked(L, lambda number: layer("decoder", number))}  # fmt: skip
        if first:
            encoder["final_norm"], made["final_norm"] = norm("whole.encoder.norm"), norm("whole.decoder.norm")
        return made | {"encoder": encoder}

    compare(model, model, params_of, make(block=block, activation="relu"))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_beam_search_finds_what_transformers_finds(kind):
    """Random models, at a length penalty of 0, where both rank by the same scores, and to the very end."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    same, beams, new, models = 0, 4, 8, 10
    for seed in range(models):
        torch.manual_seed(seed)
        tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        if kind == "t5":
            model = T5ForConditionalGeneration(T5Config(
                vocab_size=V, d_model=D, d_kv=D // H, d_ff=F, num_layers=L, num_heads=H, **tokens,
            ))  # fmt: skip
        else:
            model = BartForConditionalGeneration(BartConfig(
                vocab_size=V, d_model=D, encoder_layers=E, decoder_layers=L, encoder_attention_heads=H,
                decoder_attention_heads=H, encoder_ffn_dim=F, decoder_ffn_dim=F, max_position_embeddings=S,
                forced_eos_token_id=None, bos_token_id=2, **tokens,
            ))  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.eval()
        source = np.random.default_rng(seed).integers(2, V, (1, S - seed % 4))
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor(source), num_beams=beams, num_return_sequences=beams, do_sample=False, max_new_tokens=new,
                early_stopping="never", length_penalty=0.0, output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
        ends = [row[1:].tolist() for row in theirs.sequences.numpy()]
        ends = [row[: row.index(1) + 1] if 1 in row else row[:new] for row in ends]
        weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
        if kind == "t5":  # whose cache in transformers has a layer for each of the encoder's
            cfg = t5_config(True, D // H)
            cfg = dataclasses.replace(cfg, encoder=dataclasses.replace(cfg.encoder, num_layers=L))
            params = lifted(weights, cfg, T5)
        else:
            params, cfg = bart_params(weights), BART
        found = beam_search(
            jax.tree.map(jnp.asarray, params), [[0]], cfg, sources=source, beams=beams, max_new_tokens=new, stop=[1]
        )
        ours = [row[:n].tolist() for row, n in zip(found.tokens[0], found.lengths[0], strict=True)]
        np.testing.assert_allclose(found.scores[0], theirs.sequences_scores.numpy(), rtol=1e-4, atol=1e-4)
        same += ours == ends
    assert same >= models - 1  # two hypotheses may score alike

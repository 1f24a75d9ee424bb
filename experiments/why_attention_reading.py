"""What is read of the models of `experiments.why_attention`: answers to new pairs, and what they attend to."""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import masks
from jaxformer.config import Config, ModelConfig
from jaxformer.data.decoding_text import DecodingText
from jaxformer.data.transduction import Transduction, language, text
from jaxformer.functional import aligned_decoder, attention_layer
from jaxformer.functional.attention_layer import SOFTMAX
from jaxformer.functional.block import block, unstack
from jaxformer.functional.layer import Context, norm
from jaxformer.functional.position_encodings import rotation
from jaxformer.models import embedding, encoder_decoder
from jaxformer.types import Array, Params


class Pairs(NamedTuple):
    """Pairs of one length: symbols of sources and targets [P, T], the places [P, T] that targets come from, and the
    ids of the source with its end, and of the target behind the start token, [P, T + 1]."""

    sources: np.ndarray
    targets: np.ndarray
    aligned: np.ndarray
    source_ids: np.ndarray
    target_ids: np.ndarray


def pairs_of(config: Config, words: DecodingText, length: int, number: int, count: int) -> Pairs:
    """New pairs of a length. `number`: others for each."""
    data = replace(config.data, language_shortest=length, language_longest=length)
    drawn = language(data)
    sources, targets = (side.values.reshape(count, length) for side in drawn.sample(count, "validation", number))
    ids = symbol_ids(drawn, words)
    end, start = np.full((count, 1), words.end), np.full((count, 1), words.start)
    aligned = np.stack([drawn.alignment(source) for source in sources])
    behind, before = np.hstack([ids[sources], end]), np.hstack([start, ids[targets]])
    return Pairs(sources, targets, aligned, behind, before)


def symbol_ids(drawn: Transduction, words: DecodingText) -> np.ndarray:
    """[V] the token id of each symbol."""
    return words.tokenizer.encode(text(np.arange(drawn.alphabet), drawn.alphabet), strict=True)


def right(out: np.ndarray, pairs: Pairs, drawn: Transduction, words: DecodingText) -> np.ndarray:
    """[P, T + 1] bool: which tokens of the answers are a synonym of the symbol that belongs there, or the end.

    Args:
      out: [P, at least T + 1] ids, -1 after the end.
      pairs: what was asked.
      drawn, words: the language, and how it is written.
    """
    symbols = symbol_ids(drawn, words)[drawn.synonyms[np.take_along_axis(pairs.sources, pairs.aligned, axis=1)]]
    length = pairs.sources.shape[1]
    found = (out[:, :length, None] == symbols).any(axis=-1)
    return np.hstack([found, out[:, length : length + 1] == words.end])


@functools.partial(jax.jit, static_argnames="cfg")
def attention_weights(params: Params, pairs: Pairs, cfg: ModelConfig) -> list[Array]:
    """What each layer attends to while it predicts the target: [P, T + 1, S], the mean of its heads; [] without.

    The target is given; row t is of the prediction of symbol t.
    """
    source, target = jnp.asarray(pairs.source_ids), jnp.asarray(pairs.target_ids)
    states = encoder_decoder.encode(params, source, jnp.full(len(source), source.shape[1]), cfg).states
    positions = jnp.arange(target.shape[1])
    x = embedding.embed(params["embedding"], target, positions, cfg)
    context = Context(masks.causal(), rotation(cfg, positions), source=states)
    layers = unstack(params["blocks"], cfg.num_layers)
    if cfg.attention.kind == "alignment":
        weights = aligned_decoder.decode(layers[0]["attention"], x, cfg, context)[2]
        return [] if weights is None else [weights]
    out = []
    for layer in layers:  # pre_norm
        attended = SOFTMAX.apply(layer["attention"], norm(layer["attention_norm"], x, cfg), cfg, context)[0]
        read = norm(layer["cross_norm"], x + attended, cfg)
        query, key, _ = attention_layer.project(layer["cross"], read, states, cfg)
        scores = jnp.einsum("BTHK,BSHK->BHTS", query, key) * attention_layer.score_scale(cfg)
        out.append(jax.nn.softmax(scores, axis=-1).mean(axis=1))
        x, _, _ = block(layer, x, cfg, context)
    return out


def misaligned(weights: Array, pairs: Pairs) -> float:
    """The share of the target's symbols that attend most to another symbol than the one that they come from."""
    return float((np.asarray(weights).argmax(axis=-1)[:, :-1] != pairs.aligned).mean())

"""Decoding: generating text with a GPT (sampling, streaming, beam search) and filling in masks with a BERT.

`generate`, `stream`, `beam_search` and `fill_mask` take token ids and return NumPy arrays; `prefill`, `step` and
`logits` are the pure functions they are made of.
"""

from jaxformer.decoding.beam import Beams, beam_search
from jaxformer.decoding.cache import Cache, logits, prefill, prepare_decode_params, step
from jaxformer.decoding.fill import Filled, fill_mask
from jaxformer.decoding.generation import Generated, generate, stream
from jaxformer.decoding.sampling import Sampling, keep_min_p, keep_top_k, keep_top_p, penalize_repetition

__all__ = [
    "Beams", "Cache", "Filled", "Generated", "Sampling", "beam_search", "fill_mask", "generate", "keep_min_p",
    "keep_top_k", "keep_top_p", "logits", "penalize_repetition", "prefill", "prepare_decode_params",
    "step", "stream",
]  # fmt: skip

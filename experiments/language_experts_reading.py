"""What `experiments.language_experts` reads: the exact floor of held-out rows, and which expert each token chose.

>>> alike, apart = np.ones((2, 2)), np.eye(4)
>>> information(alike), information(apart)
(0.0, 2.0)
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import Config, DataConfig, ModelConfig
from jaxformer.data import languages
from jaxformer.data.markov import Markov
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.functional.attention_layer import SOFTMAX
from jaxformer.functional.block import Terms, block, unstack
from jaxformer.functional.layer import Context, norm
from jaxformer.functional.router import route
from jaxformer.models import backbone, embedding
from jaxformer.runs import texts
from jaxformer.types import Array, Batch, Params

NOTHING = -1  # in place of a symbol: the separator that opens a text, or padding


class HeldOutRows(NamedTuple):
    """The held-out rows of one language.

    Attributes:
      batches: as an evaluation takes them.
      symbols: [R, T + 1], the first token of each row and its T targets; NOTHING where there is none.
      own: [R] nats of a row's targets for a model that is told the language.
      best: [R] nats for one that knows all languages, and is not told which of them this is.
      sure: [R] the chance that it gives the row's language after half of its targets.
    """

    batches: Sequence[Batch]
    symbols: np.ndarray
    own: np.ndarray
    best: np.ndarray
    sure: np.ndarray


def chain_of(data: DataConfig) -> Markov:
    """The language of one source.

    Raises:
      ValueError: its symbols depend on more than the one before them.
    """
    if data.source != "markov" or data.language_order != 1:
        raise ValueError(f"chain_of: {data.source} of order {data.language_order}; accepted: markov of order 1")
    return Markov(data.language_symbols, 1, data.language_zipf, data.language_seed)


def log_chances(symbols: np.ndarray, language: Markov) -> tuple[np.ndarray, np.ndarray]:
    """([R] log of the chance of each row's first symbol, [R] that of the others given the first); `symbols` [R, T + 1].

    After the separator a symbol has its stationary chance, as the first of a text has.
    """
    first = np.append(np.log(language.stationary), 0.0)  # NOTHING is the last, and certain
    given = np.pad(np.log(language.chances), (0, 1))
    given[NOTHING, :NOTHING] = first[:NOTHING]
    return first[symbols[:, 0]], given[symbols[:, :-1], symbols[:, 1:]].sum(axis=1)


def told(symbols: np.ndarray, language: Markov) -> np.ndarray:
    """[R] nats of the targets of each row, [R, T + 1], for a model that is told its language."""
    return -log_chances(symbols, language)[1]


def untold(symbols: np.ndarray, drawn: Sequence[Markov], shares: Sequence[float]) -> np.ndarray:
    """[R] nats of the targets of each row, [R, T + 1], for a model that knows the languages and their shares alone:
    -log p(targets | first token), p the mixture of all. No model that is not told can lose less on average."""
    first, rest = log_joint(symbols, drawn, shares)
    return np.logaddexp.reduce(first, axis=0) - np.logaddexp.reduce(first + rest, axis=0)


def posterior(symbols: np.ndarray, drawn: Sequence[Markov], shares: Sequence[float]) -> np.ndarray:
    """[languages, R] the chance of each language given all symbols of a row, [R, T + 1]."""
    whole = log_joint(symbols, drawn, shares).sum(axis=0)
    return np.exp(whole - np.logaddexp.reduce(whole, axis=0))


def log_joint(symbols: np.ndarray, drawn: Sequence[Markov], shares: Sequence[float]) -> np.ndarray:
    """[2, languages, R] log of the chance of each language and the first symbol of a row, and of the others given
    these; `symbols` [R, T + 1]."""
    both = np.swapaxes([log_chances(symbols, each) for each in drawn], 0, 1)
    return both + np.stack([np.log(shares), np.zeros(len(drawn))])[..., None]


def held_out(config: Config, text: texts.Text) -> dict[str, HeldOutRows]:
    """The rows that a run's final evaluation is over, by language."""
    parts, shares = config.data.parts(), list(text.shares.values())
    chains = [chain_of(part) for part in parts.values()]
    places = symbol_of_id(next(iter(parts.values())), text.tokenizer)
    found = {}
    for number, (name, held) in enumerate(texts.held_out_of(config, text).items()):
        batches = [held.batches[i] for i in range(len(held.batches))]
        symbols = np.concatenate([row_symbols(batch, places) for batch in batches])
        own, best = told(symbols, chains[number]), untold(symbols, chains, shares)
        half = posterior(symbols[:, : symbols.shape[1] // 2 + 1], chains, shares)[number]
        found[name] = HeldOutRows(batches, symbols, own, best, half)
    return found


def symbol_of_id(data: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
    """[ids] the symbol that each token id stands for, NOTHING for the others."""
    found = np.full(tokenizer.vocab_size, NOTHING)
    found[tokenizer.encode(languages.alphabet(data.language_symbols), strict=True)] = np.arange(data.language_symbols)
    return found


def row_symbols(batch: Any, places: np.ndarray) -> np.ndarray:
    """[rows, T + 1] symbols of those rows of a batch, of NumPy arrays, that have a target."""
    targets = np.where(batch.weights > 0, places[batch.targets], NOTHING)
    rows = np.concatenate([places[batch.tokens[:, :1]], targets], axis=1)
    return rows[(batch.weights > 0).any(axis=1)]


def floors(config: Config, rows: dict[str, HeldOutRows]) -> dict[str, float]:
    """Nats per token.

    Returns:
      told: the floor of a model that is told the language, exactly; best, best_stderr: that of one that is not: what
      it loses more on the held-out rows, whose mean has a small standard error, on top of that; held_out: what it
      loses on these very rows; blind: of a model that sees one token, and so never learns which language it is; and
      sure, the mean of `HeldOutRows.sure`.
    """
    known = languages.floor(config.data, config.model.context_length)
    assert known is not None
    assert config.data.mixture is not None
    shares = np.array(list(config.data.mixture.shares().values()))
    more, errors = np.array([mean_of(each, each.best - each.own) for each in rows.values()]).T
    best = np.array([mean_of(each, each.best)[0] for each in rows.values()])
    chains = [chain_of(part) for part in config.data.parts().values()]
    joint = sum(share * c.stationary[:, None] * c.chances for share, c in zip(shares, chains, strict=True))
    return {
        "told": known.nats,
        "best": float(known.nats + shares @ more),
        "best_stderr": float(np.linalg.norm(shares * errors)),
        "held_out": float(shares @ best),
        "sure": float(np.mean([each.sure.mean() for each in rows.values()])),
        "blind": float(-(joint * np.log(joint / joint.sum(axis=1, keepdims=True))).sum()),
    }


def mean_of(rows: HeldOutRows, nats: np.ndarray) -> tuple[float, float]:
    """The mean per target of [R] nats of rows, and its standard error over rows."""
    targets = (rows.symbols[:, 1:] != NOTHING).sum(axis=1)
    mean = nats.sum() / targets.sum()
    error = np.sqrt(((nats - mean * targets) ** 2).sum() * len(nats) / (len(nats) - 1)) / targets.sum()
    return float(mean), float(error)


@functools.partial(jax.jit, static_argnames="cfg")
def choices(params: Params, batch: Batch, cfg: ModelConfig) -> Array:
    """[L, B, T, k] int32, the experts that each token of a batch chose in each layer, the best first.

    The model is run by the library's own functions, with `routed` in place of its stack of layers.
    """
    rows = embedding.shard_rows(batch.tokens, batch.positions, batch.segments, cfg)
    return backbone.run(params, rows.tokens, rows.positions, cfg, Context(rows.mask), layers=routed)[1]


def routed(params: Params, x: Array, cfg: ModelConfig, contexts: Sequence[Context]) -> tuple[Array, Array, Terms]:
    """As `block.stack` of pre-norm layers that all have experts; in place of a cache, what `choices` returns."""
    (context,), chosen = contexts, []
    for layer in unstack(params, cfg.num_layers):
        attended = SOFTMAX.apply(layer["attention"], norm(layer["attention_norm"], x, cfg), cfg, context)[0]
        read = norm(layer["mlp_norm"], x + attended, cfg).astype(jnp.float32)
        logits = jnp.einsum("BTD,DE->BTE", read, layer["mlp"]["w_router"], precision=jax.lax.Precision.HIGHEST)
        chosen.append(route(logits, cfg.feed_forward.top_k, layer["mlp"].get("bias"))[1])
        x, _, _ = block(layer, x, cfg, context)
    return x, jnp.stack(chosen), {}


def information(counts: np.ndarray) -> float:
    """Mutual information in bits of two things, from how often each pair of them was seen, [X, Y]."""
    joint = counts / counts.sum()
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / apart[seen])).sum())


def informations(counts: np.ndarray) -> dict[str, float]:
    """What the expert of a token says, in bits; `counts` [E, languages, symbols] tokens.

    Returns:
      language: of its language; symbol: of the symbol that it is; more: of the language, the symbol being known.
    """
    symbol = information(counts.sum(axis=1))
    whole = information(counts.reshape(len(counts), -1))
    return {"language": information(counts.sum(axis=2)), "symbol": symbol, "more": whole - symbol}

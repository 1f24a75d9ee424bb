"""block(): one Transformer layer in its three arrangements. stack(): all layers, by scan or unrolled.

`block_specs` declares the parameters; `stack` takes them stacked along a leading layer axis (`specs.stack_specs`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional.layer import NO_CONTEXT, Context, gather_sequence, norm, norm_specs, shard_residual
from jaxformer.functional.layers import PRODUCT, dropout
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.parallel.constraints import constrain_params
from jaxformer.types import Array, Params

Terms = dict[str, Array]  # name -> sum over tokens and layers, a term of the objective


def block_specs(cfg: ModelConfig) -> dict[str, Any]:
    """Parameters of one block: its sublayers, and a norm for each (a parallel block has one norm for all)."""
    tree: dict[str, Any] = {}
    for number, (name, sublayer) in enumerate(sublayers_of(cfg).items()):
        tree[name] = sublayer.specs(cfg)
        if number == 0 or cfg.block != "parallel":
            tree[f"{name}_norm"] = norm_specs(cfg)
    return tree


def block(
    params: Params, x: Array, cfg: ModelConfig, context: Context = NO_CONTEXT
) -> tuple[Array, dict[str, Any] | None, Terms]:
    """One Transformer block; activations between its sublayers are sharded by `constraints.ACTIVATION_RULES`.

    pre_norm:  x + attention(norm(x)), then x + mlp(norm(x))         (Radford et al. 2019, section 2.3)
    post_norm: norm(x + attention(x)), then norm(x + mlp(x))         (Vaswani et al. 2017, section 3.1)
    parallel:  x + attention(norm(x)) + mlp(norm(x))                 (Wang and Komatsuzaki 2021; PaLM, section 2)

    Args:
      params: as in `block_specs(cfg)`.
      x: [B, T, D].
      cfg: the model's config.
      context: what its sublayers look at; its cache is a dict with the cache of each sublayer by name, or None.

    Returns:
      [B, T, D], the cache with these tokens added (None if none was given), and terms of the objective.
    """
    params = constrain_params(params, block_specs(cfg))
    sublayers = sublayers_of(cfg)
    count = len(sublayers) + 1
    rngs = [None] * count if context.rng is None else list(jax.random.split(context.rng, count))
    caches, terms = {}, Terms()

    def run(number: int, name: str, read: Array) -> Array:
        """What a sublayer adds to the residual stream."""
        inner = rngs[0] if number == 0 or rngs[0] is None else jax.random.fold_in(rngs[0], number)
        cache = None if context.cache is None else context.cache[name]
        out, caches[name], more = sublayers[name].apply(
            params[name], read, cfg, context._replace(rng=inner, cache=cache)
        )
        terms.update({key: value + terms.get(key, 0) for key, value in more.items()})
        return dropout(out, cfg.dropout, rngs[number + 1])

    if cfg.block == "parallel":
        first = next(iter(sublayers))
        read = gather_sequence(norm(params[f"{first}_norm"], x, cfg))
        x = shard_residual(functools.reduce(jnp.add, [x, *(run(i, name, read) for i, name in enumerate(sublayers))]))
    else:
        for number, name in enumerate(sublayers):
            normed = functools.partial(norm, params[f"{name}_norm"], cfg=cfg)
            if cfg.block == "post_norm":
                x = normed(shard_residual(x + run(number, name, gather_sequence(x))))
            else:
                x = shard_residual(x + run(number, name, gather_sequence(normed(x))))
    return x, None if context.cache is None else caches, terms


def stack(
    params: Params, x: Array, cfg: ModelConfig, context: Context = NO_CONTEXT
) -> tuple[Array, list[dict[str, Any]] | None, Terms]:
    """All blocks, one after another; by `lax.scan` (one compiled body) or unrolled (faster, slower to compile).

    The backward pass recomputes what `execution.remat` says: "none" nothing, "dots" all but the products with
    weights, "full" everything between block inputs (Chen et al. 2016).

    Args:
      params: as in `stack_specs(block_specs(cfg), L)`, every leaf with a leading [L]; or a list of the L blocks'
        parameters (`unstack`), which are always unrolled.
      x: [B, T, D].
      cfg: the model's config.
      context: what the sublayers look at; its cache is a list with the cache of each block, or None. With a cache,
        layers are always unrolled, because a scan would copy every layer's cache at every step.

    Returns:
      [B, T, D], the cache of each block (None if none was given), and terms of the objective.
    """
    execution, cache, rng = context.execution, context.cache, context.rng
    scanned = execution.layers == "scan" and cache is None and not isinstance(params, list)

    def layer(x, part, layer_cache=None):
        number, layer_params = part
        layer_rng = None if rng is None else jax.random.fold_in(rng, number)
        x, layer_cache, terms = block(layer_params, x, cfg, context._replace(rng=layer_rng, cache=layer_cache))
        return x, (layer_cache, terms)

    if execution.remat != "none":
        keep = {"dots": jax.checkpoint_policies.save_only_these_names(PRODUCT), "full": None}[execution.remat]
        # Outside a loop XLA would merge the recomputation with the first computation, and keep its result after all.
        layer = jax.checkpoint(layer, policy=keep, prevent_cse=not scanned)
    if scanned:
        x, (_, terms) = jax.lax.scan(layer, x, (jnp.arange(cfg.num_layers), params))
        return x, None, jax.tree.map(jnp.sum, terms)
    if isinstance(x, jax.core.Tracer):  # traced and lowered once, not once for each layer; XLA inlines the calls
        layer = jax.jit(layer)
    caches, terms = [], Terms()
    for number, layer_params in enumerate(params if isinstance(params, list) else unstack(params, cfg.num_layers)):
        x, (layer_cache, more) = layer(x, (number, layer_params), None if cache is None else cache[number])
        caches.append(layer_cache)
        terms = {name: value + terms.get(name, 0) for name, value in more.items()}
    return x, None if cache is None else caches, terms


def unstack(tree: Any, num_layers: int) -> list[Any]:
    """One tree per layer. By `lax.split`, whose gradient is one concatenation; indexing would pad and add L times."""
    leaves, structure = jax.tree.flatten(tree)
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[i][0] for parts in split]) for i in range(num_layers)]


def term_weights(cfg: ModelConfig, tokens: Array) -> Terms:
    """The weights of the terms that the blocks add to the objective: number of tokens [B, T] times layers."""
    names = [name for sublayer in sublayers_of(cfg).values() for name in sublayer.terms]
    return dict.fromkeys(names, jnp.asarray(tokens.size * cfg.num_layers, jnp.float32))


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> list[dict[str, Any]]:
    """The empty cache of all blocks, for `rows` sequences of at most `length` tokens; see `layer.Sublayer`."""
    layer = {name: sublayer.init_cache(cfg, rows, length, dtype) for name, sublayer in sublayers_of(cfg).items()}
    return [layer] * cfg.num_layers

"""block(): one Transformer layer in its arrangements. stack(): all layers, by scan or unrolled.

`block_specs` declares the parameters; `stack` takes them stacked along a leading layer axis (`specs.stack_specs`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig, period_of
from jaxformer.functional import reversible
from jaxformer.functional.layer import NO_CONTEXT, Context, gather_sequence, norm, norm_specs, shard_residual
from jaxformer.functional.layers import dropout
from jaxformer.functional.multipliers import branch_scale, scaled
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.functional.whole_weights import gathered_params
from jaxformer.kernels.rematerialize import ATTENTION, PRODUCT, SAME_IN_ALL_LAYERS, keeps_attention
from jaxformer.masks import Mask
from jaxformer.parallel.constraints import constrain_params
from jaxformer.parallel.platforms import this_platform
from jaxformer.types import Array, Params

Terms = dict[str, Array]  # name -> sum over tokens and layers, a term of the objective


def block_specs(cfg: ModelConfig) -> dict[str, Any]:
    """Parameters of one block: its sublayers, and a norm for each (one for all if it is parallel, two if sandwich, none
    if plain)."""
    tree: dict[str, Any] = {}
    for number, (name, sublayer) in enumerate(sublayers_of(cfg).items()):
        tree[name] = sublayer.specs(cfg)
        if cfg.block == "plain":
            continue
        if number == 0 or cfg.block != "parallel":
            tree[f"{name}_norm"] = norm_specs(cfg)
        if cfg.block == "sandwich":
            tree[f"{name}_out_norm"] = norm_specs(cfg)
    return tree


def model_specs(cfg: ModelConfig) -> dict[str, Any]:
    """Parameters that all blocks share, by name of the sublayer; usually none."""
    found = {name: sublayer.model_specs for name, sublayer in sublayers_of(cfg).items() if sublayer.model_specs}
    trees = {name: specs(cfg) for name, specs in found.items()}
    return {name: tree for name, tree in trees.items() if tree}


def block(
    params: Params, x: Array, cfg: ModelConfig, context: Context = NO_CONTEXT
) -> tuple[Array, dict[str, Any] | None, Terms]:
    """One Transformer block; activations between its sublayers are sharded by `constraints.ACTIVATION_RULES`.

    pre_norm:  x + attention(norm(x)), then x + mlp(norm(x))         (Radford et al. 2019, section 2.3)
    post_norm: norm(x + attention(x)), then norm(x + mlp(x))         (Vaswani et al. 2017, section 3.1)
    parallel:  x + attention(norm(x)) + mlp(norm(x))                 (Wang and Komatsuzaki 2021; PaLM, section 2)
    parallel_norms: the same with a norm for each                    (Black et al. 2022, section 2.1)
    sandwich:  x + norm(attention(norm(x))), then the same of mlp    (Ding et al. 2021, section 2.2; Gemma 2)
    plain:     attention(x), then mlp of that: layers on layers, as recurrent ones were stacked
    reversible: y1 = x + attention(norm(x)), then the mean of y1 and x + mlp(norm(y1)); between layers both are passed
               on, see `functional.reversible`

    A decoder that reads a source has cross attention between the two, arranged in the same way. What is added to x is
    multiplied by `multipliers.branch_scale`, usually 1.

    Args:
      params: as in `block_specs(cfg)`.
      x: [B, T, D].
      cfg: the model's config.
      context: what its sublayers look at; its cache is a dict with the cache of each sublayer by name, or None.

    Returns:
      [B, T, D], the cache with these tokens added (None if none was given), and terms of the objective.
    """
    if cfg.block == "reversible":
        streams, cache, terms = reversible.layer(params, reversible.enter(x), cfg, context, x.dtype)
        return reversible.leave(streams, x.dtype), cache, terms
    params = constrain_params(params, block_specs(cfg))
    if context.execution.remat != "none" and this_platform() == "cuda":
        params = gathered_params(params, block_specs(cfg), cfg.dtype)
    sublayers = sublayers_of(cfg)
    count = len(sublayers) + 1
    rngs = [None] * count if context.rng is None else list(jax.random.split(context.rng, count))
    caches, terms = {}, Terms()

    def run(number: int, name: str, read: Array, normed: Callable[[Array], Array] = lambda x: x) -> Array:
        """What a sublayer adds to the residual stream."""
        inner = rngs[0] if number == 0 or rngs[0] is None else jax.random.fold_in(rngs[0], number)
        cache, keys = None if context.cache is None else context.cache[name], context.key_input
        if keys is not None and name == "attention":
            keys = keys._replace(states=gather_sequence(normed(keys.states)))
        out, caches[name], more = sublayers[name].apply(
            params[name], read, cfg, context._replace(rng=inner, cache=cache, key_input=keys)
        )
        terms.update({key: value + terms.get(key, 0) for key, value in more.items()})
        return dropout(out, cfg.dropout, rngs[number + 1])

    if cfg.block in ("parallel", "parallel_norms"):
        first = next(iter(sublayers))
        norms = {
            n: functools.partial(norm, params[f"{n}_norm"], cfg=cfg)
            for n in sublayers
            if n == first or cfg.block == "parallel_norms"
        }
        reads = {name: gather_sequence(each(x)) for name, each in norms.items()}
        outs = (
            scaled(run(i, name, reads.get(name, reads[first]), norms[first]), branch_scale(cfg))
            for i, name in enumerate(sublayers)
        )
        x = shard_residual(functools.reduce(jnp.add, [x, *outs]))
    elif cfg.block == "plain":
        for number, name in enumerate(sublayers):
            x = shard_residual(run(number, name, gather_sequence(x)))
    else:
        for number, name in enumerate(sublayers):
            of_input = functools.partial(norm, params[f"{name}_norm"], cfg=cfg)
            if cfg.block == "post_norm":
                x = of_input(shard_residual(x + run(number, name, gather_sequence(x))))
            else:
                out = run(number, name, gather_sequence(of_input(x)), of_input)
                out = norm(params[f"{name}_out_norm"], out, cfg) if cfg.block == "sandwich" else out
                x = shard_residual(x + scaled(out, branch_scale(cfg)))
    return x, None if context.cache is None else caches, terms


def stack(
    params: Params,
    x: Any,
    cfg: ModelConfig,
    context: Context | Sequence[Context] = NO_CONTEXT,
    block: Callable[..., Any] = block,
) -> tuple[Any, list[dict[str, Any]] | None, Terms]:
    """All blocks, one after another; by `lax.scan` (one compiled body) or unrolled (faster, slower to compile).

    The backward pass recomputes what `execution.remat` says: "none" nothing, "dots" all but the products with
    weights, "attention" all but softmax attention, "full" everything between block inputs (Chen et al. 2016).

    Args:
      params: as in `stack_specs(block_specs(cfg), L)`, every leaf with a leading [L]; or a list of the L blocks'
        parameters (`unstack`), which are always unrolled.
      x: [B, T, D]; or what `block` takes in its place, any tree of arrays.
      cfg: the model's config.
      context: what the sublayers look at; its cache is a list with the cache of each block, or None. With a cache,
        layers are always unrolled, because a scan would copy every layer's cache at every step. Where layers differ
        (`config.period_of`), one for each of a period; the mask's window is the layer's in any case.
      block: a function as `block`, in its place; not with reversible blocks.

    Returns:
      As x, the cache of each block (None if none was given), and terms of the objective.
    """
    contexts = (context,) if isinstance(context, Context) else tuple(context)
    execution, cache, rng = contexts[0].execution, contexts[0].cache, contexts[0].rng
    depth = len(params) if isinstance(params, list) else jax.tree.leaves(params)[0].shape[0]
    scanned = execution.layers == "scan" and cache is None and not isinstance(params, list)
    if cfg.block == "reversible":
        listed = params if scanned or isinstance(params, list) else unstack(params, depth)
        return reversible.run(listed, x, cfg, contexts[0], scanned)
    layers = []
    for cfg_i, context_i in _of_layers(cfg, contexts):

        def layer(x, part, layer_cache=None, cfg=cfg_i, context=context_i):
            number, layer_params = part
            layer_rng = None if rng is None else jax.random.fold_in(rng, number)
            x, layer_cache, terms = block(layer_params, x, cfg, context._replace(rng=layer_rng, cache=layer_cache))
            return x, (layer_cache, terms)

        layers.append(rematerialized(layer, execution, in_loop=scanned))
    if scanned:
        return _scan(layers, x, depth, params)
    if isinstance(jax.tree.leaves(x)[0], jax.core.Tracer):
        layers = [jax.jit(layer) for layer in layers]  # traced and lowered once; XLA inlines the calls
    caches, terms = [], Terms()
    for number, layer_params in enumerate(params if isinstance(params, list) else unstack(params, depth)):
        layer = layers[number % len(layers)]
        x, (layer_cache, more) = layer(x, (number, layer_params), None if cache is None else cache[number])
        caches.append(layer_cache)
        terms = {name: value + terms.get(name, 0) for name, value in more.items()}
    return x, None if cache is None else caches, terms


def rematerialized(function: Callable[..., Any], execution: Execution, in_loop: bool) -> Callable[..., Any]:
    """`function` whose backward pass computes again what `execution.remat` says. `in_loop`: it is the body of a scan;
    elsewhere XLA would merge the recomputation with the first computation, and keep its result."""
    if execution.remat == "none":
        return function
    policies = jax.checkpoint_policies
    kept = {"dots": PRODUCT, "attention": ATTENTION, "full": SAME_IN_ALL_LAYERS}[execution.remat]
    keep = policies.save_only_these_names(SAME_IN_ALL_LAYERS, kept)
    if execution.remat == "attention":
        keep = policies.save_from_both_policies(keep, keeps_attention)
    return jax.checkpoint(function, policy=keep, prevent_cse=not in_loop)


def _of_layers(cfg: ModelConfig, contexts: tuple[Context, ...]) -> list[tuple[ModelConfig, Context]]:
    """Config and context of each layer up to where they repeat."""
    period = period_of(cfg)
    if len(period) == 1:
        return [(cfg, contexts[0])]
    each = contexts * len(period) if len(contexts) == 1 else contexts
    return [
        (
            one,
            context._replace(
                mask=replace(Mask() if context.mask is None else context.mask, window=one.attention.window)
            ),
        )
        for one, context in zip(period, each, strict=True)
    ]


def _scan(layers: list[Any], x: Array, num_layers: int, params: Params) -> tuple[Array, None, Terms]:
    """`stack` by a scan over periods of layers, with the layers of a period, and what is left at the end, unrolled."""
    size = len(layers)
    if size == 1:
        x, (_, terms) = jax.lax.scan(layers[0], x, (jnp.arange(num_layers), params))
        return x, None, jax.tree.map(jnp.sum, terms)
    whole = num_layers - num_layers % size

    def period(x, part):
        numbers, period_params = part
        terms = Terms()
        for number, layer in enumerate(layers):
            x, (_, more) = layer(x, (numbers[number], jax.tree.map(lambda leaf, i=number: leaf[i], period_params)))
            terms = {name: value + terms.get(name, 0) for name, value in more.items()}
        return x, terms

    count = whole // size
    numbers = jnp.arange(whole).reshape(count, size)
    periods = jax.tree.map(lambda leaf: leaf[:whole].reshape(count, size, *leaf.shape[1:]), params)
    x, terms = jax.lax.scan(period, x, (numbers, periods))
    terms = jax.tree.map(jnp.sum, terms)
    for number in range(whole, num_layers):
        x, (_, more) = layers[number % size](x, (number, jax.tree.map(lambda leaf, i=number: leaf[i], params)))
        terms = {name: value + terms.get(name, 0) for name, value in more.items()}
    return x, None, terms


def unstack(tree: Any, num_layers: int) -> list[Any]:
    """One tree per layer. By `lax.split`, whose gradient is one concatenation; indexing would pad and add L times."""
    leaves, structure = jax.tree.flatten(tree)
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[i][0] for parts in split]) for i in range(num_layers)]


def term_weights(cfg: ModelConfig, segments: Array) -> Terms:
    """The weights of the terms that the blocks add to the objective: number of tokens times layers.

    Args:
      cfg: the model.
      segments: [B, T] int, the document of each token, 0 for padding, which counts where a sublayer counts it.
    """
    weights = Terms()
    for sublayer in sublayers_of(cfg).values():
        if sublayer.terms:
            count = segments.size if sublayer.terms_of_padding else jnp.sum(segments != 0)
            weights |= dict.fromkeys(sublayer.terms, jnp.asarray(count * cfg.depth, jnp.float32))
    return weights


def measured_terms(cfg: ModelConfig) -> tuple[str, ...]:
    """The names of those terms of the blocks that are recorded and not minimised."""
    return tuple(dict.fromkeys(name for sublayer in sublayers_of(cfg).values() for name in sublayer.measured))


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> list[dict[str, Any]]:
    """The empty cache of all blocks, for `rows` sequences of at most `length` tokens; see `layer.Sublayer`."""
    layers = [
        {name: sublayer.init_cache(one, rows, length, dtype) for name, sublayer in sublayers_of(one).items()}
        for one in period_of(cfg)
    ]
    return [layers[number % len(layers)] for number in range(cfg.num_blocks)]

"""`block.stack` in stages: every stage of the mesh has a part of the layers, see `parallel.pipeline`.

A micro-batch takes its positions and its mask along, two integers for each token; what layers make of them (angles,
biases) each stage makes anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional import block as blocks
from jaxformer.functional.layer import Context
from jaxformer.kernels.attention.shard_specs import MASK_ROWS
from jaxformer.masks import Mask
from jaxformer.parallel import pipeline
from jaxformer.parallel.data_axis import data_shards, draws
from jaxformer.parallel.pipeline import MicroBatches
from jaxformer.types import Array, Params


def stack(
    params: Params,
    x: Array,
    cfg: ModelConfig,
    context: Context,
    positions: Array,
    contexts: Callable[[Params, Context, Array], Sequence[Context]],
    of_model: Params,
    lie: MicroBatches,
) -> tuple[Array, blocks.Terms]:
    """All layers of all stages; the same numbers as `block.stack` of each micro-batch.

    What `execution.remat` names is computed again for all layers of a stage at once: "full" keeps the input of a stage
    for every micro-batch, and the rest for one micro-batch at a time. (Of a part of a stage, where it has several.)

    Args:
      params: as in `stack_specs(block_specs(cfg), L)`; L is a multiple of the number of stages.
      x: [B, T, D], rows as `lie.arrange` puts them.
      cfg: the model's config.
      context: mask and execution; `rng` has a key for each micro-batch, [M], or is None.
      positions: [T] or [B, T] int.
      contexts: (`of_model`, context, positions) -> the contexts that `block.stack` takes.
      of_model: the parameters that all layers share.
      lie: how rows lie.

    Returns:
      As x, and terms of the objective.
    """
    execution = context.execution
    rows, mask, same = _split(context.mask)
    rows["x"] = x
    if positions.ndim == 2:
        rows["positions"] = positions
    common = {"of_model": of_model, "mask": mask}
    if context.rng is not None:
        common["rngs"] = jax.random.key_data(context.rng)
        kind = jax.random.key_impl(context.rng)
    if positions.ndim == 1:
        common["positions"] = positions
    each = replace(execution, remat="none")

    def apply(part: Any, common: Any, rows: dict[str, Array], number: Array, turn: Array) -> tuple[Array, blocks.Terms]:
        if lie.repeats > 1:
            part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, turn, keepdims=False), part)
        rng = jax.random.wrap_key_data(common["rngs"][number], impl=kind) if "rngs" in common else None

        def block(part: Any, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, blocks.Terms]:
            layer, layer_params = part
            layer_rng = None if rng is None else jax.random.fold_in(rng, layer)
            return blocks.block(layer_params, x, cfg, context._replace(rng=layer_rng))

        inner = context._replace(mask=_join(common["mask"], rows, same), rng=None, execution=each)
        found = contexts(common["of_model"], inner, rows.get("positions", common.get("positions")))
        out, _, terms = blocks.stack(part, rows["x"], cfg, found, block)
        return out, terms

    numbered = (jnp.arange(cfg.num_blocks), params)
    own_data = data_shards() > 1 and len(x) // lie.count % data_shards() == 0
    own_data = own_data and not _draws(apply, numbered, common, rows, lie)
    run = blocks.rematerialized(apply, execution, in_loop=True)
    return pipeline.run(run, numbered, common, rows, lie, own_data)


def _draws(apply: Callable[..., Any], params: Any, common: Any, rows: dict[str, Array], lie: MicroBatches) -> bool:
    """Whether the layers of a stage draw random numbers."""
    if "rngs" not in common:
        return False

    def like(size: Callable[[int], tuple[int, ...]], tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*size(len(x)), *x.shape[1:]), x.dtype), tree)

    first = (lie.repeats,) if lie.repeats > 1 else ()
    part = like(lambda layers: (*first, layers // (lie.stages * lie.repeats)), params)
    return draws(apply, part, common, like(lambda rows: (rows // lie.count,), rows), 0, 0)


def _split(mask: Mask | None) -> tuple[dict[str, Array], Mask | None, bool]:
    """The fields of a mask that have rows, the mask without them, and whether keys have the segments of queries."""
    if mask is None:
        return {}, None, False
    same = mask.key_segments is mask.query_segments
    found = {name: getattr(mask, name) for name, least in MASK_ROWS.items()}
    rows = {n: x for n, x in found.items() if x is not None and x.ndim > MASK_ROWS[n]}
    without = replace(mask, **dict.fromkeys(rows))
    if same:
        rows.pop("key_segments", None)
    return rows, without, same


def _join(mask: Mask | None, rows: dict[str, Array], same: bool) -> Mask | None:
    """The mask of a micro-batch."""
    if mask is None:
        return None
    fields = {name: rows[name] for name in MASK_ROWS if name in rows}
    if same:
        fields["key_segments"] = fields.get("query_segments")
    return replace(mask, **fields)

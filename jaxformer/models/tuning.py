"""What `tune` makes of a model: the learning rate of each layer, and layers that stay as they are."""

from dataclasses import replace
from typing import Any

import jax

from jaxformer.config import TuneConfig
from jaxformer.functional.block import unstack
from jaxformer.models.lora import GROUP
from jaxformer.specs import ParamSpec, is_spec, multiply_rate
from jaxformer.types import Params

BELOW = ("embedding", "embedding_norm", "shared")  # groups under the first block, or of all blocks together


def tuned(specs: dict[str, Any], tune: TuneConfig, num_layers: int) -> dict[str, Any]:
    """`specs` with the rates of their layers, and not trained what does not learn.

    Block l of L, counted from 1 at the bottom, learns at layer_decay ** (L - l) of the rate, the embeddings at
    layer_decay ** L; of a stack that learns in part, the layers that do not have the rate 0.

    Args:
      specs: of a model of one stack, by group.
      tune: the settings.
      num_layers: L.
    """
    if tune.trained_layers is None and tune.layer_decay == 1:
        return specs
    trained = num_layers if tune.trained_layers is None else tune.trained_layers
    rates = tuple(
        tune.layer_decay ** (num_layers - 1 - layer) if layer >= num_layers - trained else 0.0
        for layer in range(num_layers)
    )

    def below(spec: ParamSpec) -> ParamSpec:
        return multiply_rate(
            replace(spec, trained=trained == num_layers and spec.trained), tune.layer_decay**num_layers
        )

    def block(spec: ParamSpec) -> ParamSpec:
        return multiply_rate(replace(spec, trained=bool(trained) and spec.trained), rates)

    changes = {**dict.fromkeys(BELOW, below), "blocks": block}

    def changed(groups: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.tree.map(changes[name], group, is_leaf=is_spec) if name in changes else group
            for name, group in groups.items()
        }

    return {name: changed(group) if name == GROUP else group for name, group in changed(specs).items()}


def without_gradients(params: Params, tune: TuneConfig, num_layers: int) -> Params:
    """`params` with the blocks as a list, through the lower ones of which no gradient goes; so none is computed.

    The layers then run unrolled, whatever `execution.layers` says.
    """
    if tune.trained_layers is None:
        return params
    blocks = unstack(params["blocks"], num_layers)
    fixed = num_layers - tune.trained_layers
    return {**params, "blocks": [jax.lax.stop_gradient(each) for each in blocks[:fixed]] + blocks[fixed:]}

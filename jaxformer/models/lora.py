"""LoRA: a model that stays as it is, and beside its weights two thin matrices each that learn.

The parameters get one group more, "adapters", with an `a` and a `b` for every weight that is adapted, under the path of
that weight; all others keep their names. `with_adapters` puts a `LowRank` in the place of each of those weights, and
every function of the model takes such parameters.

>>> from jaxformer.config import ModelConfig
>>> from jaxformer.models import gpt
>>> cfg = ModelConfig(num_layers=2, width=32, context_length=16, vocab_size=64)
>>> specs = lora_specs(gpt.specs(cfg), cfg, TuneConfig(lora_rank=4, lora_targets=("query", "up")))
>>> {name: spec.shape for name, spec in specs["adapters"]["blocks"]["mlp"]["w_up"].items()}
{'a': (2, 32, 4), 'b': (2, 4, 128)}

Source: Hu et al. 2022, sections 4.1 and 4.2; Kalajdzievski 2023 (rsLoRA).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxformer.config import ModelConfig, TuneConfig
from jaxformer.config.suggestions import did_you_mean
from jaxformer.errors import ConfigError
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.low_rank import LowRank, factor_specs, is_low_rank
from jaxformer.models.families import HEADS
from jaxformer.specs import ParamSpec, is_spec, uniform, zeros
from jaxformer.types import Params

GROUP = "adapters"


def lora_specs(specs: dict[str, Any], cfg: ModelConfig, tune: TuneConfig) -> dict[str, Any]:
    """`specs` with the adapters, and everything else but the head of a task not trained; as they are with rank 0.

    A is uniform within 1 / sqrt(inputs), as the authors' code has it, and B is 0: the model begins as it was.

    Args:
      specs: of the model, by group.
      cfg: the model.
      tune: rank and targets.

    Raises:
      ConfigError: there is no such target, or a target is no wider than the rank.
    """
    if not tune.lora_rank:
        return specs
    known = {target_of(name) for name in weights_of(specs, cfg)}
    for target in tune.lora_targets or ():
        if target not in known:
            raise ConfigError(
                f"config.tune.lora_targets: {target!r}; accepted with this model: {', '.join(sorted(known)) or 'none'}"
                f"{did_you_mean(target, known)}"
            )
    if not known:
        raise ConfigError(
            f"config.tune.lora_rank: {tune.lora_rank}; model.attention.kind={cfg.attention.kind} and "
            f"model.feed_forward.kind={cfg.feed_forward.kind} have no weight that can be adapted; accepted: 0"
        )

    def factors(path: tuple[str, ...], spec: ParamSpec) -> dict[str, ParamSpec]:
        inputs, outputs = sides(spec)
        if tune.lora_rank > min(inputs, outputs):
            raise ConfigError(
                f"config.tune.lora_rank: {tune.lora_rank} is more than {'.'.join(path)} of {inputs} x {outputs} can "
                f"have; accepted: at most {min(inputs, outputs)}"
            )
        a, b = factor_specs(spec, tune.lora_rank)
        return {"a": replace(a, init=uniform(inputs**-0.5)), "b": replace(b, init=zeros)}

    chosen = known if tune.lora_targets is None else set(tune.lora_targets)
    adapters: dict[str, Any] = {}
    for path, spec in weights_of(specs, cfg).items():
        if target_of(path) in chosen:
            inner = adapters
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = factors(path, spec)
    of_task = set() if cfg.head is None else set(HEADS[str(cfg.head.task)].specs(cfg))
    still = {
        name: group if name in of_task else jax.tree.map(_frozen, group, is_leaf=is_spec)
        for name, group in specs.items()
    }
    return {**still, GROUP: adapters}


def weights_of(specs: dict[str, Any], cfg: ModelConfig) -> dict[tuple[str, ...], ParamSpec]:
    """Path -> spec of every weight that can be adapted: those of the blocks that `Sublayer.low_rank` names."""
    able = {name: sublayer.low_rank for name, sublayer in sublayers_of(cfg).items()}
    found = {}
    for keys, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        path = tuple(str(each.key) for each in keys)
        if len(path) >= 3 and path[-3] == "blocks" and path[-1] in able.get(path[-2], ()):
            found[path] = spec
    return found


def sides(spec: ParamSpec) -> tuple[int, int]:
    """Inputs and outputs of a matrix."""
    middle = spec.num_stacked + spec.num_inputs
    return math.prod(spec.shape[spec.num_stacked : middle]), math.prod(spec.shape[middle:])


def target_of(path: tuple[str, ...]) -> str:
    """`query` of (..., "w_query")."""
    return path[-1].replace("w_", "", 1)


def _frozen(spec: ParamSpec) -> ParamSpec:
    return replace(spec, trained=False)


def with_adapters(params: Params, tune: TuneConfig) -> Params:
    """Parameters in which a `LowRank` stands for every weight that is adapted, without the group of adapters.

    Args:
      params: with the group "adapters", or without, and then as they are.
      tune: what scales them.
    """

    def described(tree: Any, adapters: dict[str, Any]) -> Any:
        if not isinstance(tree, dict):
            return LowRank(tree, adapters["a"], adapters["b"], tune.lora_scale)
        return {**tree, **{name: described(tree[name], inner) for name, inner in adapters.items()}}

    plain = {name: group for name, group in params.items() if name != GROUP}
    return described(plain, params[GROUP]) if GROUP in params else params


def merge_lora(params: Params, num_stacked: int = 1) -> Params:
    """Plain parameters, of those in which a `LowRank` stands for some: W + scale A B in place of each.

    Args:
      params: from `with_adapters`; without a `LowRank` they are returned as they are.
      num_stacked: leading axes of the weights that number layers: 1, or 0 of one layer's parameters.
    """
    return _over_low_rank(lambda leaf: leaf.merged(num_stacked), params)


def plain_params(params: Params, tune: TuneConfig, shardings: Any) -> Params:
    """Parameters as the family's specs say: of a checkpoint, its adapters merged if it has some.

    Args:
      params: with the group "adapters", or without, and then as they are.
      tune: what scales them.
      shardings: of the result.
    """
    if GROUP not in params:
        return params
    found: Params = jax.jit(merge_lora, out_shardings=shardings)(with_adapters(params, tune))
    return found


def without_adapters(params: Params) -> Params:
    """Plain parameters, of those in which a `LowRank` stands for some: the W of each, which the adapters left alone."""
    return _over_low_rank(lambda leaf: leaf.weight, params)


def _over_low_rank(function: Callable[[LowRank], Any], params: Params) -> Params:
    found: Params = jax.tree.map(
        lambda leaf: function(leaf) if is_low_rank(leaf) else leaf, params, is_leaf=is_low_rank
    )
    return found


def adapter_flops(specs: dict[str, Any]) -> float:
    """Operations of all adapters for one token, forward: a product with A and one with B each."""
    leaves = jax.tree.leaves(specs.get(GROUP, {}), is_leaf=is_spec)
    return float(sum(2 * math.prod(spec.shape) for spec in leaves))

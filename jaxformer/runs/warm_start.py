"""Starting a run from the weights of another one (`config.init_from`).

A parameter of the same name and shape is taken as it is. Where the vocabulary or the tokenizer is another one, the rows
of tokens that both have are taken; of a learned table of positions, the rows that both have. Whatever else is new, such
as a head, begins as in any run. Every other difference of shapes is refused.
The adapters of the other run, if it has some, become part of its weights first.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config, TuneConfig, diff, to_dict
from jaxformer.config.text import LANGUAGES
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.models.lora import GROUP, merge_lora, with_adapters
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import param_shardings, replicated
from jaxformer.runs import manifest
from jaxformer.specs import ParamSpec, is_spec
from jaxformer.storage.address import place
from jaxformer.training.checkpoint.layout import items_of, leaf_name, list_steps, state_of
from jaxformer.training.checkpoint.manager import restore_params
from jaxformer.training.optim import make_optimizer
from jaxformer.training.state import TrainState, abstract_state, state_shapes
from jaxformer.types import Model, Params

ROWS = ("vocab", "positions")  # axes whose entries stand for tokens and positions, and may be more or fewer
ROLES = ("separator_id", "pad_id", "cls_id", "sep_id", "mask_id", "unk_id")


class WarmStart(NamedTuple):
    """What a run takes from another.

    Attributes:
      source: the other run's directory.
      specs: of its parameters.
      rows: [V] int64, for each token of this run its id in the other, or -1; None: the same tokenizer and size.
      tune: its adapters, which become part of the weights.
      trained: ``mesh -> its state as shapes and shardings``, if the optimizer's state is taken as well; else None.
      unused: what the config says of a tokenizer and is not done; "" for nothing.
    """

    source: str
    specs: Any
    rows: np.ndarray | None
    tune: TuneConfig
    trained: Callable[[Mesh], TrainState] | None
    unused: str = ""


def with_tokenizer(config: Config) -> Config:
    """`config` with the tokenizer of the run to start from, or of the teacher, where it names none: ids must mean what
    they meant there.

    A run that has begun has a copy, which is used from then on.

    Raises:
      ConfigError: there is no run to start from.
    """
    source = config.distill.teacher if config.init_from is None else config.init_from
    if (
        source is None
        or config.data.tokenizer_file is not None
        or all(part.source in LANGUAGES for part in config.data.parts().values())
    ):
        return config
    own = place(config.workdir) / "tokenizer.json"
    if not own.exists():
        _config_of(source, "distill.teacher" if config.init_from is None else "init_from")
    file = own if own.exists() else place(source) / "tokenizer.json"
    return replace(config, data=replace(config.data, tokenizer_file=str(file)))


def _config_of(run: str, field: str = "init_from") -> Config:
    try:
        found: Config = manifest.read_config(run)
        if not manifest.tokenizer_is_kept(run):
            raise ConfigError(
                f"workdir {run}: tokenizer.json is gone, damaged or another (its checksum is not the manifest's)"
            )
    except ConfigError as error:
        raise ConfigError(f"config.{field}: {error}") from None
    return found


def plan(config: Config, model: Model, tokenizer: Tokenizer) -> WarmStart | None:
    """Looks at the run to start from, and reads none of its weights; None without `config.init_from`.

    Raises:
      ConfigError: there is no such run or checkpoint, or a parameter of it has another shape than one row or position
        more explains; with `init_optimizer`, any parameter that is not the same, or another optimizer's state.
    """
    if config.init_from is None:
        return None
    theirs, old = _config_of(config.init_from), Tokenizer.load(config.init_from)
    if not list_steps(f"{config.init_from}/checkpoints"):
        raise ConfigError(f"config.init_from: {config.init_from} has no checkpoint; accepted: a run that saved one")
    specs = make_model(theirs.model, theirs.loss, tune=theirs.tune.of_weights).specs
    same = old.fingerprint == tokenizer.fingerprint and theirs.model.vocab_size == config.model.vocab_size
    rows = None if same else shared_rows(old, tokenizer, config)
    kept = theirs.data.tokenizer_file is None and old.fingerprint == tokenizer.fingerprint
    wanted = [each.data.tokenizer + f" of {each.data.tokenizer_vocab}" * (each.data.tokenizer == "bpe")
              for each in (theirs, config)]  # fmt: skip
    unused = f"data.tokenizer {wanted[1]}" if kept and len(set(wanted)) == 2 else ""
    found = WarmStart(config.init_from, specs, rows, theirs.tune, None, unused)
    mine, others = _weights(model.specs), _weights(specs)
    if not mine.keys() & others.keys():
        raise ConfigError(
            f"config.init_from: {config.init_from} holds a {theirs.model.family} without a parameter of this model"
        )
    for name in sorted(mine.keys() & others.keys()):
        if differs(mine[name], others[name]) or (config.init_optimizer and mine[name].shape != others[name].shape):
            raise ConfigError(
                f"config.init_from: {name} has the shape {list(others[name].shape)} in {config.init_from}, and "
                f"{list(mine[name].shape)} here; accepted: the same config.model but for vocabulary, context and heads"
            )
    if config.init_optimizer and "imported" in manifest.read(config.init_from):
        raise ConfigError(
            f"config.init_optimizer: True; {config.init_from} was imported, without a state of an optimizer; accepted: "
            "false"
        )
    both = mine.keys() ^ _flat(specs).keys()
    if config.init_optimizer and (both or found.rows is not None):
        odd = ", ".join(sorted(both)[:3]) or "the tokenizer"
        raise ConfigError(
            f"config.init_optimizer: True; {config.init_from} is of another model ({odd}); accepted: false"
        )
    return found._replace(trained=_trained(config, theirs, model)) if config.init_optimizer else found


def _trained(config: Config, theirs: Config, model: Model) -> Callable[[Mesh], TrainState]:
    """What `WarmStart.trained` is. Raises ConfigError: what the optimizers keep differs."""
    other = make_model(theirs.model, theirs.loss, freeze=theirs.optimizer.freeze)
    ours, others = (
        make_optimizer(each.optimizer, each.train.steps, of.specs) for each, of in ((config, model), (theirs, other))
    )
    # The first part is the update rule's: means of gradients. Of the rest only the schedule keeps something, a count.
    kept = [state_shapes(of, rule).opt_state[0] for of, rule in ((model, ours), (other, others))]
    if _flat(kept[0]) != _flat(kept[1]):
        changed = diff(to_dict(theirs)["optimizer"], to_dict(config)["optimizer"])
        raise ConfigError(
            f"config.init_optimizer: True; the optimizer of {config.init_from} keeps something else "
            f"({'; '.join(changed)}); accepted: false, or its config.optimizer"
        )
    return functools.partial(abstract_state, other, others)


def differs(mine: ParamSpec, other: ParamSpec) -> bool:
    """True if shapes differ in more than the number of tokens or positions."""
    pairs = zip(mine.axes, mine.shape, other.shape, strict=False)
    return len(mine.shape) != len(other.shape) or any(a != b for axis, a, b in pairs if axis not in ROWS)


def shared_rows(old: Tokenizer, new: Tokenizer, config: Config) -> np.ndarray:
    """[V] int64: the old id of each new token, by its bytes, its role or, of a special one, its name; -1: there is
    none."""
    assert config.model.vocab_size is not None
    known = {piece: i for i, piece in reversed(list(enumerate(old.pieces))) if piece}
    rows = [known.get(piece, -1) if piece else -1 for piece in new.pieces]
    special = new.special_ids.tolist()
    names = [(new.decode([each], skip_specials=False),) for each in special]
    for each, there in zip(special, old.ids_of(names).tolist(), strict=True):
        rows[each] = there
    for role in reversed(ROLES):  # the separator's last: roles that a tokenizer has no token for have its id
        rows[getattr(new, role)] = getattr(old, role)
    return np.array(rows + [-1] * (config.model.vocab_size - len(rows)), np.int64)


def starter(
    found: WarmStart, model: Model, mesh: Mesh, log: Callable[[str], None]
) -> Callable[[TrainState], TrainState]:
    """A function that gives the state of step 0 the weights of the other run, and says which."""

    mine, others = _weights(model.specs), _weights(found.specs)
    shardings = _flat(param_shardings(model.specs, mesh))
    fingerprint, also = manifest.fingerprints(found.source)

    def read(item: str | None, like: Any, step: int | None = None) -> tuple[Any, int]:
        directory = place(found.source) / "checkpoints"
        return restore_params(directory, like, item=item, step=step, fingerprint=fingerprint, also=also)

    def abstract(path: Any, spec: ParamSpec) -> jax.ShapeDtypeStruct:
        name = leaf_name(path)
        alike = name in mine and mine[name].shape == spec.shape
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=shardings[name] if alike else replicated(mesh))

    def start(state: TrainState) -> TrainState:
        values, step = read(None, jax.tree_util.tree_map_with_path(abstract, found.specs, is_leaf=is_spec))
        theirs = _flat(_merged(values, found.tune, shardings))

        def merged(path: Any, spec: ParamSpec, fresh: Any) -> Any:
            if leaf_name(path) not in theirs:
                return fresh
            old = theirs[leaf_name(path)]
            index = found.rows if "vocab" in spec.axes else None
            if index is None and old.shape == fresh.shape:
                return old
            axis = next(i for i, name in enumerate(spec.axes) if name in ROWS)
            return jax.jit(_rows_of, static_argnums=3, out_shardings=fresh.sharding)(fresh, old, index, axis)

        params = jax.tree_util.tree_map_with_path(merged, model.specs, state.params, is_leaf=is_spec)
        ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
        state = state._replace(params=params, ema=ema)
        if state.frozen is not None:
            state = state._replace(frozen=read("frozen", _abstract(state.frozen), step)[0])
        if found.trained is not None:  # not the step, which the schedule counts by
            other = found.trained(mesh)
            rest = read("state", items_of(other)["state"], step)[0]
            kept = state_of({**items_of(other), "state": rest}, other).opt_state
            state = state._replace(opt_state=(kept[0], *state.opt_state[1:]))
        anew = sorted(mine.keys() - others.keys())
        old = len(mine) - len(anew)
        anew += [GROUP] * (GROUP in model.specs)
        log(
            f"init_from: {old} of {len(mine)} parameters are those of {found.source} at step {step}"
            + (", its adapters merged" if GROUP in found.specs else "")
            + (f"; begin anew: {', '.join(anew)}" if anew else "")
            + ("" if found.rows is None else f"; of {len(found.rows)} tokens it has {int((found.rows >= 0).sum())}")
        )
        if found.unused:
            log(
                f"init_from: {found.unused} is not used: a run keeps the tokenizer of the one that it starts from, "
                "unless data.tokenizer_file names another"
            )
        return state

    return start


def _merged(values: Params, tune: TuneConfig, shardings: dict[str, Any]) -> Params:
    """Plain parameters of a run, laid out as those of this one that have their names; adapters are part of them."""
    if GROUP not in values:
        return values

    def laid_out(path: Any, leaf: Any) -> Any:
        return jax.device_put(leaf, shardings.get(leaf_name(path)))

    merged: Params = jax.tree_util.tree_map_with_path(laid_out, jax.jit(merge_lora)(with_adapters(values, tune)))
    return merged


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _rows_of(fresh: Any, old: Any, index: Any, axis: int) -> Any:
    """`fresh` with rows of `old`: those that `index` names, or as many as both have."""
    if index is None:
        count = min(fresh.shape[axis], old.shape[axis])
        part = jax.lax.slice_in_dim(old, 0, count, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(fresh, part, 0, axis)
    index = jnp.asarray(index)
    known = jnp.expand_dims(index >= 0, [i for i in range(fresh.ndim) if i != axis])
    return jnp.where(known, jnp.take(old, jnp.maximum(index, 0), axis=axis, mode="clip"), fresh)


def _weights(specs: Any) -> dict[str, Any]:
    """`_flat` without the adapters, which are the run's own."""
    return _flat({name: group for name, group in specs.items() if name != GROUP})


def _flat(tree: Any) -> dict[str, Any]:
    """Path -> leaf."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)}

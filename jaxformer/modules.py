"""Flax linen shells that own the parameters of the functions. The only file that imports flax.

A shell declares each top-level group of its specs as one parameter tree and calls the function; it adds nothing
else. So ``module.apply({"params": p}, x)`` equals ``apply(p, x)`` bit for bit.

>>> import jax, jax.numpy as jnp
>>> from jaxformer.config import ModelConfig
>>> shell = GPT(ModelConfig(num_layers=1, width=32, num_heads=4, context_length=16, vocab_size=64))
>>> variables = shell.init(jax.random.key(0), jnp.zeros((1, 16), int))
>>> shell.apply(variables, jnp.zeros((2, 16), int)).shape
(2, 16, 64)
"""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer import masks
from jaxformer.config import ConfigError, LossConfig, ModelConfig
from jaxformer.functional import block as blocks
from jaxformer.functional.attention import ANY, KERNELS, missing
from jaxformer.models import bert, gpt
from jaxformer.specs import init_params, stack_specs
from jaxformer.types import Array, Batch, Model, Params, Sums


def _own(module: nn.Module, specs: dict[str, Any]) -> Params:
    """Declares every top-level entry of `specs` as a parameter (a tree) of `module`, and returns them all."""
    return {name: module.param(name, lambda rng, s=spec: init_params(s, rng)) for name, spec in specs.items()}


class GPT(nn.Module):
    """Owns the parameters of `models.gpt`."""

    config: ModelConfig
    loss_config: LossConfig = LossConfig()

    def setup(self):
        self.tree = _own(self, gpt.specs(self.config))

    def __call__(self, tokens: Array, positions: Array | None = None, segments: Array | None = None) -> Array:
        """Logits [B, T, V]; arguments as in `gpt.hidden`. Pass `rngs={"dropout": key}` to drop."""
        return gpt.apply(self.tree, tokens, self.config, positions=positions, segments=segments, rng=_dropout_rng(self))

    def loss(self, batch: Batch) -> tuple[Sums, Sums]:
        """(objective, metrics); see `types.Model`."""
        return gpt.loss(self.tree, batch, self.config, self.loss_config, _dropout_rng(self))


class BERT(nn.Module):
    """Owns the parameters of `models.bert`."""

    config: ModelConfig
    loss_config: LossConfig = LossConfig()

    def setup(self):
        self.tree = _own(self, bert.specs(self.config))

    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segments: Array | None = None,
        token_types: Array | None = None,
    ) -> Array:
        """Logits [B, T, V]; arguments as in `bert.hidden`. Pass `rngs={"dropout": key}` to drop."""
        return bert.apply(
            self.tree,
            tokens,
            self.config,
            positions=positions,
            segments=segments,
            token_types=token_types,
            rng=_dropout_rng(self),
        )

    def loss(self, batch: Batch) -> tuple[Sums, Sums]:
        """(objective, metrics); see `types.Model`."""
        return bert.loss(self.tree, batch, self.config, self.loss_config, _dropout_rng(self))


class Block(nn.Module):
    """Owns the parameters of one `functional.block.block`."""

    config: ModelConfig

    def setup(self):
        self.tree = _own(self, blocks.block_specs(self.config))

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `positions` ([T] or [B, T]; None: 0, 1, 2, ...) turn rotary configs only."""
        rotate = blocks.rotation(self.config, jnp.arange(x.shape[1]) if positions is None else positions)
        return blocks.block(self.tree, x, self.config, mask, rotate=rotate, rng=_dropout_rng(self))[0]


class Stack(nn.Module):
    """Owns the parameters of `functional.block.stack`: all blocks, stacked on a leading layer axis."""

    config: ModelConfig

    def setup(self):
        self.tree = _own(self, stack_specs(blocks.block_specs(self.config), self.config.num_layers))

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `positions` ([T] or [B, T]; None: 0, 1, 2, ...) turn rotary configs only."""
        rotate = blocks.rotation(self.config, jnp.arange(x.shape[1]) if positions is None else positions)
        return blocks.stack(self.tree, x, self.config, mask, rotate=rotate, rng=_dropout_rng(self))[0]


class Attention(nn.Module):
    """Owns the parameters of `functional.block.attention_layer`: projections around attention."""

    config: ModelConfig

    def setup(self):
        self.tree = _own(self, blocks.block_specs(self.config)["attention"])

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `positions` as in `Block`."""
        rotate = blocks.rotation(self.config, jnp.arange(x.shape[1]) if positions is None else positions)
        out, _ = blocks.attention_layer(self.tree, x, self.config, mask, rotate=rotate, rng=_dropout_rng(self))
        return out


class MLP(nn.Module):
    """Owns the parameters of `functional.layers.mlp`."""

    config: ModelConfig

    def setup(self):
        self.tree = _own(self, blocks.block_specs(self.config)["mlp"])

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        return blocks.mlp_layer(self.tree, x, self.config)


def _dropout_rng(module: nn.Module) -> Array | None:
    return module.make_rng("dropout") if module.has_rng("dropout") else None


def check_here(config: ModelConfig) -> None:
    """Refuses an attention kernel of a platform that this process does not run on.

    Raises:
      ConfigError: there is no such device.

    >>> check_here(ModelConfig(attention="cudnn"))
    Traceback (most recent call last):
    ...
    jaxformer.config.ConfigError: config.model.attention: cudnn needs an NVIDIA GPU of compute capability 8 or more, \
which is not here; accepted here: auto, xla, chunked
    """
    what = missing(config.attention)
    if what is not None:
        name = config.attention
        raise ConfigError(f"config.model.attention: {name} needs {what}, which is not here; accepted here: {ANY}")


def usable_here(config: ModelConfig) -> ModelConfig:
    """The same model, with "auto" for an attention kernel that is not here: what it computes is the same.

    >>> usable_here(ModelConfig(attention="cudnn")).attention
    'auto'
    """
    return config if missing(config.attention) is None else replace(config, attention="auto")


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuses a platform's attention kernel where rows are cut into parts, which none of them knows.

    Raises:
      ConfigError: that is asked for.
    """
    if config.attention in KERNELS and mesh.shape["context"] > 1:
        raise ConfigError(
            f"config.model.attention: {config.attention} cannot do rows cut by config.mesh.context "
            f"{mesh.shape['context']}; accepted there: {ANY}"
        )


def kernel_refusal(name: str, cfg: ModelConfig) -> str | None:
    """Why a platform's attention kernel, "splash" or "cudnn", cannot train this model exactly; None: it can."""
    bias, soft_cap = cfg.positions in ("alibi", "t5"), cfg.attention_soft_cap is not None
    options = {"bias": bias, "dropout": cfg.attention_dropout > 0, "soft_cap": soft_cap}
    length, mask = cfg.context_length, masks.Mask(causal=cfg.causal)
    return KERNELS[name].module.refusal(length, length, cfg.head_size, cfg.dtype, mask, **options)


def make_model(config: ModelConfig, loss_config: LossConfig) -> Model:
    """The `Model` that training receives, running through the shell's own `init` and `apply`.

    Raises:
      ConfigError: an attention implementation that cannot do what this model asks of it.
    """
    why = kernel_refusal(config.attention, config) if config.attention in KERNELS else None
    if why is not None:
        raise ConfigError(f"config.model.attention: {config.attention} cannot do {why}; accepted here: {ANY}")
    family = {"gpt": gpt, "bert": bert}[config.family]
    shell = {"gpt": GPT, "bert": BERT}[config.family](config, loss_config)

    def init(rng: Array) -> Params:
        return shell.init({"params": rng}, jnp.zeros((1, config.context_length), jnp.int32))["params"]

    def loss(params: Params, batch: Batch, rng: Array | None) -> tuple[Sums, Sums]:
        rngs = {} if rng is None else {"dropout": rng}
        out: Any = shell.apply({"params": params}, batch, rngs=rngs, method="loss")
        return out

    return Model(family.specs(config), init, loss, family.weights)

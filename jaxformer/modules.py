"""Flax linen shells that own the parameters of the functions. The only file that imports flax.

A shell declares each top-level group of its specs as one parameter tree and calls the function; it adds nothing
else. So ``module.apply({"params": p}, x)`` equals ``apply(p, x)`` bit for bit.

>>> import jax, jax.numpy as jnp
>>> from jaxformer.config import ModelConfig
>>> shell = GPT(ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64))
>>> variables = shell.init(jax.random.key(0), jnp.zeros((1, 16), int))
>>> shell.apply(variables, jnp.zeros((2, 16), int)).shape
(2, 16, 64)
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import block as blocks
from jaxformer.functional.attention import ANY, KERNELS
from jaxformer.models import bert, gpt
from jaxformer.models.attention_support import unsupported_by
from jaxformer.specs import init_params, stack_specs
from jaxformer.types import Array, Batch, Model, Params, Sums


def _own(module: nn.Module, specs: dict[str, Any]) -> Params:
    """Declares every top-level entry of `specs` as a parameter (a tree) of `module`, and returns them all."""
    return {name: module.param(name, lambda rng, s=spec: init_params(s, rng)) for name, spec in specs.items()}


class GPT(nn.Module):
    """Owns the parameters of `models.gpt`."""

    config: ModelConfig
    loss_config: LossConfig = LossConfig()
    execution: Execution = Execution()

    def setup(self):
        self.tree = _own(self, gpt.specs(self.config))

    def __call__(self, tokens: Array, positions: Array | None = None, segments: Array | None = None) -> Array:
        """Logits [B, T, V]; arguments as in `gpt.hidden`. Pass `rngs={"dropout": key}` to drop."""
        return gpt.apply(
            self.tree,
            tokens,
            self.config,
            positions=positions,
            segments=segments,
            rng=_dropout_rng(self),
            execution=self.execution,
        )

    def loss(self, batch: Batch) -> tuple[Sums, Sums]:
        """(objective, metrics); see `types.Model`."""
        return gpt.loss(self.tree, batch, self.config, self.loss_config, _dropout_rng(self), self.execution)


class BERT(nn.Module):
    """Owns the parameters of `models.bert`."""

    config: ModelConfig
    loss_config: LossConfig = LossConfig()
    execution: Execution = Execution()

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
            execution=self.execution,
        )

    def loss(self, batch: Batch) -> tuple[Sums, Sums]:
        """(objective, metrics); see `types.Model`."""
        return bert.loss(self.tree, batch, self.config, self.loss_config, _dropout_rng(self), self.execution)


class Block(nn.Module):
    """Owns the parameters of one `functional.block.block`."""

    config: ModelConfig
    execution: Execution = Execution()

    def setup(self):
        self.tree = _own(self, blocks.block_specs(self.config))

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `positions` ([T] or [B, T]; None: 0, 1, 2, ...) turn rotary configs only."""
        rotate = blocks.rotation(self.config, jnp.arange(x.shape[1]) if positions is None else positions)
        rng, execution = _dropout_rng(self), self.execution
        return blocks.block(self.tree, x, self.config, mask, rotate=rotate, rng=rng, execution=execution)[0]


class Stack(nn.Module):
    """Owns the parameters of `functional.block.stack`: all blocks, stacked on a leading layer axis."""

    config: ModelConfig
    execution: Execution = Execution()

    def setup(self):
        self.tree = _own(self, stack_specs(blocks.block_specs(self.config), self.config.num_layers))

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `positions` ([T] or [B, T]; None: 0, 1, 2, ...) turn rotary configs only."""
        rotate = blocks.rotation(self.config, jnp.arange(x.shape[1]) if positions is None else positions)
        rng, execution = _dropout_rng(self), self.execution
        return blocks.stack(self.tree, x, self.config, mask, rotate=rotate, rng=rng, execution=execution)[0]


class Attention(nn.Module):
    """Owns the parameters of `functional.block.attention_layer`: projections around attention."""

    config: ModelConfig
    execution: Execution = Execution()

    def setup(self):
        self.tree = _own(self, blocks.block_specs(self.config)["attention"])

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `positions` as in `Block`."""
        rotate = blocks.rotation(self.config, jnp.arange(x.shape[1]) if positions is None else positions)
        rng, execution = _dropout_rng(self), self.execution
        return blocks.attention_layer(self.tree, x, self.config, mask, rotate=rotate, rng=rng, execution=execution)[0]


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


def make_model(config: ModelConfig, loss_config: LossConfig, execution: Execution = blocks.AS_USUAL) -> Model:
    """The `Model` that training receives, running through the shell's own `init` and `apply`.

    Raises:
      ConfigError: an attention implementation that cannot do what this model asks of it.
    """
    implementation = execution.attention
    why = unsupported_by(implementation, config) if implementation in KERNELS else None
    if why is not None:
        raise ConfigError(f"config.execution.attention: {implementation} cannot do {why}; accepted here: {ANY}")
    family = {"gpt": gpt, "bert": bert}[config.family]
    shell = {"gpt": GPT, "bert": BERT}[config.family](config, loss_config, execution)

    def init(rng: Array) -> Params:
        return shell.init({"params": rng}, jnp.zeros((1, config.context_length), jnp.int32))["params"]

    def loss(params: Params, batch: Batch, rng: Array | None) -> tuple[Sums, Sums]:
        rngs = {} if rng is None else {"dropout": rng}
        out: Any = shell.apply({"params": params}, batch, rngs=rngs, method="loss")
        return out

    return Model(family.specs(config), init, loss, family.weights)

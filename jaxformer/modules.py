"""Flax linen shells that own the parameters of the functions. The only file that imports flax.

A shell declares each top-level group of its specs as one parameter tree and calls the function; it adds nothing
else. So ``module.apply({"params": p}, x)`` equals ``apply(p, x)`` bit for bit.

>>> import jax, jax.numpy as jnp
>>> from jaxformer.config import ModelConfig
>>> shell = GPT(ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64))
>>> variables = jax.eval_shape(shell.init, jax.random.key(0), jnp.zeros((1, 16), int))
>>> jax.eval_shape(shell.apply, variables, jnp.zeros((2, 16), int)).shape
(2, 16, 64)
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, ModelConfig, TuneConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import block as blocks
from jaxformer.functional.attention_choice import ANY, KERNELS
from jaxformer.functional.layer import NO_CONTEXT, Context
from jaxformer.functional.position_encodings import encoding_of, rotation, score_bias
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.models.attention_support import unsupported_by
from jaxformer.models.backbone import DEFAULT_EXECUTION
from jaxformer.models.families import family_of
from jaxformer.models.lora import GROUP, lora_specs, with_adapters
from jaxformer.models.tuning import tuned, without_gradients
from jaxformer.specs import freeze as frozen_specs
from jaxformer.specs import init_params, stack_specs
from jaxformer.types import Array, Batch, Model, Params, Sums


class Shell(nn.Module):
    """Owns the parameters that `specs` describes: every top-level entry one parameter, a tree."""

    config: ModelConfig
    execution: Execution = Execution()

    def setup(self):
        self.tree = {n: self.param(n, lambda rng, s=s: init_params(s, rng)) for n, s in self.specs().items()}

    def specs(self) -> dict[str, Any]:
        """The specs of the parameters."""
        raise NotImplementedError

    def dropout_rng(self) -> Array | None:
        """The key of `rngs={"dropout": key}`; None: nothing is dropped."""
        return self.make_rng("dropout") if self.has_rng("dropout") else None

    def context(self, x: Array, mask: masks.Mask | None, positions: Array | None) -> Context:
        """What sublayers look at.

        Args:
          x: [B, T, D].
          mask: None: causality and window of the config.
          positions: [T] or [B, T] int, for the angles of rotary positions; None: 0, 1, 2, ...

        Raises:
          ConfigError: the config's positions add a bias from a table of the whole model, which a part does not own.
        """
        cfg, encoding = self.config, encoding_of(self.config)
        if encoding.biases and encoding.specs is not None:
            raise ConfigError(
                f"config.model.positions.kind: {cfg.positions.kind} has a table of the whole model, which "
                f"{type(self).__name__} does not own; accepted: other positions, or functional.block with a Context"
            )
        mask = masks.Mask(causal=cfg.causal, window=cfg.attention.window) if mask is None else mask
        turned = rotation(cfg, jnp.arange(x.shape[1]) if positions is None else positions)
        bias = None if encoding.layer_specs else score_bias({}, cfg, mask)
        return Context(mask, turned, bias, rng=self.dropout_rng(), execution=self.execution)


class Transformer(Shell):
    """Owns the parameters of a model of any family."""

    loss_config: LossConfig = LossConfig()
    only = ""  # the one family that a subclass is for; an annotation would make it a field

    def specs(self) -> dict[str, Any]:
        """Those of the family. Raises ConfigError: the module is for another one."""
        if self.only not in ("", self.config.family):
            raise ConfigError(f"config.model.family: {self.config.family}; {type(self).__name__} needs {self.only}")
        return family_of(self.config).specs(self.config)

    def __call__(
        self, tokens: Array, positions: Array | None = None, segments: Array | None = None, **inputs: Array | None
    ) -> Array:
        """Logits [B, T, V]; arguments as in the family's `apply`. Pass `rngs={"dropout": key}` to drop.

        Token ids outside [0, V) are not refused; `models.gpt.apply` says what becomes of them.
        """
        fields = {"positions": positions, "segments": segments, "execution": self.execution, **inputs}
        return family_of(self.config).apply(self.tree, tokens, self.config, rng=self.dropout_rng(), **fields)

    def loss(self, batch: Batch, frozen: Any = None) -> tuple[Sums, Sums]:
        """(objective, metrics); see `types.Model`."""
        loss, rng = family_of(self.config).loss, self.dropout_rng()
        return loss(self.tree, batch, self.config, self.loss_config, rng, self.execution, frozen)

    def predict(self, batch: Batch, frozen: Any = None) -> tuple[Sums, dict[str, Array]]:
        """(metrics, predictions); see `types.Model`. For models with a `predict`."""
        predict: Any = family_of(self.config).predict
        return predict(self.tree, batch, self.config, self.loss_config, None, self.execution, frozen)


class GPT(Transformer):
    """Owns the parameters of `models.gpt`."""

    only = "gpt"


class BERT(Transformer):
    """Owns the parameters of `models.bert`."""

    only = "bert"


class EncoderDecoder(Transformer):
    """Owns the parameters of `models.encoder_decoder`."""

    only = "encoder_decoder"

    def __call__(  # type: ignore[override]
        self,
        tokens: Array,
        source_tokens: Array,
        positions: Array | None = None,
        segments: Array | None = None,
        **inputs: Array | None,
    ) -> Array:
        """Logits [B, T, V] of the target `tokens` [B, T]; the source is [B, S]; other arguments as of `Transformer`."""
        return super().__call__(tokens, positions, segments, source_tokens=source_tokens, **inputs)


class Block(Shell):
    """Owns the parameters of one `functional.block.block`."""

    def specs(self) -> dict[str, Any]:
        """Those of one block."""
        return blocks.block_specs(self.config)

    def __call__(
        self,
        x: Array,
        mask: masks.Mask | None = None,
        positions: Array | None = None,
        source: Array | None = None,
        source_mask: masks.Mask | None = None,
    ) -> Array:
        """[B, T, D] -> [B, T, D]; arguments as in `context`, and as of `Context` where layers attend to a source."""
        context = self.context(x, mask, positions)._replace(source=source, source_mask=source_mask)
        return blocks.block(self.tree, x, self.config, context)[0]


class Stack(Shell):
    """Owns the parameters of `functional.block.stack`: all blocks, stacked on a leading layer axis."""

    def specs(self) -> dict[str, Any]:
        """Those of all blocks."""
        return stack_specs(blocks.block_specs(self.config), self.config.num_blocks)

    def __call__(
        self,
        x: Array,
        mask: masks.Mask | None = None,
        positions: Array | None = None,
        source: Array | None = None,
        source_mask: masks.Mask | None = None,
    ) -> Array:
        """[B, T, D] -> [B, T, D]; arguments as in `context`, and as of `Context` where layers attend to a source."""
        context = self.context(x, mask, positions)._replace(source=source, source_mask=source_mask)
        return blocks.stack(self.tree, x, self.config, context)[0]


class Attention(Shell):
    """Owns the parameters of the sublayer that mixes tokens: softmax attention or what else the config names."""

    def specs(self) -> dict[str, Any]:
        """Those of the sublayer."""
        return sublayers_of(self.config)["attention"].specs(self.config)

    def __call__(self, x: Array, mask: masks.Mask | None = None, positions: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; arguments as in `context`."""
        context = self.context(x, mask, positions)
        return sublayers_of(self.config)["attention"].apply(self.tree, x, self.config, context)[0]


class MLP(Shell):
    """Owns the parameters of the feed-forward sublayer."""

    def specs(self) -> dict[str, Any]:
        """Those of the sublayer."""
        return sublayers_of(self.config)["mlp"].specs(self.config)

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        return sublayers_of(self.config)["mlp"].apply(self.tree, x, self.config, NO_CONTEXT)[0]


def make_model(
    config: ModelConfig,
    loss_config: LossConfig,
    execution: Execution = DEFAULT_EXECUTION,
    freeze: Sequence[str] = (),
    tune: TuneConfig | None = None,
) -> Model:
    """The `Model` that training receives, running through the shell's own `init` and `apply`.

    Args:
      config: of the model.
      loss_config: of the loss.
      execution: how it is computed.
      freeze: parameters that are not trained, as `optimizer.freeze`.
      tune: which layers learn, and how fast, or what is adapted (`models.lora`); None: all alike.

    Raises:
      ConfigError: an attention implementation that cannot do what this model asks of it; a name in `freeze` that no
        parameter has; adapters that it cannot have.
    """
    implementation = execution.attention
    why = unsupported_by(implementation, config) if implementation in KERNELS else None
    if why is not None:
        raise ConfigError(f"config.execution.attention: {implementation} cannot do {why}; accepted here: {ANY}")
    family, shell = family_of(config), Transformer(config, execution, loss_config)
    tune = TuneConfig() if tune is None else tune
    specs, frozen = lora_specs(family.specs(config), config, tune), family.frozen(config)
    try:
        specs = frozen_specs(specs, freeze)
    except KeyError as error:
        raise ConfigError(
            f"config.optimizer.freeze: {error.args[0]!r} names no parameters; accepted: {', '.join(specs)}, or a path "
            "inside one"
        ) from None

    specs = tuned(specs, tune, config.num_blocks)
    adapters = {name: specs[name] for name in specs if name == GROUP}

    def init(rng: Array) -> Params:
        of_family = shell.init({"params": rng}, method=lambda module: module.tree)["params"]
        return {**of_family, **init_params(adapters, jax.random.fold_in(rng, 2))} if adapters else of_family

    def loss(params: Params, batch: Batch, rng: Array | None, frozen: Any = None) -> tuple[Sums, Sums]:
        if tune.trained_layers is not None or adapters:
            params = without_gradients(with_adapters(params, tune), tune, config.num_blocks)
            return family.loss(params, batch, config, loss_config, rng, execution, frozen)
        if rng is not None and rng.ndim:  # a key for each micro-batch of a pipeline
            own = jax.vmap(lambda key: shell.bind({"params": params}, rngs={"dropout": key}).dropout_rng())(rng)
            return family.loss(params, batch, config, loss_config, own, execution, frozen)
        rngs = {} if rng is None else {"dropout": rng}
        out: Any = shell.apply({"params": params}, batch, frozen, rngs=rngs, method="loss")
        return out

    def predict(params: Params, batch: Batch, frozen: Any = None) -> tuple[Sums, dict[str, Array]]:
        if adapters:
            of_family: Any = family.predict
            return of_family(with_adapters(params, tune), batch, config, loss_config, None, execution, frozen)
        found: Any = shell.apply({"params": params}, batch, frozen, method="predict")
        return found

    more = {} if family.predict is None else {"predict": predict}
    measured = blocks.measured_terms(config)
    return Model(specs, init, loss, lambda batch: family.weights(batch, config), frozen, measured=measured, **more)

"""The one place that counts parameters and floating-point operations.

Parameters are counted by each published convention. Operations are counted exactly: two per multiply-add of every
matrix product, attention included, over the whole [T, T] square as in Chowdhery et al. (an implementation that skips
the masked half is faster, but the model is not smaller). A head that is needed at only a share of the positions, like
BERT's at the masked ones, counts by that share. With an encoder, a token is one of the target, among which
the operations on a row's source are shared out.

>>> from jaxformer.config import ModelConfig, Softmax
>>> gpt2 = ModelConfig(num_layers=12, width=768, attention=Softmax(12), context_length=1024, vocab_size=50257)
>>> count = count_parameters(gpt2)
>>> count.total, count.non_embedding
(124439808, 85056000)
>>> round(flops_per_token(gpt2).training / 1e6), round(six_n(gpt2) / 1e6)
(854, 747)
"""

from typing import NamedTuple

from jaxformer.config import DataConfig, ModelConfig, TuneConfig
from jaxformer.config.registry import OBJECTIVES
from jaxformer.models.families import family_of
from jaxformer.models.lora import adapter_flops, lora_specs
from jaxformer.specs import count_active, count_by_group, count_non_embedding, count_params


class ParameterCount(NamedTuple):
    """Parameters of a model, under each convention.

    Attributes:
      by_group: top-level group -> number.
      total: all of them (Hoffmann et al. 2022).
      non_embedding: see `specs.count_non_embedding` (Kaplan et al. 2020, 1.3).
      without_positions: all but the position table.
      active: those that one token uses: of experts, those that it goes through.
    """

    by_group: dict[str, int]
    total: int
    non_embedding: int
    without_positions: int
    active: int


class Flops(NamedTuple):
    """Floating-point operations per token, a multiply-add being two.

    Attributes:
      projections: products with weights in the layers that mix tokens (query, key, value, output), forward; those of
        cross attention among them.
      attention: products of activations there (scores, weighted values), forward.
      mlp: feed-forward layers, forward.
      head: the family's head (vocabulary projection, and BERT's transform) at the positions that need it, forward.
      remat: what the backward pass recomputes under the config's policy.
      frozen: what no gradient goes through, as the memory of a Transformer-XL, forward; not among the others.
    """

    projections: float
    attention: float
    mlp: float
    head: float
    remat: float
    frozen: float = 0.0

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.projections + self.attention + self.mlp + self.head + self.frozen

    @property
    def training(self) -> float:
        """Forward and backward, without `remat`; the backward pass has two products for each of the forward's."""
        return 3 * self.forward - 2 * self.frozen


def count_parameters(cfg: ModelConfig) -> ParameterCount:
    """Counts from the specs themselves, so that they cannot drift from the model."""
    specs = family_of(cfg).specs(cfg)
    total = count_params(specs)
    positions = count_params(specs.get("embedding", {}).get("positions", {}))
    non_embedding = count_non_embedding(specs)
    return ParameterCount(count_by_group(specs), total, non_embedding, total - positions, count_active(specs))


def flops_per_token(
    cfg: ModelConfig, context_length: int | None = None, head_fraction: float = 1.0, remat_policy: str = "none"
) -> Flops:
    """Operations per token of a row, from each sublayer's `cost`.

    Args:
      cfg: the model, its vocabulary size filled in.
      context_length: tokens of a row; None: the model's. A window limits the keys that count. The source keeps its
        length.
      head_fraction: share of the positions whose logits are needed: 1 for next tokens, `mask_rate` for masked ones
        (the expected share; the computation is rounded up to whole blocks, see `functional.masked_loss`).
      remat_policy: what the backward pass recomputes, as in `execution.remat`.

    Returns:
      Flops per token.

    Source: Chowdhery et al. 2022, appendix B; Kaplan et al. 2020, table 1, plus what it leaves out.
    """
    length = cfg.context_length if context_length is None else context_length
    family = family_of(cfg)
    layers = family.layer_flops(cfg, length, head_fraction, remat_policy)
    head = head_fraction * family.head_flops(cfg)
    return Flops(layers.projections, layers.attention, layers.mlp, head, float(layers.remat), layers.frozen)


def training_flops(cfg: ModelConfig, data: DataConfig, tune: TuneConfig | None = None) -> float:
    """Operations per token of a row, forward and backward; the head counts where the objective needs its logits.

    With adapters (`tune.lora_rank`) the weights that stay have one product in the backward pass, not two.
    """
    found = flops_per_token(cfg, head_fraction=OBJECTIVES[data.objective].share(data))
    if tune is None or not tune.lora_rank:
        return found.training
    still = found.projections + found.mlp + (found.head if cfg.head is None else 0)
    return found.training - still + 3 * adapter_flops(lora_specs(family_of(cfg).specs(cfg), cfg, tune))


def six_n(cfg: ModelConfig) -> float:
    """The rule of thumb of 6 operations per token and parameter (all that a token uses), to show beside the exact
    count."""
    return 6.0 * count_parameters(cfg).active

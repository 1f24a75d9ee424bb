"""A config file that brings a family: a GPT whose head also reads a fixed random vector of the current token."""

from jaxformer.config.registry import FamilyTraits
from jaxformer.functional.layer import weight_init
from jaxformer.functional.layers import embed
from jaxformer.functional.losses import token_loss
from jaxformer.models import backbone, gpt
from jaxformer.models.families import FAMILIES, Family
from jaxformer.specs import ParamSpec


def frozen(cfg):
    shape = (cfg.vocab_size, cfg.width)
    return {"reservoir": ParamSpec(shape, ("vocab", "embed"), weight_init(cfg, *shape), "input")}


def loss(params, batch, cfg, loss_cfg, rng=None, execution=None, frozen=None):
    x, sharding, _ = backbone.hidden_sharded(
        params, batch.tokens, cfg, positions=batch.positions, segments=batch.segments, rng=rng, execution=execution
    )
    x = x + embed(sharding.shard(batch.tokens), frozen["reservoir"]).astype(x.dtype)
    targets, weights = sharding.shard(batch.targets), sharding.shard(batch.weights)
    out = token_loss(x, gpt.output_table(params), targets, weights, **vars(loss_cfg))
    return {"loss": (out.total, out.weight)}, backbone.token_metrics(out, sharding)


FAMILIES["reservoir"] = Family(
    FamilyTraits(causal=True, objectives=("next_token",)), gpt.specs, gpt.apply, loss, gpt.weights, frozen=frozen
)


def get_config():
    return {"model": {"family": "reservoir"}, "optimizer": {"freeze": ("embedding.positions",)}}

"""Small models whose logits are far from uniform, for the tests in this folder."""

import dataclasses
from typing import Literal

import jax
import numpy as np
from flat_config import model_config

from jaxformer.config import ModelConfig
from jaxformer.models import bert, gpt
from jaxformer.models.families import family_of
from jaxformer.specs import is_spec

SMALL = {"num_layers": 2, "width": 16, "num_heads": 4, "context_length": 16, "vocab_size": 24, "tie_embeddings": False}

gpt_apply = jax.jit(gpt.apply, static_argnums=2)
bert_apply = jax.jit(bert.apply, static_argnums=2)


@dataclasses.dataclass(frozen=True)
class Exact(ModelConfig):
    """A model computed in float64, which no program offers."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float64"  # type: ignore[assignment]


def config(**changes) -> ModelConfig:
    made = Exact if changes.get("dtype") == "float64" else ModelConfig
    return model_config(made, **{**SMALL, **changes})


def params_of(cfg: ModelConfig, seed: int = 1, dtype=np.float32):
    """Random parameters; matrices keep their input's size, norm scales and biases are away from 1 and 0."""
    rng = np.random.default_rng(seed)

    def draw(path, spec):
        values = rng.normal(0, 0.3, spec.shape)
        if "scale" in jax.tree_util.keystr(path):
            values += 1
        return values.astype(dtype)

    specs = family_of(cfg).specs(cfg)
    return jax.device_put(jax.tree_util.tree_map_with_path(draw, specs, is_leaf=is_spec))

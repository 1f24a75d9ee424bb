"""Configs of models for tests, by names without sections, as earlier versions had: `num_heads=4`."""

import dataclasses

from jaxformer.config import Execution, ModelConfig, aliases


def model_config(cls=ModelConfig, **fields):
    """A ModelConfig, or a class that derives from it."""
    made, execution = both(cls, **fields)
    assert execution == Execution(), "of the execution, not the model: take `both`"
    return made


def both(cls=ModelConfig, **fields):
    """(ModelConfig, Execution)."""
    tree = {"model": fields}
    aliases.modernize(tree)
    return cls.accept(tree["model"], "config.model"), Execution.accept(tree.get("execution", {}), "config.execution")


def changed(cfg, **fields):
    """`cfg` with some fields changed."""
    for name, value in fields.items():
        new = aliases.ALIASES.get(f"model.{name}", f"model.{name}").split(".")[1:]
        if len(new) == 2:
            name, value = new[0], dataclasses.replace(getattr(cfg, new[0]), **{new[1]: value})
        cfg = dataclasses.replace(cfg, **{name: value})
    return cfg

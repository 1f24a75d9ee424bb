"""Where the chunks of updates end that are dispatched at once: it depends on the configuration and the step alone."""

from jaxformer.config import Config


def next_boundary(step: int, config: Config) -> int:
    """Where the chunk that begins after `step` updates ends.

    >>> from jaxformer.config import from_mapping
    >>> config = from_mapping({"train": {"steps": 25, "eval_every_steps": 12}, "execution": {"steps_per_dispatch": 10},
    ...                        "optimizer": {"warmup_steps": 0}})
    >>> [next_boundary(step, config) for step in (0, 10, 11, 12, 20, 24)]
    [10, 12, 12, 20, 24, 25]
    """
    periods = [config.execution.steps_per_dispatch, config.train.eval_every_steps, config.checkpoint.save_every_steps]
    return min(config.train.steps, *(step - step % period + period for period in periods if period is not None))


def longest_chunk(config: Config) -> int:
    """Most updates in one dispatch: no chunk is longer than the first, which begins where all periods do."""
    return next_boundary(0, config)

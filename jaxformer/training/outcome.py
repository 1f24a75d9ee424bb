"""How a run ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxformer.specs import count_active, count_non_embedding, count_params
from jaxformer.training.evaluate import SPLIT
from jaxformer.training.state import TrainState


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      status: "finished", "stopped_early" (no better evaluation for long enough) or "interrupted" (a signal).
      step: updates made in all.
      state: the last one, on the devices.
      evaluation: of the whole held-out split, see `metrics.evaluation`; None if interrupted.
      seconds: that this process trained and evaluated.
      used: time and memory of all starts, as in the final record: the fields of `goodput.Goodput` and `peak_memory`.
      sources: name -> the evaluation of one source of a mixture; empty if there is only one.
    """

    status: Literal["finished", "stopped_early", "interrupted"]
    step: int
    state: TrainState
    evaluation: dict[str, float] | None
    seconds: float
    used: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, dict[str, float]] = field(default_factory=dict)


def final_record(
    status: str, step: int, values: Mapping[str, float], *, tokens: int, specs: Any, flops_per_token: float | None
) -> dict[str, Any]:
    """The final record of a run of `step` updates on `tokens`, whose final evaluation is `values`."""
    total, active = count_params(specs), count_active(specs)
    return {
        "kind": "final",
        "step": step,
        "tokens": tokens,
        **values,
        "params": total,
        "params_non_embedding": count_non_embedding(specs),
        **({} if active == total else {"params_active": active}),
        "flops": None if flops_per_token is None else flops_per_token * tokens,
        "status": status,
        "split": SPLIT,
    }

"""`mesh`: how the devices are arranged."""

from dataclasses import dataclass

from jaxformer.config.checks import at_least
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "context", "stage", "expert")


@dataclass(frozen=True)
class MeshConfig(Section, name="mesh", accepts=dict.fromkeys(AXES, at_least(1)), most=dict.fromkeys(AXES, 2**20)):
    """How many devices along each axis; None fills with what is left (one axis at most).

    Attributes:
      data: groups of devices that hold all parameters and share out the rows.
      fsdp: devices over which parameters are split; they share out the rows too.
      tensor: devices over which heads and hidden widths are split.
      context: parts of each row.
      stage: groups of layers, through which micro-batches pass one after another (a pipeline); as many as
        execution.gradient_accumulation_steps says, a multiple of the stages.
      expert: devices over which the experts of every layer are split; they share out rows and other parameters too.
      sequence_parallel: split the activations between sublayers over the tensor axis, by tokens.
    """

    data: int | None = None
    fsdp: int | None = 1
    tensor: int | None = 1
    context: int | None = 1
    stage: int | None = 1
    expert: int | None = 1
    sequence_parallel: bool = False

    def _check(self):
        rest = [name for name in AXES if getattr(self, name) is None]
        if len(rest) > 1:
            raise ConfigError(
                f"config.mesh: {' and '.join(rest)} are none (what is left); accepted: one of them at most"
            )

"""The whole configuration of a run."""

from dataclasses import dataclass, field

from jaxformer.config.checkpoint import CheckpointConfig
from jaxformer.config.checks import between
from jaxformer.config.data import DataConfig
from jaxformer.config.distributed import DistributedConfig
from jaxformer.config.execution import Execution
from jaxformer.config.fields import Section
from jaxformer.config.loss import LossConfig
from jaxformer.config.mesh import MeshConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.config.registry import objectives_of
from jaxformer.config.train import TrainConfig
from jaxformer.errors import ConfigError

MOST_UNROLLED = 512


@dataclass(frozen=True)
class Config(Section, name="", accepts={"seed": between(0, 2**31 - 1)}, paths=("workdir", "init_from")):
    """Everything a run is made of. Its JSON form is written into the run's manifest.

    Attributes:
      workdir: where the run writes.
      seed: of initial values, batches and dropout.
      init_from: a run's directory, whose weights (their moving average where there is one) this run starts from.
      init_optimizer: start from that run's optimizer state as well.
      model: what is computed.
      execution: how it is computed.
      loss: what is minimised.
      data: text, tokens, objective.
      optimizer: update rule and schedule.
      mesh: how devices are arranged.
      distributed: how processes find each other.
      train: how long, how often.
      checkpoint: what is saved, and when.
      tensorboard: needs the `tensorboard` extra.
      compilation_cache: keep compiled programs on disk between runs.
    """

    workdir: str = "runs/default"
    seed: int = 0
    init_from: str | None = None
    init_optimizer: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    execution: Execution = field(default_factory=Execution)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tensorboard: bool = False
    compilation_cache: bool = True

    def _check(self):
        if self.execution.layers == "unroll" and self.model.num_layers > MOST_UNROLLED:
            raise ConfigError(
                f"config.model.num_layers: {self.model.num_layers}; accepted with execution.layers=unroll: at most "
                f"{MOST_UNROLLED}, which take minutes to compile; layers=scan compiles one"
            )
        if self.init_optimizer and self.init_from is None:
            raise ConfigError("config.init_optimizer: True; it needs config.init_from, a run's directory")
        rows, parts = self.train.global_batch_size, self.execution.gradient_accumulation_steps
        if rows % parts:
            raise ConfigError(
                f"config.execution.gradient_accumulation_steps: {parts} does not divide train.global_batch_size {rows}"
            )
        accepted = objectives_of(self.model.family)
        if self.data.objective not in accepted:
            raise ConfigError(
                f"config.data.objective: {self.data.objective}; model.family={self.model.family} needs "
                f"{' or '.join(accepted) or 'an objective that names it'}"
            )
        if self.model.next_sentence != self.data.pairs:
            raise ConfigError(
                f"config.data.pairs: {self.data.pairs}; model.bert.next_sentence is {self.model.next_sentence}, "
                "and the two must agree"
            )
        if self.optimizer.warmup_steps > self.train.steps:
            raise ConfigError(
                f"config.optimizer.warmup_steps: {self.optimizer.warmup_steps} is more than "
                f"train.steps {self.train.steps}; accepted: at most {self.train.steps}"
            )

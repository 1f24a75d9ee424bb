"""The whole configuration of a run."""

from dataclasses import dataclass, field, replace

from jaxformer.config.checkpoint import CheckpointConfig
from jaxformer.config.checks import between
from jaxformer.config.data import DataConfig
from jaxformer.config.distill import DistillConfig
from jaxformer.config.distributed import DistributedConfig
from jaxformer.config.execution import Execution
from jaxformer.config.fields import Section
from jaxformer.config.head import HeadConfig
from jaxformer.config.loss import LossConfig
from jaxformer.config.mesh import MeshConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.config.registry import OBJECTIVES, objectives_of
from jaxformer.config.tracking import TrackingConfig
from jaxformer.config.train import TrainConfig
from jaxformer.config.tune import TuneConfig
from jaxformer.errors import ConfigError

MOST_UNROLLED = 512
PATHS = ("workdir", "init_from")


@dataclass(frozen=True)
class Config(Section, name="", accepts={"seed": between(0, 2**31 - 1)}, paths=PATHS, addresses=PATHS):
    """Everything a run is made of. Its JSON form is written into the run's manifest.

    Attributes:
      workdir: where the run writes: a folder, or an address of an object store, as gs://bucket/run.
      seed: of initial values, batches and dropout.
      init_from: a run's directory, whose weights (their moving average where there is one) this run starts from.
      init_optimizer: start from that run's optimizer state as well.
      model: what is computed.
      execution: how it is computed.
      loss: what is minimised.
      data: text, tokens, objective.
      optimizer: update rule and schedule.
      tune: which layers learn, and how fast, of weights that were trained before.
      distill: the teacher that the model learns from, if there is one.
      mesh: how devices are arranged.
      distributed: how processes find each other.
      train: how long, how often.
      checkpoint: what is saved, and when.
      tracking: who else is told what is recorded.
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
    tune: TuneConfig = field(default_factory=TuneConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    compilation_cache: bool = True

    @property
    def source_length(self) -> int | None:
        """Tokens that a row brings beside those that the model predicts, of a source or for its memory; None: none."""
        return self.model.memory if self.model.encoder is None else self.model.encoder.source_length

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
                f"config.execution.gradient_accumulation_steps: {parts} does not divide train.global_batch_size "
                f"{rows}; accepted: a divisor of {rows}"
            )
        if self.train.noise_scale and parts == 1:
            raise ConfigError(
                "config.train.noise_scale: True; it is measured between micro-batches; accepted with "
                "execution.gradient_accumulation_steps of at least 2"
            )
        chunks, lengths = self.execution.feed_forward_chunks, {"model.context_length": self.model.context_length}
        if self.source_length is not None:
            lengths["model.memory" if self.model.encoder is None else "model.encoder.source_length"] = (
                self.source_length
            )
        for name, length in lengths.items():
            if length % chunks:
                raise ConfigError(
                    f"config.execution.feed_forward_chunks: {chunks}; accepted: a divisor of {name} {length}"
                )
        accepted = objectives_of(self.model.family)
        if self.data.objective not in accepted:
            raise ConfigError(
                f"config.data.objective: {self.data.objective}; model.family={self.model.family}; accepted: "
                f"{' or '.join(accepted) or 'an objective that names it'}"
            )
        self._settle_task()
        if self.distill.teacher is not None:
            self._check_teacher()
        layers = self.tune.trained_layers
        if layers is not None and layers > self.model.num_layers:
            raise ConfigError(
                f"config.tune.trained_layers: {layers}; accepted: at most model.num_layers {self.model.num_layers}"
            )
        self._check_lora()
        known = OBJECTIVES[self.data.objective].metrics
        if self.tune.metric not in (None, *known):
            raise ConfigError(
                f"config.tune.metric: {self.tune.metric!r}; accepted with data.objective={self.data.objective}: none "
                f"or {' or '.join(known)}"
            )
        self.model.attention.check_data(self.data)
        self.model.feed_forward.check_execution(self.execution)
        self.model.parametrization.check_optimizer(self.optimizer)
        funnel = self.model.funnel
        if funnel is not None and funnel.separate_cls and not self.data.pairs:
            raise ConfigError(
                "config.model.funnel.separate_cls: True; rows of packed documents begin with no [CLS]; accepted: "
                "false, or data.pairs=true"
            )
        if funnel is None and self.model.head is None and self.model.next_sentence != self.data.pairs:
            raise ConfigError(
                f"config.data.pairs: {self.data.pairs}; model.bert.next_sentence is {self.model.next_sentence}, "
                "and the two must agree"
            )
        if self.optimizer.warmup_steps > self.train.steps:
            raise ConfigError(
                f"config.optimizer.warmup_steps: {self.optimizer.warmup_steps} is more than "
                f"train.steps {self.train.steps}; accepted: at most {self.train.steps}"
            )

    def _check_lora(self):
        """What stays has to be worth staying, and the update has to suit two factors of a product."""
        rank = self.tune.lora_rank
        if rank and self.init_from is None:
            raise ConfigError(
                f"config.tune.lora_rank: {rank}; without init_from the weights that stay are random; accepted: 0, or "
                "with config.init_from, a run's directory"
            )
        if rank and self.init_optimizer:
            raise ConfigError(
                f"config.init_optimizer: True; with tune.lora_rank={rank} other parameters learn than did there; "
                "accepted: false"
            )
        if rank and self.optimizer.name == "muon":
            raise ConfigError(
                f"config.optimizer.name: muon makes the update of a matrix orthogonal, and with tune.lora_rank={rank} "
                "that is a product of two; accepted there: adamw, lion, adafactor"
            )

    def _check_teacher(self):
        wrong = {
            "model.head": (self.model.head is not None, "none"),
            "data.pairs": (self.data.pairs, "false"),
            "init_from": (self.init_from is not None, "none; distill.initial_layers takes weights of the teacher"),
        }
        for name, (there, accepted) in wrong.items():
            if there:
                raise ConfigError(f"config.{name}: is set; accepted with distill.teacher: {accepted}")

    def _settle_task(self):
        """The head of the objective is there, and no other; its examples begin as the model's rows did before."""
        head, task = self.model.head, self.data.objective
        wanted = OBJECTIVES[task].head
        if wanted and (head is None or head.task is None):
            head = replace(head or HeadConfig(), task=task)
            object.__setattr__(self, "model", replace(self.model, head=head))
        elif head is not None and (not wanted or head.task != task):
            raise ConfigError(
                f"config.model.head: a head for {head.task or 'a task'}; data.objective is {task}; accepted: none "
                "given, which is filled in"
            )
        if head is not None and head.activation != "tanh" and (self.model.causal or task not in head.POOLED):
            raise ConfigError(
                f"config.model.head.activation: {head.activation}; {self.model.family} has no pooler for {task}, and "
                "nothing reads it; accepted: tanh"
            )
        labelled = self.data.labelled
        if labelled is not None and labelled.opening is None:
            labelled = replace(labelled, opening="cls" if self.model.token_types else "separator")
            object.__setattr__(self, "data", replace(self.data, labelled=labelled))

"""`distributed`: how the processes of a run find each other."""

import re
from dataclasses import dataclass
from typing import Literal

from jaxformer.config.checks import at_least, between
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class DistributedConfig(
    Section,
    name="distributed",
    accepts=dict.fromkeys(
        ("num_processes", "start_timeout_seconds", "heartbeat_timeout_seconds", "stall_timeout_seconds"), at_least(1)
    ),
):
    """How the processes of one run find each other, and how long they wait for one another.

    The environment usually says who the processes are. Where it does not, give coordinator_address, num_processes and
    process_id, all three.

    Attributes:
      mode: auto: as the environment says; on: being alone is an error; off: alone, whatever the environment.
      coordinator_address: host:port of process 0.
      num_processes: of the run, on all machines.
      process_id: 0 to num_processes - 1.
      start_timeout_seconds: how long a process waits at the start for all others.
      heartbeat_timeout_seconds: how long after one process died or froze the others end.
      stall_timeout_seconds: a process that makes no progress for so long ends itself.
    """

    mode: Literal["auto", "off", "on"] = "auto"
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_timeout_seconds: int = 300
    heartbeat_timeout_seconds: int = 60
    stall_timeout_seconds: int = 1800

    def _check(self):
        given = {name: getattr(self, name) for name in ("coordinator_address", "num_processes", "process_id")}
        missing = [name for name, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            names = [name for name in given if name not in missing]
            raise ConfigError(f"config.distributed.{missing[0]}: None; {' and '.join(names)} cannot do without it")
        if self.mode == "off" and not missing:
            raise ConfigError("config.distributed.mode: off; a coordinator_address is given; accepted: auto or on")
        if self.coordinator_address is not None and not re.fullmatch(r".+:\d+", self.coordinator_address):
            raise ConfigError(
                f"config.distributed.coordinator_address: {self.coordinator_address!r}; accepted: host:port"
            )
        if self.num_processes is not None:
            between(0, self.num_processes - 1)("config.distributed.process_id", self.process_id)

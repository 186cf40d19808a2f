"""The part of a machine that one of several engines takes: its own device or some of the cores, and some of the memory.

Knows nothing of models. Invariant: the parts of all ranks together do not exceed the machine, provided that it has a
core for each.
"""

import logging
import os
from dataclasses import dataclass, replace

import torch

from keepsight.count_cores import count_cores, share_of
from keepsight.engine.resolve_config import Machine
from keepsight.errors import InvalidArgumentError
from keepsight.runner.openmp_team import set_team_size

logger = logging.getLogger(__name__)
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class MachinePart:
    rank: int
    num_engines: int

    def take_cores_and_device(self, device: str) -> None:
        """Restrict this process to its part, before it computes or queries a device. `device` is the one requested."""
        num_threads = share_of(count_cores(), self.rank, self.num_engines)
        # torch ignores a container's limit.
        if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_threads:
            set_team_size(num_threads)
        if self.num_engines == 1:
            return
        if device != "cpu" and (num_devices := torch.cuda.device_count()):
            os.environ[DEVICES_VARIABLE] = self._choose_device(num_devices)
        logger.info("engine %d of %d: %d threads", self.rank + 1, self.num_engines, torch.get_num_threads())

    def of_memory(self, machine: Machine) -> Machine:
        """Return this engine's part of the memory: all of its own device's, an equal share of the host's."""
        host_bytes = machine.available_host_bytes // self.num_engines
        is_own = machine.device != "cpu"
        available_bytes = machine.available_bytes if is_own else machine.available_bytes // self.num_engines
        return replace(machine, available_bytes=available_bytes, available_host_bytes=host_bytes)

    def _choose_device(self, num_devices: int) -> str:
        if num_devices < self.num_engines:
            raise InvalidArgumentError(
                "--data-parallel-size", f"{self.num_engines} engines need a device each, but there are {num_devices}"
            )
        visible = os.environ.get(DEVICES_VARIABLE)
        return visible.split(",")[self.rank].strip() if visible else str(self.rank)


WHOLE_MACHINE = MachinePart(0, 1)

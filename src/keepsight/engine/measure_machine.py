"""Measures how much memory the device and the host have; decides nothing."""

import torch

from keepsight.engine.resolve_config import Machine
from keepsight.host_memory import measure_host_memory


def measure_machine(device: torch.device) -> Machine:
    total, host_available = measure_host_memory()
    available = host_available
    if device.type != "cpu":
        available, total = torch.cuda.mem_get_info(device)
    return Machine(
        device=device.type, total_bytes=total, available_bytes=available, available_host_bytes=host_available
    )

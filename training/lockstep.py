"""Two processes that train one model in step: each has one thread and its own batch, gradients are summed.

On a busy machine that beats two threads in one process, whose barriers stall in every operator when another process
takes a core. Decisions are process 0's alone and travel with the gradients, so the processes cannot disagree.
"""

import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# A stopped process (SIGSTOP) makes the other wait this long before it gives up.
PATIENCE = timedelta(hours=2)


class Lockstep:
    def __init__(self, rank: int, num_processes: int, meeting_file: Path) -> None:
        self.rank = rank
        self.num_processes = num_processes
        if num_processes > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting_file.absolute()}",
                rank=rank,
                world_size=num_processes,
                timeout=PATIENCE,
            )

    def sum_gradients(self, parameters: Sequence[nn.Parameter], decision: float) -> float:
        """Every gradient becomes the sum over the processes. Returns the decision of process 0."""
        if self.num_processes == 1:
            return decision
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        mine = torch.tensor([decision if self.rank == 0 else 0.0])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), mine])
        dist.all_reduce(flat)
        pieces: Sequence[Tensor] = torch.split(flat[:-1], [each.numel() for each in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        return float(flat[-1].item())

    def gather(self, value: Any) -> list[Any]:
        if self.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.num_processes
        dist.all_gather_object(values, value)
        return values


def start_other_process() -> subprocess.Popen[bytes]:
    """The same command as process 1. A command line of its own, so that `pkill -f train_demo.py` finds it."""
    return subprocess.Popen([sys.executable, *sys.argv, "--rank", "1"])

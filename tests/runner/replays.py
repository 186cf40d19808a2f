"""Recorders of steps, with a stand-in where there is no GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from keepsight.runner.record_graph import Record, make_recorder


class Replays:
    """Stand-in for recorded graphs without a GPU: a replay computes again from the same tensors, and is counted."""

    def __init__(self) -> None:
        self.num_recorded = self.num = 0

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_recorded += 1
        compute()

        def replay() -> Tensor:
            self.num += 1
            return compute()

        return replay


def recorder_for(device: torch.device) -> Record:
    return make_recorder() if device.type == "cuda" else Replays().record

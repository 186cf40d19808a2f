"""A recorder of steps where no GPU is."""

from collections.abc import Callable

from torch import Tensor


class Replays:
    """What was recorded, without a GPU: computed again, from the same tensors into others, and counted."""

    def __init__(self) -> None:
        self.num_recorded = self.num = 0

    def record(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_recorded += 1
        compute()

        def replay() -> Tensor:
            self.num += 1
            return compute()

        return replay

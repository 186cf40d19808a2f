"""Counts copies from the host to a device while a step is planned."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CopiedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num, self.num_copies = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_cpu and not result.is_cpu:
            self.num += result.nbytes
            self.num_copies += 1
        return result

"""Records what a GPU is told to do, to tell it so again in one go."""

from collections.abc import Callable

import torch
from torch import Tensor

from keepsight.runner.share_device import PRIORITY_OF_ANSWERS

# What it is given computes always the same tensor; what it gives does so, too, by what is recorded.
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def make_recorder() -> Record:
    """By CUDA graphs, which share their memory: one runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    # The same for all: what products use besides (by torch's source 32 MiB of an H100) is each stream's, for good.
    trying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # A kernel goes before others by the stream that it was recorded on, wherever it is replayed.
    recording = torch.cuda.Stream(priority=PRIORITY_OF_ANSWERS)  # type: ignore[no-untyped-call]

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # What is made when first asked for (kernels, workspaces) must not be recorded.
        trying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(trying):
            compute()
        torch.cuda.current_stream().wait_stream(trying)
        graph = torch.cuda.CUDAGraph()
        # Others may ask for memory meanwhile, as whoever locks pages does.
        capture = torch.cuda.graph(graph, pool=pool, stream=recording, capture_error_mode="thread_local")
        # That it is left by itself where it fails is not to be relied on.
        with torch.cuda.stream(recording), capture:
            output = compute()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def record_unless_lost(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        try:
            return record(compute)
        except torch.AcceleratorError as error:
            # What may not be recorded is told as a lost device is, but that one fails at whatever it is asked.
            torch.cuda.synchronize()
            # Of two errors the second only says that there was one before.
            raise RuntimeError(str(error.__context__ or error)) from error

    return record_unless_lost

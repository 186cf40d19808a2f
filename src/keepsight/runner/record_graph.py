"""Records the kernels that a computation launches on a GPU, to replay them in one launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from keepsight.runner.share_device import PRIORITY_OF_ANSWERS

# Turns a function into one that replays its recorded kernels, and returns the same output tensor at each call.
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def make_recorder() -> Record:
    """Make a recorder of CUDA graphs that share a memory pool, so only one of them may run at a time."""
    pool = torch.cuda.graph_pool_handle()
    # One stream for all trial runs: matrix products keep a workspace for each stream (by torch's source 32 MiB on an
    # H100) for good.
    trying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # A kernel has the priority of the stream that it was recorded on, wherever it is replayed.
    recording = torch.cuda.Stream(priority=PRIORITY_OF_ANSWERS)  # type: ignore[no-untyped-call]

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Run once first, as what is created at first use (kernels, workspaces) must not be recorded.
        trying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(trying):
            compute()
        torch.cuda.current_stream().wait_stream(trying)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory meanwhile, such as the one that page-locks arrays.
        capture = torch.cuda.graph(graph, pool=pool, stream=recording, capture_error_mode="thread_local")
        # The capture cannot be relied on to leave its stream if it fails.
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
            # An operation that cannot be recorded raises the same error as a lost device, but only a lost device fails
            # at the next call, too.
            torch.cuda.synchronize()
            # If there were two errors, the second only says that there was one before.
            raise RuntimeError(str(error.__context__ or error)) from error

    return record_unless_lost

"""Steps of single tokens, guesses included, recorded once on a GPU for some numbers of rows and then replayed.

Of such a step the device's work is reading the weights, and launching some four hundred kernels from Python takes
longer than that.  A replay is one launch: it reads what it is told where the recording did, and rows that nobody has
this time write nothing and see nothing.  Longer slices are launched as ever, which takes longer than they do where they
are a few hundred tokens.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.gpu_library import kernels_for
from keepsight.models.model import Model
from keepsight.models.paged_attention import PagedAttention
from keepsight.runner.sequence_table import RunningSequence
from keepsight.runner.share_device import PRIORITY_OF_ANSWERS
from keepsight.runner.step_inputs import make_request_slice, tokens_of
from keepsight.scheduling.step_plan import Slice

logger = logging.getLogger(__name__)
# Numbers of rows.  Between two of them a step computes rows of nobody, which read no keys.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# What it is given computes always the same tensor; what it gives does so, too, by what is recorded.
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class DecodeGraphs:
    def __init__(
        self, model: Model, caches: Sequence[LayerCache], block_size: int, sizes: Sequence[int], record: Record
    ) -> None:
        # The largest first: the others have room in what it took.
        steps = [_RecordedStep(model, caches, block_size, size, record) for size in sorted(sizes, reverse=True)]
        self._sizes = sorted(sizes)
        self._steps = steps[::-1]

    def has_room_for(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> bool:
        """Whether these are single tokens of text, each followed by a new one, and of the model as it was recorded."""
        return len(slices) <= self._sizes[-1] and all(
            piece.length == 1
            and piece.samples
            and not piece.tells_prompt
            and piece.start >= sequence.media_end
            and sequence.adapter is None
            for piece, sequence in zip(slices, sequences, strict=True)
        )

    def compute(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> Tensor:
        """[slices, hidden], until the next call"""
        return self._steps[bisect_left(self._sizes, len(slices))].compute(slices, sequences)


class _RecordedStep:
    def __init__(
        self, model: Model, caches: Sequence[LayerCache], block_size: int, num_rows: int, record: Record
    ) -> None:
        device = model.place.device
        # Nobody has a page yet: what is recorded may write to the first.
        first = RequestSlice(0, 1, BlockTable(block_size, [0], device))
        batch = AttentionBatch([first] * num_rows, device)
        # Others in their places stand anywhere: no window is too wide to matter.
        batch.longest = len(caches[0].keys)
        assert batch.rows is not None
        self._rows, self._token_ids = batch.rows, torch.zeros(num_rows, dtype=torch.int64, device=device)
        attention = PagedAttention()
        self._replay = record(
            lambda: model.compute(model.embed_tokens(self._token_ids), attention, caches, batch),
        )

    def compute(self, slices: Sequence[Slice], sequences: Sequence[RunningSequence]) -> Tensor:
        pairs = list(zip(slices, sequences, strict=True))
        token_ids = [token_id for pair in pairs for token_id in tokens_of(*pair)]
        self._token_ids.copy_(torch.tensor(token_ids + [0] * (len(self._token_ids) - len(token_ids))))
        self._rows.replace([make_request_slice(piece, sequence) for piece, sequence in pairs])
        return self._replay()[: len(slices)]


@torch.inference_mode()
def record_decoding(
    model: Model, caches: Sequence[LayerCache], block_size: int, max_tokens: int
) -> DecodeGraphs | None:
    """None where a kernel's number of keys would be recorded with it, or there is no room."""
    if not max_tokens or kernels_for(model.place.device) is None:
        return None
    began = time.monotonic()
    last = bisect_left(SIZES, max_tokens)
    try:
        graphs = DecodeGraphs(model, caches, block_size, SIZES[: last + 1], _make_recorder())
    except torch.AcceleratorError:
        logger.error("recording steps has lost this GPU; --enforce-eager does without")
        raise
    except Exception as error:
        logger.warning("steps are launched one kernel at a time, as they could not be recorded: %s", error)
        return None
    logger.info("steps of up to %d tokens recorded in %.1f s", SIZES[: last + 1][-1], time.monotonic() - began)
    return graphs


def _make_recorder() -> Record:
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

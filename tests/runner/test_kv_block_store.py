"""Pages that do not fit into memory are refused in one line, with their size and how to ask for less."""

import pytest
import torch

from keepsight.errors import PagesTooLargeError
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape
from keepsight.runner.kv_block_store import KvBlockStore

SHAPE = ModelShape(2, 1, 8, 300, 8, 0, 0, sees_pictures_whole=True)


@pytest.mark.parametrize("num_blocks", [10**12, 10**18])
def test_pages_that_a_cpu_s_memory_has_no_room_for_are_refused_with_their_size(num_blocks: int) -> None:
    told = rf"^{num_blocks} KV blocks take \d+\.\d GiB, .*--num-gpu-blocks-override can request"
    with pytest.raises(PagesTooLargeError, match=told):
        KvBlockStore(SHAPE, num_blocks, 16, Placement(torch.device("cpu"), torch.float32))


def test_pages_that_a_gpu_has_no_room_for_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(PagesTooLargeError, match=r"^2097152 KV blocks take 1\.0 GiB, .*: CUDA out of memory\. Tried"):
        KvBlockStore(SHAPE, 2**21, 8, Placement(torch.device("meta"), torch.bfloat16))

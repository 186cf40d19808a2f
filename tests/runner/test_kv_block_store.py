"""Pages that do not fit into memory are refused in one line, with their size and how to ask for less."""

import pytest
import torch

from keepsight.errors import PagesTooLargeError
from keepsight.models.layers import Placement
from keepsight.models.model import KvHeads, ModelShape
from keepsight.runner.kv_block_store import KvBlockStore
from keepsight.scheduling.step_plan import PageCopy

PLACE = Placement(torch.device("cpu"), torch.float32)
SHAPE = ModelShape((KvHeads(1, 8), KvHeads(1, 8)), 300, 8, 0, 0, sees_pictures_whole=True)


@pytest.mark.parametrize("num_blocks", [10**12, 10**18])
def test_pages_that_a_cpu_s_memory_has_no_room_for_are_refused_with_their_size(num_blocks: int) -> None:
    message = rf"^{num_blocks} KV blocks take \d+\.\d GiB, .*--num-gpu-blocks-override can request"
    with pytest.raises(PagesTooLargeError, match=message):
        KvBlockStore(SHAPE, num_blocks, 16, PLACE)


def test_pages_that_a_gpu_has_no_room_for_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(PagesTooLargeError, match=r"^2097152 KV blocks take 1\.0 GiB, .*: CUDA out of memory\. Tried"):
        KvBlockStore(SHAPE, 2**21, 8, Placement(torch.device("meta"), torch.bfloat16))


@pytest.mark.parametrize("block_ids", [[1, 2], [5, 1, 3]])
def test_layers_of_several_shapes_read_blocks_back_as_others_were_written(block_ids: list[int]) -> None:
    heads = (KvHeads(4, 8), KvHeads(1, 16), KvHeads(4, 8))
    shape = ModelShape(heads, 300, 8, 0, 0, sees_pictures_whole=True)
    store = KvBlockStore(shape, 6, 2, PLACE)
    tensors = [tensor for layer in store.layers for tensor in (layer.keys, layer.values)]
    assert [tuple(tensor.shape) for tensor in tensors] == [(12, *each) for each in heads for _ in range(2)]
    for tensor in tensors:
        tensor.normal_()
    written = [tensor.clone() for tensor in tensors]
    content = store.read(block_ids)
    assert content.shape == (len(block_ids), 2 * shape.numbers_per_position)
    store.fill([4, 0], content, [1, 0])
    store.copy([PageCopy(4, 5)])
    for tensor, before in zip(tensors, written, strict=True):
        blocks, blocks_before = tensor.view(6, -1), before.view(6, -1)
        assert torch.equal(blocks[[0, 4, 5]], blocks_before[[block_ids[0], block_ids[1], block_ids[1]]])
        assert torch.equal(blocks[1:4], blocks_before[1:4])

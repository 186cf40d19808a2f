"""Pages that do not fit into memory are refused in one line, with their size and how to ask for less."""

import pytest
import torch

from keepsight.errors import PagesTooLargeError
from keepsight.models.layers import Placement
from keepsight.models.model import KvHeads, ModelShape, StateShape
from keepsight.runner.kv_block_store import KvBlockStore, StateStore
from keepsight.scheduling.step_plan import PageCopy, StateCopy

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

    monkeypatch.setattr(torch, "zeros", refuse)
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


# The states of recurrent layers --------------------------------------------------------------------------------

COLUMNS, MATRIX = StateShape((3,), torch.bfloat16), StateShape((2, 4), torch.float32)
# The last is of the second's shape, but another dtype.
STATES = (COLUMNS, MATRIX, COLUMNS, MATRIX, StateShape((2, 4), torch.bfloat16))
NUM_SLOTS = 4


@pytest.fixture(params=[False, True], ids=["a tensor for each state", "a tensor for all states of a shape"])
def states(request: pytest.FixtureRequest) -> StateStore:
    return StateStore(STATES, NUM_SLOTS, PLACE.device, joined=request.param)


def fill(states: StateStore) -> list[torch.Tensor]:
    """Make no two slots of any states alike. Return a copy."""
    for number, each in enumerate(states.of_layers):
        slots = torch.arange(1, len(each) + 1) + number * len(each)
        each.copy_(slots.view(-1, *[1] * (each.dim() - 1)).expand_as(each))
    return [each.clone() for each in states.of_layers]


def test_each_layer_has_states_of_its_own_in_every_slot_and_one_that_is_no_sequence_s(states: StateStore) -> None:
    assert states.spare_slot == NUM_SLOTS
    for each, shape in zip(states.of_layers, STATES, strict=True):
        assert (tuple(each.shape), each.dtype) == ((NUM_SLOTS + 1, *shape.shape), shape.dtype)
        assert not each.any()
    fill(states)
    numbers = [row.unique().tolist() for each in states.of_layers for row in each]
    assert numbers == [[number + 1] for number in range(len(STATES) * (NUM_SLOTS + 1))]


def test_states_are_copied_in_the_order_of_the_plan_in_all_layers(states: StateStore) -> None:
    before = fill(states)
    states.copy([StateCopy(3, 0), StateCopy(2, 3), StateCopy(3, 1)])
    for each, old in zip(states.of_layers, before, strict=True):
        assert torch.equal(each, old[[3, 2, 2, 2, NUM_SLOTS]])


@pytest.mark.parametrize("slots", [(), (2,), (3, 0)])
def test_states_of_these_slots_alone_are_made_empty_in_all_layers(states: StateStore, slots: tuple[int, ...]) -> None:
    before = fill(states)
    states.clear(slots)
    for each, old in zip(states.of_layers, before, strict=True):
        for slot, (state, old_state) in enumerate(zip(each, old, strict=True)):
            assert not state.any() if slot in slots else torch.equal(state, old_state)


@pytest.mark.parametrize(("joined", "num_tensors"), [(False, len(STATES)), (True, 3)])
def test_joined_states_of_a_shape_share_a_tensor(joined: bool, num_tensors: int) -> None:
    states = StateStore(STATES, NUM_SLOTS, PLACE.device, joined=joined)
    assert len({each.untyped_storage().data_ptr() for each in states.of_layers}) == num_tensors

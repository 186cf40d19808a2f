"""Packed weights unpack to the same numbers, zeros, scales and groups of inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight.models.packed_weights import Packing, awq, compressed, gptq
from tests import packed
from tests.packed import Drawn

GROUP_SIZES = st.sampled_from([None, 1, 8, 24, 128])
# More outputs than are unpacked at once.
OUTPUTS = st.sampled_from([8, 32, 264])
SIZES, BITS, SEEDS = st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 2**32)


def check(packing: Packing, drawn: Drawn, tensors: dict[str, torch.Tensor]) -> None:
    shape = drawn.numbers.shape
    assert {name: part.shape for name, part in packing.parts(*shape).items() if part.is_needed or name in tensors} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert torch.equal(packing.make_whole(tensors, *shape), drawn.whole)


@given(OUTPUTS, SIZES, GROUP_SIZES, SEEDS)
def test_awq_comes_back(outputs: int, inputs: int, group_size: int | None, seed: int) -> None:
    drawn = packed.draw(outputs, inputs, group_size, 4, seed)
    check(awq(group_size), drawn, packed.to_awq(drawn))


@given(OUTPUTS, st.integers(1, 5), GROUP_SIZES, SEEDS, BITS, st.booleans(), st.booleans())
def test_gptq_comes_back(
    outputs: int, eights: int, group_size: int | None, seed: int, num_bits: int, is_first: bool, in_order: bool
) -> None:
    drawn = packed.draw(outputs, 8 * eights, group_size, num_bits, seed, in_order=in_order)
    tensors = packed.to_gptq(drawn, "gptq" if is_first else "gptq_v2")
    if in_order:
        del tensors["g_idx"]
    check(gptq(num_bits, group_size, needs_groups=not in_order, zeros_less=int(is_first)), drawn, tensors)


@given(
    st.integers(1, 40), st.integers(1, 40), GROUP_SIZES, SEEDS, st.sampled_from([4, 8]), st.booleans(), st.booleans()
)
def test_compressed_tensors_come_back(
    outputs: int, inputs: int, group_size: int | None, seed: int, num_bits: int, has_zeros: bool, in_order: bool
) -> None:
    drawn = packed.draw(outputs, inputs, group_size, num_bits, seed, symmetric=not has_zeros, in_order=in_order)
    tensors = packed.to_compressed(drawn, symmetric=not has_zeros)
    if in_order:
        del tensors["weight_g_idx"]
    check(compressed(num_bits, group_size, needs_groups=not in_order, has_zeros=has_zeros), drawn, tensors)


def test_a_word_of_awq_is_as_published() -> None:
    """From the lowest bits up, its numbers are those of outputs 0, 2, 4, 6, 1, 3, 5 and 7."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "qzeros": torch.tensor([[0]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    assert awq(None).make_whole(tensors, 8, 1).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("zeros_less", "zero"), [(0, 7), (1, 8)])
def test_a_word_of_gptq_is_as_published(zeros_less: int, zero: int) -> None:
    tensors = {
        "qweight": torch.tensor([[0x76543210]] * 8, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor([[0x77777777]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    whole = gptq(4, None, needs_groups=False, zeros_less=zeros_less).make_whole(tensors, 8, 8)
    assert whole.tolist() == [[each - zero for each in range(8)]] * 8

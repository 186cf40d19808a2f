"""A GPU's kernel attends among patches as torch's operation does, and a tower's layer gives the same with it."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.gpu_library import without_kernels
from keepsight.models.layers import Placement, rotate
from keepsight.models.vision_layer import VisionLayer, VisionLayerConfig, Windows
from tests.models.gpu_kernels_here import (
    DEVICE,
    DTYPES,
    MAX_SHARED_BYTES,
    NUM_BYTES,
    Kernel,
    gpu_kernels,
    gpu_whole_sight,
    kernels_in_use,
    shared_bytes_of,
)

SCALE = 0.3
DIMS = (8, 56, 64, 72, 80, 96, 128)
# Sizes that fill the tile of a smaller one: with it the kernel is the same but for a mask.
DIMS_THAT_FILL_A_TILE = (64, 80)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw_heads(pictures: int, patches: int, num_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(pictures, 3, num_heads, patches, dim).to(DEVICE, dtype).permute(0, 3, 1, 2, 4)


def attend(heads: Tensor, windows: Sequence[Windows] = ()) -> Tensor:
    """Attend; the output of patches outside all windows is not written."""
    pictures, patches, _, num_heads, dim = heads.shape
    attended = heads.new_full((pictures, patches, num_heads, dim), torch.nan)
    for each in windows or [Windows(0, patches, patches)]:
        gpu_kernels.attend_to_all(heads, attended, *each, SCALE)
    return attended


def attend_plainly(heads: Tensor) -> Tensor:
    query, key, value = heads.float().transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(query, key, value, scale=SCALE).transpose(1, 2)


def assert_close(found: Tensor, expected: Tensor) -> None:
    rounding = 1e-5 if found.dtype is torch.float32 else 5e-3
    torch.testing.assert_close(found.float(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_patches_see_each_other_whatever_the_size_of_a_head(dim: int, dtype: torch.dtype) -> None:
    heads = draw_heads(2, 75, 2, dim, dtype)
    assert_close(attend(heads), attend_plainly(heads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patches", [1, 15, 16, 64, 65, 127, 128, 129, 256])
def test_any_number_of_patches_sees_each_other(patches: int, dtype: torch.dtype) -> None:
    heads = draw_heads(1, patches, 1, 72, dtype)
    assert_close(attend(heads), attend_plainly(heads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patches_of_a_window_see_those_alone_and_others_are_left_as_they_are(dtype: torch.dtype) -> None:
    heads = draw_heads(2, 330, 2, 80, dtype)
    windows = [Windows(0, 192, 64), Windows(192, 240, 16), Windows(250, 327, 77)]
    attended = attend(heads, windows)
    for first, end, size in windows:
        for begin in range(first, end, size):
            some = slice(begin, begin + size)
            assert_close(attended[:, some], attend_plainly(heads[:, some]))
    assert attended[:, 240:250].isnan().all()
    assert attended[:, 327:].isnan().all()


@pytest.mark.parametrize("score", [-100.0, 100.0])
def test_scores_may_all_be_so_far_from_0_that_their_exponentials_overflow(score: float) -> None:
    heads = draw_heads(1, 70, 1, 16)
    heads[:, :, 0, :, 0], heads[:, :, 1, :, 0] = score / SCALE, 1.0
    # Scores this large, and the powers computed from them, have fewer digits left.
    torch.testing.assert_close(attend(heads), attend_plainly(heads), rtol=1e-4, atol=1e-4)


def test_company_changes_no_bit() -> None:
    heads = draw_heads(3, 200, 2, 72, torch.float16)
    together = attend(heads)
    for picture in range(3):
        alone = draw_heads(1, 200, 2, 72, torch.float16).copy_(heads[picture])
        assert torch.equal(attend(alone)[0], together[picture])
    window = draw_heads(1, 50, 2, 72, torch.float16).copy_(heads[1, 50:100])
    assert torch.equal(attend(heads, [Windows(0, 200, 50)])[1, 50:100], attend(window)[0])


def test_a_head_is_read_as_a_power_of_two_and_a_rest_where_that_is_less() -> None:
    parts = {dim: gpu_whole_sight.tiles_of(dim, 2) for dim in DIMS}
    assert {dim: (each["MAIN"], each["REST"]) for dim, each in parts.items()} == {
        8: (16, 0), 56: (64, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 128: (128, 0)
    }  # fmt: skip
    for filling, smaller in zip(DIMS_THAT_FILL_A_TILE, (56, 72), strict=True):
        for num_bytes in (2, 4):
            same = gpu_whole_sight.tiles_of(smaller, num_bytes) | {"DIM": filling}
            assert gpu_whole_sight.tiles_of(filling, num_bytes) == same


# Positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [1, 3, 4, 6])
@pytest.mark.parametrize("dim", [8, 72, 80])
def test_heads_are_placed_each_by_themselves_and_turned(dim: int, num_heads: int, dtype: torch.dtype) -> None:
    pictures, patches = 2, 9
    projected = torch.randn(pictures, patches, 3, num_heads, dim).to(DEVICE, dtype)
    cos, sin = torch.randn(2, patches, 1, dim).to(DEVICE)
    plain, turned = (draw_heads(pictures, patches, num_heads, dim, dtype) for _ in range(2))
    gpu_kernels.place_patches(projected, None, plain)
    gpu_kernels.place_patches(projected, (cos, sin), turned)
    assert torch.equal(plain, projected)
    assert torch.equal(turned[:, :, 2], projected[:, :, 2])
    expected = rotate(projected[:, :, :2].float(), (cos[:, None], sin[:, None]))
    assert_close(turned[:, :, :2], expected)


# Layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(), (Windows(0, 64, 16), Windows(64, 70, 6))], ids=["whole", "windows"])
def test_a_layer_of_a_tower_is_the_same_with_the_kernels(windows: Sequence[Windows]) -> None:
    config = VisionLayerConfig(144, 64, 2, 1e-6, "gelu", ("q_proj", "k_proj", "v_proj"))
    layer = VisionLayer(config, Placement(DEVICE, torch.float32))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    hidden = torch.randn(2, 70, 144).to(DEVICE)
    cos, sin = torch.randn(2, 70, 1, 72).to(DEVICE)

    def compute() -> Tensor:
        rows = hidden.clone()
        for _ in layer(rows, layer.make_heads(rows), (cos, sin), windows):
            pass
        return rows

    with torch.inference_mode(), kernels_in_use():
        found = compute()
        with without_kernels():
            expected = compute()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Real GPUs ----------------------------------------------------------------------------------------------------


def kernels_of(number: str, num_bytes: int) -> list[Kernel]:
    types = {"attended": f"*{number}", "heads": f"*{number}", "scale": "fp32"}
    types |= dict.fromkeys(("patches", "first", "size"), "i32")
    kernels = [
        Kernel("gpu_whole_sight", "_attend_to_all", types, {"HEADS": 16, "WHOLE": is_whole, **tiles})
        for tiles in (gpu_whole_sight.tiles_of(dim, num_bytes) for dim in DIMS if dim not in DIMS_THAT_FILL_A_TILE)
        for is_whole in (True, False)
    ]
    types = {"heads": f"*{number}", "projected": f"*{number}", "cos": "*fp32", "sin": "*fp32", "numbers": "i32"}
    sizes = {"HEADS": 16, "DIM": 72, "AT_ONCE": 4, "NUMBERS": gpu_whole_sight.PLACED_AT_ONCE}
    return [
        *kernels,
        *(Kernel("gpu_whole_sight", "_place_patches", types, sizes | {"ROTATES": each}) for each in (True, False)),
    ]


def test_the_kernels_are_compiled_for_gpus_that_are_not_here() -> None:
    kernels = {number: kernels_of(number, num_bytes) for number, num_bytes in NUM_BYTES.items()}
    assert max(shared_bytes_of(kernels)) <= MAX_SHARED_BYTES

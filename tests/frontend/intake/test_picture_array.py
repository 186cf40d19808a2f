"""Which arrays and tensors are pictures; `test_preprocess_image.py` compares their pixels with the reference's."""

from typing import Any

import numpy as np
import pytest
import torch

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.picture_array import try_freeze_array
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.frontend.intake.take_picture import take_picture
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.media import Geometry

ARRAY = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(5, 4, 3)


@pytest.mark.parametrize(
    "source",
    [
        ARRAY,
        np.asfortranarray(ARRAY),
        torch.from_numpy(ARRAY.copy()),
        torch.from_numpy(np.repeat(ARRAY, 2, axis=1))[:, ::2],
        torch.nn.Parameter(torch.from_numpy(ARRAY.copy()), requires_grad=False),
    ],
)
def test_what_is_frozen_is_a_copy_that_cannot_be_changed(source: Any) -> None:
    frozen = try_freeze_array(source, "picture")
    assert frozen is not None
    assert np.array_equal(frozen, ARRAY)
    assert frozen.flags.c_contiguous
    assert not frozen.flags.writeable
    assert not np.shares_memory(frozen, np.asarray(source))


@pytest.mark.parametrize("source", [None, "text", b"bytes", 5, [[1, 2]], object()])
def test_what_is_neither_array_nor_tensor_is_left_to_others(source: object) -> None:
    assert try_freeze_array(source, "picture") is None


def test_a_plane_without_channels_is_grey() -> None:
    """The reference accepts grayscale only with an axis of 1 channel."""
    plane = take_picture(ARRAY[..., 0], "picture")
    one_channel = take_picture(ARRAY[np.newaxis, ..., 0], "picture")
    assert read_geometry(plane, "picture") == read_geometry(one_channel, "picture") == Geometry(4, 5)
    assert np.array_equal(decode_picture(plane), decode_picture(one_channel))
    assert np.array_equal(decode_picture(plane), np.stack([ARRAY[..., 0]] * 3, axis=-1))


REFUSED: dict[str, Any] = {
    "float32 [5, 4, 3]": ARRAY.astype(np.float32),
    "int64 [5, 4, 3]": ARRAY.astype(np.int64),
    "bool [5, 4, 3]": ARRAY.astype(bool),
    "bfloat16 [5, 4, 3]": torch.from_numpy(ARRAY.copy()).to(torch.bfloat16),
    "int8 [5, 4, 3]": torch.from_numpy(ARRAY.copy()).to(torch.int8),
    "uint8 [5]": ARRAY[:, 0, 0],
    "uint8 []": np.array(5, dtype=np.uint8),
    "uint8 [1, 5, 4, 3]": ARRAY[np.newaxis],
    "uint8 [5, 4, 2]": ARRAY[..., :2],
    "uint8 [5, 6, 4]": np.zeros((5, 6, 4), np.uint8),
    # Ambiguous: four rows of RGB, or RGBA with channels first, as the reference reads it.
    "uint8 [4, 5, 3]": np.zeros((4, 5, 3), np.uint8),
}


@pytest.mark.parametrize("described", REFUSED)
def test_other_arrays_are_refused_with_what_is_allowed(described: str) -> None:
    with pytest.raises(UnsupportedPictureError) as caught:
        take_picture(REFUSED[described], "messages[0].content[0].image_pil")
    assert caught.value.field == "messages[0].content[0].image_pil"
    assert f"an array of {described} is not supported; allowed are uint8 [height, width, 3]" in caught.value.message
    assert ("image_embeds" in caught.value.message) == ("float" in described)


def test_tensors_without_dense_data_are_refused() -> None:
    zeros = torch.zeros(5, 4, 3, dtype=torch.uint8)
    for tensor in (zeros.to_sparse(), zeros.to("meta")):
        with pytest.raises(UnsupportedPictureError, match="a tensor without dense data"):
            take_picture(tensor, "picture")


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (3, 0, 5), (0, 0)])
def test_an_array_without_pixels_is_refused_as_empty(shape: tuple[int, ...]) -> None:
    source = take_picture(np.zeros(shape, np.uint8), "picture")
    with pytest.raises(UnreadablePictureError, match="is empty"):
        read_geometry(source, "picture")

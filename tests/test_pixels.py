import numpy as np
import pytest

from keepsight.ipc.codec import decode_to_engine, encode_to_engine
from keepsight.pixels import agree, carried_arrays, carry_arrays, show_a_picture
from keepsight.requests import MediaArrived


def test_arrays_of_any_type_and_shape_survive_the_round_trip() -> None:
    arrays = {
        "pixel_values": np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4),
        "pixel_attention_mask": np.array([[True, False, True]]),
        "token_ids": np.array([7, 7, 8], np.int32),
    }
    carried = carried_arrays(carry_arrays(arrays))
    assert carried.keys() == arrays.keys()
    for name, array in arrays.items():
        assert carried[name].dtype == array.dtype
        np.testing.assert_array_equal(carried[name], array)


def test_carried_arrays_are_not_a_displayable_picture() -> None:
    assert not show_a_picture(carry_arrays({"token_ids": np.zeros(3, np.int32)}))


def test_large_arrays_are_sent_like_pixels() -> None:
    carried = carry_arrays({"pixel_values": np.zeros((7, 3, 512, 512), np.float32)})
    message = MediaArrived("some hash", carried)
    arrived = decode_to_engine(encode_to_engine(message))
    assert isinstance(arrived, MediaArrived)
    assert isinstance(arrived.pixels, np.ndarray)
    assert np.array_equal(arrived.pixels, carried)


def test_only_kept_pixels_that_differ_from_their_picture_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    held = np.zeros((2, 2, 3), np.uint8)
    assert agree("a", held, held.copy())
    assert not caplog.messages
    assert not agree("a", held, held + 1)
    assert not agree("b", held, held[:1])
    assert [message.split(" under ")[1][0] for message in caplog.messages] == ["a", "b"]

"""Each size is laid out only once; a size that fails or is too large is refused to every caller."""

import pytest

from keepsight.borrowed import MAX_TOKENS_OF_BORROWED, BorrowedProcessor
from keepsight.errors import PictureTooLargeError, UnsupportedPictureError
from keepsight.frontend.identity import borrowed_layouts
from keepsight.frontend.identity.borrowed_layouts import BorrowedLayouts
from keepsight.frontend.pixels.make_pixels import BorrowedLook, Look
from keepsight.media import Geometry, PictureLayout
from keepsight.requests import MAX_PIXEL_BYTES

PROCESSOR = BorrowedProcessor("/folder", "digest", 7)


class Processor:
    """Lays out a picture as one token per pixel of width; rejects a height of 13 pixels."""

    def __init__(self, num_bytes: int = 10) -> None:
        self.asked: list[Geometry] = []
        self.num_bytes = num_bytes

    def __call__(self, look: Look) -> PictureLayout:
        assert isinstance(look, BorrowedLook)
        assert look.processor == PROCESSOR
        geometry = look.geometry
        self.asked.append(geometry)
        if geometry.height == 13:
            raise UnsupportedPictureError(look.field, "13 is no height")
        return PictureLayout(geometry.width, token_ids=(7,) * geometry.width, num_bytes=self.num_bytes)


def test_a_size_is_asked_about_once() -> None:
    processor = Processor()
    layouts = BorrowedLayouts(PROCESSOR, processor)
    small, large = Geometry(2, 5), Geometry(4, 5)
    assert not layouts.knows(small)
    assert [layouts.of(each, "picture").token_ids for each in (small, large, small)] == [(7, 7), (7,) * 4, (7, 7)]
    assert layouts.knows(small)
    assert processor.asked == [small, large]


def test_what_is_refused_is_asked_about_again_and_refused_by_its_caller_s_name() -> None:
    processor = Processor()
    layouts = BorrowedLayouts(PROCESSOR, processor)
    for field in ("first", "second"):
        with pytest.raises(UnsupportedPictureError, match=f"{field}: 13 is no height"):
            layouts.of(Geometry(1, 13), field)
    assert not layouts.knows(Geometry(1, 13))
    assert len(processor.asked) == 2


def test_a_picture_of_more_tokens_than_an_engine_has_room_for_is_refused_with_both_numbers() -> None:
    layouts = BorrowedLayouts(PROCESSOR, Processor())
    assert layouts.of(Geometry(MAX_TOKENS_OF_BORROWED, 100), "picture").num_tokens == MAX_TOKENS_OF_BORROWED
    with pytest.raises(PictureTooLargeError, match=r"16385 x 100 pixels has 16385 tokens .* at most 16384 are allowed"):
        layouts.of(Geometry(MAX_TOKENS_OF_BORROWED + 1, 100), "picture")


def test_a_picture_whose_arrays_could_not_be_sent_is_refused_with_both_sizes() -> None:
    assert BorrowedLayouts(PROCESSOR, Processor(MAX_PIXEL_BYTES)).of(Geometry(3, 2), "picture").num_bytes == 2**30
    layouts = BorrowedLayouts(PROCESSOR, Processor(MAX_PIXEL_BYTES + 4096))
    with pytest.raises(PictureTooLargeError, match=r"3 x 2 pixels takes 1073745920 bytes .* at most 1073741824 are"):
        layouts.of(Geometry(3, 2), "picture")


@pytest.mark.parametrize("size", [Geometry(201, 1), Geometry(2, 401)])
def test_a_picture_that_is_far_too_long_is_refused_before_its_processor_is_asked(size: Geometry) -> None:
    processor = Processor()
    with pytest.raises(UnsupportedPictureError, match=r"picture: .* more than 200 times as long as the other"):
        BorrowedLayouts(PROCESSOR, processor).of(size, "picture")
    assert not processor.asked


def test_the_least_recently_used_size_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowed_layouts, "MAX_BYTES", 3 * (36 * 10 + 500))
    layouts = BorrowedLayouts(PROCESSOR, Processor())
    sizes = [Geometry(10, height) for height in range(1, 5)]
    for size in (*sizes[:3], sizes[0], sizes[3]):
        layouts.of(size, "picture")
    assert [layouts.knows(size) for size in sizes] == [True, False, True, True]

import pytest

from keepsight.config import Config
from keepsight.errors import MediaTooLargeError, TooManyPicturesError
from keepsight.frontend.intake.media_limits import MediaLimits
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.media import Modality

LIMITS = MediaLimits({"image": 2, "video": 1, "audio": 1}, max_bytes=10, max_request_bytes=15, fetch_seconds=1)


def parts_of(num_parts: int, modality: Modality = "image") -> list[PicturePart]:
    return [PicturePart(b"", f"part[{index}]", modality=modality) for index in range(num_parts)]


def test_the_first_picture_too_many_is_named_with_the_limit() -> None:
    LIMITS.check_count(parts_of(2))
    with pytest.raises(TooManyPicturesError, match="one of 5 pictures, at most 2") as caught:
        LIMITS.check_count(parts_of(5))
    assert (caught.value.field, caught.value.status, caught.value.code) == ("part[2]", 400, "too_many_pictures")


def test_videos_and_sounds_are_counted_by_themselves() -> None:
    LIMITS.check_count([*parts_of(2), *parts_of(1, "video"), *parts_of(1, "audio")])
    with pytest.raises(TooManyPicturesError, match="one of 2 videos, at most 1"):
        LIMITS.check_count(parts_of(2, "video"))
    with pytest.raises(TooManyPicturesError, match="one of 2 sounds, at most 1"):
        LIMITS.check_count(parts_of(2, "audio"))


def test_a_picture_may_have_exactly_its_limit() -> None:
    LIMITS.check_size(10, "url")
    with pytest.raises(MediaTooLargeError, match="has 11 bytes, one may have at most 10") as caught:
        LIMITS.check_size(11, "url")
    assert (caught.value.field, caught.value.status) == ("url", 413)


def test_all_pictures_of_a_request_are_summed_and_those_of_another_are_not() -> None:
    request = LIMITS.count_bytes()
    request.add(10, "first")
    request.add(5, "second")
    with pytest.raises(MediaTooLargeError, match="more than the 15 bytes that all may have") as caught:
        request.add(1, "third")
    assert caught.value.field == "third"
    LIMITS.count_bytes().add(10, "first")


def test_without_a_number_pictures_are_not_counted() -> None:
    unlimited = MediaLimits.from_config(Config(limit_mm_per_prompt={"video": 0}))
    unlimited.check_count(parts_of(1000))
    with pytest.raises(TooManyPicturesError, match="at most 0"):
        MediaLimits.from_config(Config(limit_mm_per_prompt={"image": 0})).check_count(parts_of(1))

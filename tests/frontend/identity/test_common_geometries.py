"""A geometry that one frontend learned is known to all; a half-written one is not."""

from pathlib import Path

import pytest

from keepsight.frontend.identity.common_geometries import PLACE_BYTES, CommonGeometries
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.media import Geometry, Timeline

SIZE, OTHER = Geometry(40, 30), Geometry(2**20, 1)


def opened(folder: Path) -> CommonGeometries:
    common = CommonGeometries.open(folder)
    assert common is not None
    return common


def test_what_one_process_puts_is_read_by_others_and_later_ones(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    assert two.get("cat") is None
    one.put("cat", SIZE)
    one.put("dog", OTHER)
    assert (two.get("cat"), two.get("dog"), two.get("bird")) == (SIZE, OTHER, None)
    assert opened(tmp_path).get("cat") == SIZE
    two.forget("cat")
    two.forget("bird")
    assert (one.get("cat"), one.get("dog")) == (None, OTHER)


def test_places_lie_beside_each_other(tmp_path: Path) -> None:
    common = opened(tmp_path)
    sizes = {str(number): Geometry(number, 1) for number in range(1, 30)}
    sizes |= {"a film": Geometry(3, 2, Timeline(20, 10.0)), "a sound": Geometry(num_samples=480_000)}
    for name, size in sizes.items():
        common.put(name, size)
    assert {name: common.get(name) for name in sizes} == sizes


def test_of_two_names_with_one_place_the_later_is_kept_and_the_other_does_not_forget_it() -> None:
    common = CommonGeometries(bytearray(PLACE_BYTES), num_places=1)
    common.put("cat", SIZE)
    common.put("dog", OTHER)
    common.forget("cat")
    assert (common.get("cat"), common.get("dog")) == (None, OTHER)


@pytest.mark.parametrize("position", range(PLACE_BYTES))
def test_a_partial_write_is_not_read(position: int) -> None:
    page = bytearray(PLACE_BYTES)
    common = CommonGeometries(page, num_places=1)
    common.put("cat", SIZE)
    page[position] ^= 1
    assert common.get("cat") is None


def test_without_room_each_frontend_keeps_only_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert CommonGeometries.open(tmp_path / "file") is None
    assert "only the frontend" in caplog.text


def test_known_media_asks_what_others_know_and_tells_what_it_learns(tmp_path: Path) -> None:
    one, two = (KnownMedia(common=opened(tmp_path)) for _ in range(2))
    assert one.remember_geometry("cat", SIZE) is SIZE
    assert two.geometry_of("cat") == SIZE
    assert two.remember_geometry("cat", OTHER) == SIZE
    two.forget_geometry("cat")
    assert KnownMedia(common=opened(tmp_path)).geometry_of("cat") is None

"""A geometry that one frontend learned is known to all; a half-written one is not."""

import itertools
from pathlib import Path

import pytest

from keepsight.frontend.identity.common_geometries import PLACE_BYTES, PLACES_PER_BUCKET, CommonGeometries
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.media import Geometry, Timeline

SIZE, OTHER = Geometry(40, 30), Geometry(2**20, 1)


def one_bucket() -> bytearray:
    return bytearray(PLACES_PER_BUCKET * PLACE_BYTES)


def opened(folder: Path) -> CommonGeometries:
    common = CommonGeometries.open(folder)
    assert common is not None
    return common


def test_what_one_process_puts_is_read_by_others_and_later_ones(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    assert two.get("cat") is None
    one.put("cat", SIZE)
    one.put("dog", OTHER)
    assert (two.get("cat"), two.get("dog"), two.get("bird")) == ((SIZE, False), (OTHER, False), None)
    assert opened(tmp_path).get("cat") == (SIZE, False)
    two.forget_unproven("cat")
    two.forget_unproven("bird")
    assert (one.get("cat"), one.get("dog")) == (None, (OTHER, False))


def test_places_lie_beside_each_other(tmp_path: Path) -> None:
    common = opened(tmp_path)
    sizes = {str(number): Geometry(number, 1) for number in range(1, 30)}
    sizes |= {"a film": Geometry(3, 2, Timeline(20, 10.0)), "a sound": Geometry(num_samples=480_000)}
    for name, size in sizes.items():
        common.put(name, size)
    assert {name: common.get(name) for name in sizes} == {name: (size, False) for name, size in sizes.items()}


def test_another_frontend_knows_nearly_all_of_20_000_pictures(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    sizes = {f"picture {number}": Geometry(number, 1) for number in range(1, 20_001)}
    for name, size in sizes.items():
        one.put(name, size)
    found = {name: two.get(name) for name in sizes}
    assert sum(found[name] == (size, False) for name, size in sizes.items()) > 0.998 * len(sizes)
    assert all(found[name] in ((size, False), None) for name, size in sizes.items())


def test_of_more_names_than_have_place_the_last_are_kept_and_others_do_not_forget_them() -> None:
    seconds = itertools.count(1_800_000_000)
    common = CommonGeometries(one_bucket(), PLACES_PER_BUCKET, lambda: next(seconds))
    names = [f"picture {number}" for number in range(PLACES_PER_BUCKET + 3)]
    for number, name in enumerate(names, start=1):
        common.put(name, Geometry(number, 1))
    common.forget_unproven(names[0])
    assert [each for each in names if common.get(each)] == names[3:]
    common.forget_unproven(names[5])
    common.put("cat", SIZE)
    assert [each for each in [*names, "cat"] if common.get(each)] == [*names[3:5], *names[6:], "cat"]


def test_a_name_that_is_put_again_keeps_its_place() -> None:
    common = CommonGeometries(one_bucket(), PLACES_PER_BUCKET)
    common.put("dog", OTHER)
    for width in range(1, 2 * PLACES_PER_BUCKET):
        common.put("cat", Geometry(width, 1))
        assert (common.get("cat"), common.get("dog")) == ((Geometry(width, 1), False), (OTHER, False))
    common.forget_unproven("cat")
    assert common.get("cat") is None


def test_a_name_that_two_processes_put_at_once_is_forgotten_whole() -> None:
    page = one_bucket()
    common = CommonGeometries(page, PLACES_PER_BUCKET)
    common.put("cat", SIZE)
    page[:] = page[:PLACE_BYTES] * PLACES_PER_BUCKET
    assert common.get("cat") == (SIZE, False)
    common.forget_unproven("cat")
    assert common.get("cat") is None
    assert not any(page)


def test_a_proven_name_is_not_forgotten() -> None:
    page = one_bucket()
    common = CommonGeometries(page, PLACES_PER_BUCKET)
    common.put("cat", SIZE, is_proven=True)
    common.put("dog", OTHER)
    for name in ("cat", "dog"):
        common.forget_unproven(name)
    assert (common.get("cat"), common.get("dog")) == ((SIZE, True), None)


@pytest.mark.parametrize("position", range(PLACE_BYTES))
def test_a_partial_write_is_not_read(position: int) -> None:
    page = one_bucket()
    common = CommonGeometries(page, PLACES_PER_BUCKET)
    common.put("cat", SIZE)
    page[position] ^= 1
    assert common.get("cat") is None
    common.put("cat", OTHER)
    assert common.get("cat") == (OTHER, False)


def test_without_room_each_frontend_keeps_only_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert CommonGeometries.open(tmp_path / "file") is None
    assert "only the frontend" in caplog.text


def test_a_run_directory_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    assert CommonGeometries.open(tmp_path / "removed") is None
    assert not (tmp_path / "removed").exists()


def test_known_media_asks_what_others_know_and_tells_what_it_learns(tmp_path: Path) -> None:
    one, two = (KnownMedia(common=opened(tmp_path)) for _ in range(2))
    assert one.remember_geometry("cat", SIZE) is SIZE
    assert two.geometry_of("cat") == SIZE
    assert two.remember_geometry("cat", OTHER) == SIZE
    one.forget_geometry("cat")
    assert KnownMedia(common=opened(tmp_path)).geometry_of("cat") is None

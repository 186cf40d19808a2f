"""Parsing the folder and size of a disk cache."""

from pathlib import Path
from typing import Literal

import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.tiers.disk_place import DEFAULT_DISK_BYTES, DiskPlace, parse_disk_place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/x", DiskPlace(Path("/x"), DEFAULT_DISK_BYTES)),
        ("/x:64G", DiskPlace(Path("/x"), 64 * 2**30)),
        ("/x:1.5GiB", DiskPlace(Path("/x"), 3 * 2**29)),
        ("/x:y:500", DiskPlace(Path("/x:y"), 500)),
    ],
)
def test_a_path_and_size_are_parsed(text: str, place: DiskPlace) -> None:
    assert parse_disk_place(text) == place


def test_the_path_may_be_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert parse_disk_place(True) == DiskPlace(Path("/cache/keepsight/embeddings"), DEFAULT_DISK_BYTES)
    assert parse_disk_place(":2T") == DiskPlace(Path("/cache/keepsight/embeddings"), 2**41)


@pytest.mark.parametrize("text", ["/x:", "/x:much", "/x:0", "/x:-1G", "/x:1P", f"/x:{'9' * 400}T"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="encoder-disk-cache"):
        parse_disk_place(text)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="encoder-disk-cache: must not be empty"):
        parse_disk_place("")


@pytest.mark.parametrize("size", ["", ":1G"])
def test_a_model_s_folder_is_refused(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(InvalidArgumentError, match=r"encoder-disk-cache: .* looks like a model"):
        parse_disk_place(f"{tmp_path}{size}")


@pytest.mark.parametrize("text", [True, ":1G", "~/x", "~nobody.of.this.name/x"])
def test_without_a_home_a_folder_must_be_given(text: str | Literal[True], without_home: None) -> None:
    with pytest.raises(InvalidArgumentError, match=r"encoder-disk-cache: .* give a full path"):
        parse_disk_place(text)
    assert parse_disk_place("/x:1G") == DiskPlace(Path("/x"), 2**30)


def test_a_default_folder_that_cannot_be_found_is_not_called_by_an_empty_name(without_home: None) -> None:
    with pytest.raises(InvalidArgumentError, match="the default folder needs a home, or XDG_CACHE_HOME, give a full"):
        parse_disk_place(True)

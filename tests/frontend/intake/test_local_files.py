import io
import os
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import MediaFetchError, MediaRefusedError, MediaTooLargeError, PictureError
from keepsight.frontend.intake.local_files import LocalFiles
from keepsight.frontend.intake.media_limits import RequestBytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.png").write_bytes(b"picture")
    (folder / "inner" / "ä ?.png").write_bytes(b"inner")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "pictures2").mkdir()
    (tmp_path / "pictures2" / "secret").write_bytes(b"secret")
    return folder


class UnreadFile(io.FileIO):
    def read(self, size: int | None = -1) -> NoReturn:
        raise AssertionError(f"{size} bytes were read")


def read(folder: Path, url: str) -> bytes:
    return LocalFiles(folder, 100).read(url, "url", RequestBytes(10**6))


def test_files_below_the_folder_are_read(folder: Path) -> None:
    assert read(folder, f"file://{folder}/a.png") == b"picture"
    assert read(folder, f"file://localhost{folder}/inner/../a.png") == b"picture"
    assert read(folder, f"FILE:{folder}/a.png") == b"picture"
    assert read(folder, (folder / "inner" / "ä ?.png").as_uri()) == b"inner"
    (folder / "link.png").symlink_to(folder / "a.png")
    assert read(folder, f"file://{folder}/link.png") == b"picture"


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    for base in (folder, link):
        assert read(link, f"file://{base}/a.png") == b"picture"


@pytest.mark.parametrize("spelling", ["../link", "./../link", "{}/pictures2/../link", "/{}/link", "{}/./link/."])
def test_the_folder_may_be_given_with_dots_and_slashes(
    folder: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent / "pictures2")
    files = LocalFiles(spelling.format(folder.parent), 100)
    for base in (folder, folder.parent / "link", f"/{folder}"):
        assert files.read(f"file://{base}/a.png", "url", RequestBytes(100)) == b"picture"


@pytest.mark.parametrize(
    "path",
    ["../secret", "%2e%2e/secret", "inner/../../secret", "../pictures2/secret", "out", "out_dir/secret", "../none"],
)
def test_no_way_leads_out_of_the_folder_and_none_tells_what_is_there(folder: Path, path: str) -> None:
    (folder / "out").symlink_to(folder.parent / "secret")
    (folder / "out_dir").symlink_to(folder.parent)
    with pytest.raises(MediaRefusedError, match="is outside the folder") as caught:
        read(folder, f"file://{folder}/{path}")
    assert (caught.value.field, caught.value.status) == ("url", 400)


@pytest.mark.parametrize("path", ["x/../{}/a.png", "x/../../{}/a.png", "x/{}/a.png", "../{}/x/../a.png"])
def test_a_path_through_another_folder_is_answered_the_same_whatever_links_are_there(folder: Path, path: str) -> None:
    (elsewhere := folder.parent / "elsewhere" / "deep").mkdir(parents=True)
    url, answers = f"file://{folder.parent}/others/{path.format(folder.name)}", []
    (folder.parent / "others").mkdir()
    link = folder.parent / "others" / "x"
    for target in (None, folder.parent, folder.parent / "pictures2", elsewhere):
        link.unlink(missing_ok=True)
        if target is not None:
            link.symlink_to(target)
        try:
            answers.append(str(read(folder, url)))
        except PictureError as error:
            answers.append(f"{type(error)}: {error}")
    assert len(set(answers)) == 1


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    with pytest.raises(MediaRefusedError, match="allowed_local_media_path"):
        LocalFiles(None, 100).read(f"file://{folder}/a.png", "url", RequestBytes(100))


def test_only_regular_files_are_read_and_nobody_waits_for_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for name in ("pipe", "inner"):
        with pytest.raises(PictureError) as caught:
            read(folder, f"file://{folder}/{name}")
        assert type(caught.value) in (MediaRefusedError, MediaFetchError)
    with pytest.raises(MediaRefusedError, match="not a regular file"):
        read(Path("/dev"), "file:///dev/null")


def test_a_file_that_the_request_has_no_room_for_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, files, url = RequestBytes(10), LocalFiles(folder, 100), f"file://{folder}/a.png"
    budget.add(3, "first")
    assert files.read(url, "second", budget) == b"picture"
    budget.add(1, "second")
    monkeypatch.setattr(os, "fdopen", UnreadFile)
    with pytest.raises(MediaTooLargeError, match="more than the 10 bytes that all may have") as caught:
        files.read(url, "third", budget)
    assert caught.value.field == "third"


@pytest.mark.parametrize("num_bytes", [100, 101])
def test_the_limit_is_exact(folder: Path, num_bytes: int) -> None:
    (folder / "b").write_bytes(bytes(num_bytes))
    if num_bytes <= 100:
        assert read(folder, f"file://{folder}/b") == bytes(num_bytes)
    else:
        with pytest.raises(MediaTooLargeError, match="more than the 100 bytes"):
            read(folder, f"file://{folder}/b")


def test_a_file_that_takes_another_s_place_while_it_is_opened_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def exchange_then_open(path: Path, flags: int) -> int:
        """Replace a folder of the path by a link to another one between the check and the open."""
        (folder / "inner").rename(folder / "was_inner")
        (folder / "inner").symlink_to(folder.parent)
        return really_open(path, flags)

    (folder / "inner" / "secret").write_bytes(b"harmless")
    monkeypatch.setattr(os, "open", exchange_then_open)
    with pytest.raises(MediaRefusedError, match="replaced"):
        read(folder, f"file://{folder}/inner/secret")


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("file://other.host/a.png", MediaRefusedError, "must be file:///path"),
        ("file:a.png", MediaRefusedError, "must be file:///path"),
        ("file://{folder}/a.png?b", MediaRefusedError, "percent-encoded"),
        ("file://{folder}/none.png", MediaFetchError, "No such file"),
        ("file://{folder}/a%00b", MediaFetchError, "could not be read"),
        ("file://{folder}/%ff", MediaFetchError, "could not be read"),
        ("file://{folder}/" + "a" * 300, MediaFetchError, "could not be read"),
        ("file://[", MediaFetchError, "could not be read"),
    ],
)
def test_what_names_no_file_is_the_caller_s_mistake(
    folder: Path, url: str, error: type[PictureError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(folder, url.format(folder=folder))


@given(path=st.text(max_size=30))
def test_any_path_is_read_or_refused(path: str) -> None:
    with suppress(PictureError):
        LocalFiles(Path(__file__).parent, 10**6).read(f"file:{path}", "url", RequestBytes(10**6))

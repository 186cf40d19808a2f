"""Arguments of `/image`."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from keepsight.cli.attach_picture import attach
from keepsight.errors import KeepsightError
from tests.drawn import to_data_url


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.png", "my cat.png", "it's.png", "b.jpg", "c.webp"):
        Image.new("RGB", (8, 8), "red").save(name)
    return tmp_path


def urls(typed: str) -> list[Any]:
    parts = attach("/image", typed)
    assert all(part["type"] == "image_url" for part in parts)
    return [part["image_url"]["url"] for part in parts]


@pytest.mark.parametrize("typed", ["my cat.png", "'my cat.png'", '"my cat.png"', r"my\ cat.png", "~/my cat.png"])
def test_a_path_with_spaces_may_be_bare_quoted_or_escaped(typed: str) -> None:
    assert urls(typed) == [to_data_url(Path("my cat.png").read_bytes())]


def test_an_apostrophe_need_not_be_a_quote() -> None:
    assert urls("it's.png") == [to_data_url(Path("it's.png").read_bytes())]


def test_several_files_are_attached_in_order_with_their_types() -> None:
    assert urls("b.jpg c.webp 'my cat.png'") == [
        to_data_url(Path("b.jpg").read_bytes(), "image/jpeg"),
        to_data_url(Path("c.webp").read_bytes(), "image/webp"),
        to_data_url(Path("my cat.png").read_bytes()),
    ]


@pytest.mark.parametrize("url", ["http://x/y.png", "HTTPS://x/y?a=1&b=2", "data:image/png;base64,AAAA"])
def test_an_address_is_sent_unchanged(url: str) -> None:
    assert urls(url) == [url]


def test_a_pdf_is_sent_with_its_name_or_as_its_address() -> None:
    Path("a report.pdf").write_bytes(b"%PDF-")
    assert attach("/file", "'a report.pdf' https://a.example/b.pdf") == [
        {"type": "file", "file": {"file_data": to_data_url(b"%PDF-", "application/pdf"), "filename": "a report.pdf"}},
        {"type": "file", "file": {"file_url": "https://a.example/b.pdf"}},
    ]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "/image: needs a file or a web address"),
        ("missing.png", "/image: cannot read missing.png: No such file or directory"),
        ("it's missing", "/image: cannot read it's missing: No such file or directory"),
        (".", "/image: cannot read .: Is a directory"),
        ("x" * 5000, "/image: cannot read"),
        ("a\0b", "/image: cannot read"),
        ("~nobody_at_all/x.png", "/image: cannot read"),
        ("notes.txt", "notes.txt: 5 bytes that are none of JPEG, PNG"),
        ("empty.png", "empty.png: the picture has 0 bytes"),
        ("cut.png", "cut.png: the picture (20 bytes) is damaged or truncated"),
    ],
)
def test_a_missing_file_or_one_that_is_not_a_picture_is_reported(typed: str, message: str) -> None:
    Path("notes.txt").write_text("hello")
    Path("empty.png").touch()
    Path("cut.png").write_bytes(Path("a.png").read_bytes()[:20])
    with pytest.raises(KeepsightError) as caught:
        attach("/image", typed)
    assert str(caught.value).startswith(message)

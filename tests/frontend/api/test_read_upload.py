"""Uploads in all their forms, with `multipart/form-data` as several other programs write it."""

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.api.read_upload import (
    MAX_TTL_SECONDS,
    UploadOptions,
    read_options,
    read_ttl,
    read_upload,
)
from keepsight.frontend.http.read_form import MAX_HEAD_BYTES
from keepsight.frontend.intake.media_handles import DEFAULT_TTL_SECONDS

FORM = "multipart/form-data; boundary=limit"


def form(*parts: bytes, end: bytes = b"--limit--\r\n") -> bytes:
    return b"".join(b"--limit\r\n" + part + b"\r\n" for part in parts) + end


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content


@given(
    content=st.binary() | st.lists(st.sampled_from([b"\r\n", b"--", b"\r", b"\n", b"limit", b"-"])).map(b"".join),
    filename=st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_a_file_in_a_form_is_read_unchanged(content: bytes, filename: str) -> None:
    request = httpx.Request("POST", "http://test", files={"file": (filename, content)}, data={"ttl_seconds": "60"})
    upload = read_upload(request.headers["content-type"], request.read(), {})
    assert (upload.source, upload.field) == (content, "file")
    assert upload.options.ttl_seconds == 60


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (FORM, form(part("file", b"abc"))),
        (FORM, b"a preamble\r\n" + form(part("file", b"abc")) + b"an epilogue"),
        (FORM, form(b"X-Other: 1\r\ncontent-disposition:form-data;name=file\r\nContent-Type: image/png\r\n\r\nabc")),
        (FORM, form(part("file", b"abc", '; filename="a;name=b.png"'))),
        (FORM, form(part("file", b"abc", "; filename*=UTF-8''%e2%82%ac.png"))),
        (FORM, form(part("file", b"abc", f'; filename="{";" * MAX_HEAD_BYTES}"'))),
        (FORM, form(part("file", b"abc", '; filename="a\\"'))),
        ('Multipart/Form-Data; charset=utf-8; Boundary="limit"', form(part("file", b"abc"))),
    ],
)
def test_forms_written_by_other_programs_are_read(content_type: str, body: bytes) -> None:
    assert read_upload(content_type, body, {}).source == b"abc"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (form(part("file", b"abc"), end=b""), "body"),
        (form(*[part(f"n{n}", b"") for n in range(9)]), "body"),
        (form(b"abc"), "body"),
        (form(b"Content-Disposition: form-data\r\n\r\nabc"), "body"),
        (form(b"Content-Disposition: form-data; name*=UTF-8''file\r\n\r\nabc"), "body"),
        (form(b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n" + part("file", b"abc")), "body"),
        (form(part("file", b"abc"), part("file", b"abc")), "file"),
        (form(part("other", b"abc")), "file"),
        (form(part("file", b"abc"), part("warm", b"maybe")), "warm"),
        (form(part("file", b"abc"), part("purpose", b"vision")), "purpose"),
    ],
)
def test_an_invalid_form_is_refused_with_the_reason(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_upload(FORM, body, {})
    assert refused.value.field == field


@pytest.mark.parametrize(
    "parameters",
    ["", "boundary", "boundary=", "boundary*=UTF-8''limit", f"boundary*{'1' * 5000}=limit", 'a="' + ";" * 60_000],
)
def test_a_form_whose_boundary_cannot_be_read_is_refused(parameters: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_upload(f"multipart/form-data; {parameters}", form(part("file", b"abc")), {})
    assert refused.value.field == "Content-Type"


@pytest.mark.parametrize(
    ("query", "body", "expected"),
    [
        ({}, b"", UploadOptions(DEFAULT_TTL_SECONDS)),
        ({"ttl_seconds": "5", "warm": "1", "cache_salt": "5"}, b"", UploadOptions(5, True, "5")),
        ({"ttl_seconds": "5", "warm": "TRUE"}, b'{"ttl_seconds": 6}', UploadOptions(6, True)),
        ({}, b'{"ttl_seconds": null, "warm": null, "cache_salt": null}', UploadOptions(DEFAULT_TTL_SECONDS)),
    ],
)
def test_options_are_read_from_query_and_body_and_the_body_takes_precedence(
    query: dict[str, str], body: bytes, expected: Any
) -> None:
    assert read_options(body, query) == expected


@pytest.mark.parametrize("value", [0, -1, 5e-324, MAX_TTL_SECONDS + 1, float("nan"), float("inf"), True, "60", [60]])
def test_a_time_to_live_is_a_number_of_seconds_within_a_week(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="ttl_seconds"):
        read_ttl(value)


@pytest.mark.parametrize(
    ("content_type", "body", "sources"),
    [
        ("application/json", b'{"data":"YQ==","x":1}', "url, data, "),
        ("multipart/form-data; boundary=limit", form(part("file", b"abc"), part("x", b"1")), "file, "),
        ("image/png", b"abc", ""),
    ],
)
def test_an_unknown_field_s_error_names_all_that_such_a_body_may_have(
    content_type: str, body: bytes, sources: str
) -> None:
    query = {} if sources else {"x": "1"}
    with pytest.raises(UnsupportedFieldError, match=f"^x: is unknown; known: {sources}ttl_seconds, warm, cache_salt$"):
        read_upload(content_type, body, query)

"""Uploads through the files APIs of OpenAI's and Anthropic's clients."""

import base64
from collections.abc import Callable
from typing import Any

import pytest

from keepsight.frontend.api.read_upload import MAX_TTL_SECONDS
from tests.drawn import ask
from tests.frontend.api.app_client import MODEL, error_of
from tests.frontend.api.media_server import PICTURE, Server
from tests.frontend.sample_documents import Page, write_pdf
from tests.frontend.sample_pictures import encode, random_picture

DOCUMENT = write_pdf(Page(["A report"]), Page(["of two pages"]))
OF_ANTHROPIC = {"anthropic-version": "2023-06-01"}


def create(
    server: Server, content: bytes = DOCUMENT, name: str = "a.pdf", purpose: str = "user_data", **life: Any
) -> dict[str, Any]:
    form = {"purpose": purpose} | {f"expires_after[{field}]": value for field, value in life.items()}
    answer = server.send("POST", "/v1/files", files={"file": (name, content)}, data=form)
    assert answer.status_code == 200, answer.text
    file: dict[str, Any] = answer.json()
    return file


def test_a_file_is_described_as_by_openai_and_found_again(server: Server) -> None:
    file = create(server)
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(DOCUMENT),
        "created_at": file["created_at"],
        "expires_at": file["expires_at"],
        "filename": "a.pdf",
        "purpose": "user_data",
        "status": "processed",
    }
    assert file["expires_at"] - file["created_at"] == pytest.approx(MAX_TTL_SECONDS, abs=1)  # each is rounded
    assert server.get(f"/v1/files/{file['id']}") == file
    content = server.send("GET", f"/v1/files/{file['id']}/content")
    assert content.content == DOCUMENT
    assert content.headers["content-disposition"] == "attachment"
    assert server.send("DELETE", f"/v1/files/{file['id']}").json() == {
        "id": file["id"], "object": "file", "deleted": True,
    }  # fmt: skip
    assert error_of(server.send("GET", f"/v1/files/{file['id']}")) == (404, "id", "media_not_found")


def test_files_are_described_as_by_anthropic_to_its_clients(server: Server) -> None:
    sent: Any = {"files": {"file": ("a.pdf", DOCUMENT, "application/pdf")}, "headers": OF_ANTHROPIC}
    first = server.send("POST", "/v1/files?beta=true", **sent).json()
    second = server.send("POST", "/v1/files?beta=true", **sent).json()
    assert first == {
        "type": "file",
        "id": first["id"],
        "filename": "a.pdf",
        "mime_type": "application/pdf",
        "size_bytes": len(DOCUMENT),
        "created_at": first["created_at"],
        "expires_at": first["expires_at"],
        "downloadable": True,
    }
    assert first["created_at"].endswith("Z")

    def list_files(query: str) -> Any:
        return server.send("GET", f"/v1/files?{query}", headers=OF_ANTHROPIC).json()

    ends = {"first_id": second["id"], "last_id": first["id"]}
    assert list_files("") == {"data": [second, first], **ends, "has_more": False, "next_page": None}
    assert list_files(f"ids[]={first['id']}&ids[]=media_0")["data"] == [first]
    page = list_files("limit=1")
    assert (page["data"], page["has_more"]) == ([second], True)
    assert list_files(f"limit=1&page={page['next_page']}")["data"] == [first]
    assert list_files(f"after_id={second['id']}")["data"] == [first]
    assert list_files(f"before_id={first['id']}")["data"] == [second]
    both = f"before_id={first['id']}&after_id={first['id']}"
    assert list_files(both)["error"]["type"] == "invalid_request_error"
    gone = server.send("DELETE", f"/v1/files/{first['id']}", headers=OF_ANTHROPIC)
    assert gone.json() == {"type": "file_deleted", "id": first["id"]}


def test_a_list_can_be_filtered_by_purpose_and_paged(server: Server) -> None:
    files = [create(server, PICTURE, f"{number}.png", purpose="vision") for number in range(2)]
    files.append(create(server, purpose="user_data"))
    assert [each["id"] for each in server.get("/v1/files")["data"]] == [each["id"] for each in files[::-1]]
    seen = server.get("/v1/files", purpose="vision", limit=1, order="asc")
    assert (seen["data"], seen["has_more"]) == ([files[0]], True)
    assert (seen["first_id"], seen["last_id"]) == (files[0]["id"], files[0]["id"])
    rest = server.get("/v1/files", purpose="vision", order="asc", after=files[0]["id"])
    assert (rest["data"], rest["has_more"]) == ([files[1]], False)


@pytest.mark.parametrize(
    ("headers", "next_page"),
    [({}, lambda page: f"after={page['last_id']}"), (OF_ANTHROPIC, lambda page: f"page={page['next_page']}")],
)
def test_deleting_what_is_listed_page_by_page_deletes_everything(
    server: Server, headers: dict[str, str], next_page: Callable[[Any], str]
) -> None:
    files = [create(server, PICTURE)["id"] for _ in range(4)]
    deleted: list[str] = []
    query: str | None = ""
    while query is not None:
        page = server.send("GET", f"/v1/files?limit=2&{query}", headers=headers).json()
        for file in page["data"]:
            assert server.send("DELETE", f"/v1/files/{file['id']}", headers=headers).status_code == 200
            deleted.append(file["id"])
        query = next_page(page) if page["has_more"] else None
    assert deleted == files[::-1]


def test_an_upload_at_either_path_is_found_at_the_other(server: Server) -> None:
    file, media = create(server, PICTURE, "a.png"), server.upload()
    assert server.get(f"/v1/media/{file['id']}")["width"] == 224
    shown = server.get(f"/v1/files/{media['id']}")
    assert (shown["filename"], shown["purpose"]) == (media["id"], "user_data")
    picture = {"type": "input_image", "file_id": file["id"]}
    body = {"model": MODEL, "input": [{"role": "user", "content": [picture]}]}
    assert server.send("POST", "/v1/responses", json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("POST", "/v1/files/media_0", "DELETE, GET, HEAD"),
        ("DELETE", "/v1/media", "GET, HEAD, POST"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_an_unsupported_method_is_refused_with_the_supported_ones(
    server: Server, method: str, path: str, allowed: str
) -> None:
    answer = server.send(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_a_model_is_shown_a_pdf_s_own_name_unless_the_request_gives_another(server: Server) -> None:
    by_id = {"file_id": create(server, name="a.pdf")["id"]}
    sent = {"file_data": base64.b64encode(DOCUMENT).decode(), "filename": "a.pdf"}
    for file in (sent, by_id, by_id | {"filename": "b.pdf"}):
        assert server.chat({"type": "file", "file": file}).status_code == 200
    content = [{"type": "input_file", **by_id}]
    document = {"type": "document", "source": {"type": "file", **by_id}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": [{"role": "user", "content": content}]},
        "/v1/messages": {"max_tokens": 1, "messages": ask(document)},
    }
    for path, body in bodies.items():
        assert server.send("POST", path, json={"model": MODEL, **body}).status_code == 200
    inline, named, renamed, *others = (each.token_ids for each in server.engine.requests)
    assert named == inline != renamed
    assert others == [inline, inline]


def test_warming_a_pdf_warms_the_pages_that_are_shown(server: Server) -> None:
    file_id = create(server, name="a.pdf")["id"]
    assert server.send("POST", f"/v1/media/{file_id}/pin", json={"warm": True}).status_code == 200
    assert server.chat({"type": "file", "file": {"file_id": file_id}}).status_code == 200
    warmed, asked = (each.token_ids for each in server.engine.requests)
    assert warmed == asked


def test_a_file_lives_as_long_as_its_sender_says(server: Server) -> None:
    file = create(server, anchor="created_at", seconds="3600")
    assert file["expires_at"] - file["created_at"] == pytest.approx(3600, abs=1)


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\r\n", b"\x1b%-12345X@PJL\n"])
def test_a_pdf_may_begin_with_bytes_that_a_program_put_before_it(server: Server, before: bytes) -> None:
    file = {"file_id": create(server, before + DOCUMENT)["id"]}
    assert server.chat({"type": "file", "file": file}).status_code == 200


def test_a_picture_that_mentions_a_pdf_is_a_picture(server: Server) -> None:
    jpeg = encode(random_picture("RGB", (30, 20)), "JPEG")
    file = create(server, jpeg[:2] + b"\xff\xfe" + (9).to_bytes(2) + b"%PDF-1." + jpeg[2:], "a.jpg")
    assert server.get(f"/v1/media/{file['id']}")["width"] == 30


def test_a_text_file_is_refused_with_advice(server: Server) -> None:
    answer = server.send("POST", "/v1/files", files={"file": ("a.txt", b"A note.")})
    assert "look like text: send them as text" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Scan at 10.00\u202fAM.pdf", "Scan at 10.00 AM.pdf"),
        ("ü.pdf", "ü.pdf"),
        ('a "b".pdf', 'a "b".pdf'),
        ("C:\\Files\\a.pdf", "a.pdf"),
        # Persian, Hindi, a joined emoji, right-to-left Hebrew, and an emoji that is newer than some Pythons.
        *[(name, name) for name in ("می\u200cخواهم", "क्\u200dष", "👩\u200d💻", "\u200fא (1)\u200e", "\U0001fae9")],
    ],
)
def test_a_file_s_name_is_shown_in_one_line(server: Server, name: str, shown: str) -> None:
    assert create(server, name=name)["filename"] == shown


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"data": {"purpose": "user_data"}, "files": {"other": b"a"}}, (400, "file", "invalid_argument")),
        ({"data": {"purpose": "batch"}, "files": {"file": PICTURE}}, (400, "purpose", "unsupported_field")),
        ({"data": {"colour": "red"}, "files": {"file": PICTURE}}, (400, "colour", "unsupported_field")),
        ({"files": {"file": b"no picture"}}, (400, "file", "picture_unreadable")),
        ({"files": {"file": ("a" * 501, PICTURE)}}, (400, "file", "invalid_argument")),
        ({"files": {"file": ("a\x1b[1m.png", PICTURE)}}, (400, "file", "invalid_argument")),
        ({"content": PICTURE, "headers": {"content-type": "image/png"}}, (415, "Content-Type", "unsupported_body")),
        *[
            ({"data": {name: value}, "files": {"file": PICTURE}}, (400, name, code))
            for name, value, code in (
                ("expires_after[seconds]", "2592000", "invalid_argument"),
                ("expires_after[seconds]", "soon", "invalid_argument"),
                ("expires_after[seconds]", "9" * 5000, "invalid_argument"),
                ("expires_after[anchor]", "last_used_at", "unsupported_field"),
            )
        ],
    ],
)
def test_an_invalid_upload_is_refused_by_field_name(
    server: Server, sent: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    assert error_of(server.send("POST", "/v1/files", **sent)) == expected
    assert server.get("/v1/files")["data"] == []


def test_another_key_s_file_does_not_exist(shared: Server) -> None:
    sent: Any = {"files": {"file": PICTURE}, "headers": {"x-api-key": "ours", **OF_ANTHROPIC}}
    file = shared.send("POST", "/v1/files", **sent).json()
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = shared.send(method, f"/v1/files/{file['id']}{path}", "theirs")
        assert error_of(answer) == (404, "id", "media_not_found")
    assert shared.get("/v1/files", "theirs")["data"] == []
    assert shared.get("/v1/files", "ours")["data"][0]["id"] == file["id"]
    assert shared.send("GET", "/v1/files", headers={"x-api-key": "ours"}).status_code == 401

"""Lines become requests, or lines that say what is wrong; what is written has OpenAI's fields."""

import io
import json
from typing import Any

import pytest

from keepsight.batch.batch_lines import URLS, Request, answer_line, read_requests
from tests.batch.made_up_lines import URL, to_line

MAX_BYTES = 1000


def read(*lines: bytes) -> list[Request | bytes]:
    return list(read_requests(io.BytesIO(b"".join(lines)), MAX_BYTES))


def error_of(line: Request | bytes) -> dict[str, Any]:
    assert isinstance(line, bytes)
    written = json.loads(line)
    assert written.keys() == {"id", "custom_id", "response", "error"}
    assert written["response"] is None
    return {"custom_id": written["custom_id"], **written["error"]}


def test_a_line_is_a_request_whose_body_is_sent_as_it_stands() -> None:
    body = b'{"model":  "m", "messages": [], "seed": 12345678901234567890123}'
    line = b'{"body": %s, "url": "%s", "method": "POST", "custom_id": "a", "other": 1}' % (body, URL.encode())
    assert read(line) == [Request(1, "a", URL, body)]


@pytest.mark.parametrize("url", URLS)
def test_all_endpoints_that_give_whole_answers_may_be_asked(url: str) -> None:
    [request] = read(to_line(url=url))
    assert isinstance(request, Request)
    assert request.url == url


def test_empty_lines_are_left_out_but_counted_and_the_last_line_needs_no_end() -> None:
    requests = read(b"\n", to_line("a"), b" \r\n", to_line("b").rstrip())
    assert [each.number for each in requests if isinstance(each, Request)] == [2, 4]


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "message"),
    [
        (b"{nonsense\n", None, "invalid_json_line", "line 2: is not a JSON object: JSON is malformed"),
        (b"\xff\xfe\n", None, "invalid_json_line", "line 2: is not a JSON object: "),
        (b"[" * 900, None, "invalid_json_line", "line 2: is not a JSON object: "),
        (b"[1]\n", None, "invalid_json_line", "line 2: is not a JSON object: Expected `object`, got `array`"),
        (to_line(None), None, "invalid_request", "line 2: custom_id must be a text that is not empty"),
        (to_line(5), None, "invalid_request", "line 2: custom_id must be a text that is not empty"),
        (to_line("first"), "first", "duplicate_custom_id", "line 2: custom_id 'first' is that of an earlier line"),
        (to_line(method="GET"), "a", "invalid_method", "line 2: method must be 'POST', not 'GET'"),
        (to_line(url="/v1/images"), "a", "invalid_url", "line 2: url must be one of /v1/chat/completions, /v1/co"),
        (to_line(url=["/v1"]), "a", "invalid_url", "line 2: url must be one of "),
        (to_line(body="text"), "a", "invalid_request", "line 2: body must be a JSON object"),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/responses"}\n',
            "a",
            "invalid_request",
            "line 2: body must",
        ),
        (to_line(body={"stream": True}), "a", "invalid_request", "line 2: body.stream must not be true"),
        (to_line(body={"text": "x" * MAX_BYTES}), None, "line_too_long", "line 2: is longer than 1000 bytes"),
    ],
)
def test_a_bad_line_is_told_by_number_and_stops_no_other(
    line: bytes, custom_id: str | None, code: str, message: str
) -> None:
    first, bad, *rest = read(to_line("first"), line.rstrip() + b"\n", to_line("last"))
    error = error_of(bad)
    assert error["message"].startswith(message)
    assert error == {"custom_id": custom_id, "code": code, "message": error["message"], "line": 2}
    assert [each.custom_id for each in (first, *rest) if isinstance(each, Request)] == ["first", "last"]


def test_an_id_is_free_again_if_its_first_line_was_bad() -> None:
    bad, good = read(to_line(url="/v1/images"), to_line())
    assert error_of(bad)["custom_id"] == "a"
    assert isinstance(good, Request)


def test_an_answer_is_one_line_of_ascii_with_the_fields_of_openai() -> None:
    line = answer_line("ä\u2028", 200, "req-1", '{"text":\n "\u2028\x85é"}'.encode())
    assert line.isascii()
    assert line.splitlines(keepends=True) == [line]
    written = json.loads(line)
    assert written.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"text": "\u2028\x85é"}}
    assert written == {"custom_id": "ä\u2028", "response": response, "error": None}


def test_numbers_that_json_lacks_are_null() -> None:
    written = json.loads(answer_line("a", 200, None, b'{"logprobs": [-1.5, -Infinity, NaN]}'))
    assert written["response"]["body"] == {"logprobs": [-1.5, None, None]}


def test_a_page_in_place_of_an_answer_is_quoted() -> None:
    written = json.loads(answer_line("a", 502, None, b"<html>Bad gateway"))
    assert written["response"]["body"] == {"error": {"message": "<html>Bad gateway"}}

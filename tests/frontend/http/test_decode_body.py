import json
from collections.abc import Callable

import msgspec
import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.chat_request import parse_chat_request
from keepsight.frontend.api.completion_request import MAX_CHOICES, parse_completion_request
from keepsight.frontend.api.read_upload import read_upload
from keepsight.frontend.api.tokenize_request import parse_tokenize_request
from keepsight.frontend.http.decode_body import MAX_MARKS_IN_BODY, BodyDecoder, Buffer

SEPARATED = {b",": b"1,", b"[": b"[],", b"{": b"{},", b":": b'{"a":1},'}


def chat(value: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":[{"type":"text","text":"a","x":%s}]}]}' % value


@pytest.mark.parametrize("mark", MAX_MARKS_IN_BODY)
@pytest.mark.parametrize("parse", [parse_chat_request, parse_tokenize_request, parse_completion_request])
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(
    mark: bytes, parse: Callable[[Buffer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_MARKS_IN_BODY, mark, 1000)
    with pytest.raises(InvalidArgumentError, match=r"body: has more than 1000 of .*too many values"):
        parse(memoryview(chat(b"[" + SEPARATED[mark] * 1001 + b"1]")))


def test_an_upload_of_too_many_values_is_refused_too() -> None:
    with pytest.raises(InvalidArgumentError, match="too many values"):
        read_upload("application/json", b'{"url":[' + b"[]," * 2**18 + b"1]}", {})


@pytest.mark.parametrize("field", ["logit_bias", "metadata"])
def test_an_object_of_too_many_members_is_refused_before_it_is_decoded(field: str) -> None:
    members = b",".join(b'"%d":1' % number for number in range(2**20))
    with pytest.raises(InvalidArgumentError, match=r"body: has more than 1048576 of ':'.*too many values"):
        parse_chat_request(b'{"messages":[{"role":"user","content":"a"}],"%s":{%s}}' % (field.encode(), members))


def test_nested_lists_count_without_commas_between_them() -> None:
    deep = b"[" * 500 + b"]" * 500
    with pytest.raises(InvalidArgumentError, match="too many values"):
        parse_chat_request(chat(b"[" + b",".join([deep] * 600) + b"]"))


def test_the_maximum_number_of_values_is_decoded() -> None:
    class Numbers(msgspec.Struct):
        numbers: list[int]

    decoder = BodyDecoder(Numbers)
    assert len(decoder.decode(b'{"numbers":[' + b"1," * 2**20 + b"1]}").numbers) == 2**20 + 1


def test_a_batch_of_long_prompts_of_token_ids_passes() -> None:
    ids = [262_143] * 8000
    request = parse_completion_request(json.dumps({"prompt": [ids] * MAX_CHOICES, "max_tokens": 1}).encode())
    assert list(request.prompts.values()) == [ids] * MAX_CHOICES


def test_a_long_text_passes_whatever_characters_it_has() -> None:
    table = "1.5, -2.25, [3], {4}, 5:30:00\n" * 200_000
    body = json.dumps({"messages": [{"role": "user", "content": table}]}).encode()
    assert parse_chat_request(body).messages.messages


def test_an_invalid_utf_8_byte_is_reported_with_its_position() -> None:
    body = b'{"messages":[{"role":"user","content":"a \xff"}]}'
    with pytest.raises(InvalidArgumentError, match=f"body: is not UTF-8: .* in position {body.index(0xFF)}:"):
        parse_chat_request(body)


@pytest.mark.parametrize("text", [rb"\ud800", rb"\uDBFF", rb"\ud83d\ude00\ud83d"])
def test_half_of_a_surrogate_pair_is_not_called_truncation_even_near_the_end(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="body: cannot be read as JSON: half of a surrogate pair"):
        parse_chat_request(b'{"messages":[{"role":"user","content":"%s"}]}\n' % text)


@pytest.mark.parametrize("end", [rb"\ud83d\ude00", rb"\ud83d", rb'\ud83d\ude00"}'])
def test_a_truncated_body_is_called_truncated_whatever_surrogates_it_has(end: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="body: cannot be read as JSON: Input data was truncated"):
        parse_chat_request(b'{"messages":[{"role":"user","content":"%s' % end)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: .*; it may be 'function'"),
        (
            {"tools": [{"type": "function", "function": {"nam": "f"}}]},
            r"tools\[0\].function.nam: .*did you mean 'name'",
        ),
        ({"tool_choice": {"type": "any"}}, r"tool_choice.type: .*; it may be 'function' or 'allowed_tools'"),
    ],
)
def test_errors_in_lists_and_unions_say_what_is_expected(field: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_chat_request(json.dumps({"messages": [{"role": "user", "content": "a"}], **field}).encode())


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_byte_order_mark_before_a_body_is_ignored(kind: type[bytes]) -> None:
    mark, prompt = "\ufeff".encode(), '{"prompt":"\ufeffHi"}'.encode()
    assert parse_completion_request(kind(mark + prompt)).prompts == {"prompt": "\ufeffHi"}
    picture = b"data:image/png;base64," + b"A" * 2**16
    sent = chat(b"1").replace(b'"type":"text","text":"a","x":1', b'"type":"image_url","image_url":"%s"' % picture)
    [message] = parse_chat_request(kind(mark + sent)).messages.messages
    assert message["content"] == [{"type": "image", "image": ""}]
    assert read_upload("application/json", mark + b'{"url":"http://localhost/a.png"}', {}).field == "url"
    with pytest.raises(InvalidArgumentError, match="malformed"):
        parse_completion_request(kind(mark + mark + prompt))

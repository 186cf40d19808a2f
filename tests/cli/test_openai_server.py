"""The client side of OpenAI's protocol, against a scripted server."""

import socket
from collections.abc import Iterator

import pytest

from keepsight.cli.main import main
from keepsight.cli.openai_server import OpenAIServer, Piece, Usage, choose_api_key
from keepsight.errors import InvalidArgumentError, NoAnswerError
from tests.cli.scripted_server import DONE, FAILURES, STREAMS_OF_OTHERS, Script, answer, event, scripted_server


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted_server(Script()) as script:
        yield script


def pieces(script: Script) -> list[Piece]:
    return list(OpenAIServer(script.url).answer({"messages": []}))


def failure(script: Script) -> str:
    with pytest.raises(NoAnswerError) as caught:
        pieces(script)
    return str(caught.value)


def test_an_answer_comes_in_pieces_with_its_usage(script: Script) -> None:
    assert pieces(script) == ["Hello", "!", Usage(3, 20, 16)]
    assert script.bodies == [{"messages": [], "stream": True, "stream_options": {"include_usage": True}}]


def test_unicode_line_separators_do_not_end_an_event(script: Script) -> None:
    text = "a\u2028b\u0085c\x0bd\re"
    script.answers = [answer(text)]
    assert pieces(script)[0] == text


@pytest.mark.parametrize("events", STREAMS_OF_OTHERS)
def test_stream_formats_of_other_servers_are_read(script: Script, events: list[bytes]) -> None:
    script.answers = [events]
    assert "".join(piece for piece in pieces(script) if isinstance(piece, str)) == "Hi"


def test_the_first_model_is_named(script: Script) -> None:
    assert OpenAIServer(script.url + "/").first_model() == "first"


@pytest.mark.parametrize("models", [{"data": []}, {}, [], "hello"])
def test_a_server_without_models_is_reported(script: Script, models: object) -> None:
    script.models = models
    with pytest.raises(NoAnswerError, match=r"has no model.*--model"):
        OpenAIServer(script.url).first_model()


def test_a_given_key_is_sent_with_every_request(script: Script) -> None:
    OpenAIServer(script.url, "open sesame").first_model()
    OpenAIServer(script.url).first_model()
    assert script.authorizations == ["Bearer open sesame", None]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "temperature: must be at least 0"}}', "400: temperature: must be at least 0"),
        (404, b'{"error": "no such model"}', "404: no such model"),
        (404, b'{"object": "error", "message": "no such model"}', "404: no such model"),
        (502, b"<html>Bad gateway", "502: <html>Bad gateway"),
        (500, b"[" * 100_000, "500: [[["),
        (503, b"", "503: Service Unavailable"),
        (401, b'{"error": {"message": "wrong key"}}', "401: wrong key (--api-key, or OPENAI_API_KEY in"),
    ],
)
def test_a_refusal_is_reported_with_the_server_s_message(
    script: Script, status: int, body: bytes, message: str
) -> None:
    script.status, script.refusal = status, body
    assert failure(script).startswith(message)


def test_an_unknown_path_is_reported_with_the_url_that_was_asked(script: Script) -> None:
    script.status, script.refusal = 404, b'{"detail": "Not Found"}'
    advice = f"(asked {script.url}/chat/completions; a server's URL usually ends with /v1)"
    assert failure(script) == f'404: {{"detail": "Not Found"}} {advice}'
    script.refusal = b'{"error": {"message": "Not Found"}}'
    assert failure(script) == f"404: Not Found {advice}"
    script.refusal = b'{"error": {"message": "no such model"}}'
    assert failure(script) == "404: no such model"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event("Once"), b'data: {"error": {"message": "It broke."}}\n\n', DONE], "It broke."),
        ([event("Once")], "the connection ended before the answer did"),
        ([b"data: {nonsense\n\n"], "the server sent b'{nonsense', which is not JSON"),
        ([b"data: %b\n\n" % (b"[" * 100_000)], f"the server sent {b'[' * 80!r}, which is not JSON"),
        ([b"data: 5\n\n"], "the server sent b'5', which is not an event"),
        *(
            ([b"data: %b\n\n" % event], f"the server sent {event.decode()}, which is not part of an answer")
            for event in (
                b'{"choices": [{"delta": null}]}',
                b'{"choices": [{"delta": {"content": 5}}]}',
                b'{"choices": [1]}',
                b'{"usage": [1]}',
            )
        ),
    ],
)
def test_an_answer_that_breaks_off_is_a_failure(script: Script, events: list[bytes], message: str) -> None:
    script.answers = [events]
    assert failure(script) == message


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_in_any_form_is_reported_with_the_server_s_message(script: Script, failure: bytes) -> None:
    script.answers = [[event("a"), failure, DONE]]
    with pytest.raises(NoAnswerError, match=r"^It broke\.$"):
        list(OpenAIServer(script.url).answer({}))


def test_an_error_in_place_of_a_stream_is_reported_with_the_server_s_message(script: Script) -> None:
    script.headers, script.answers = {"Content-Type": "application/json"}, [[b'{"error": {"message": "It broke."}}']]
    assert failure(script) == "It broke."


def test_a_client_that_stops_reading_ends_the_answer_at_the_server(script: Script) -> None:
    script.is_endless, script.answers = True, [[event("Once")]]
    stream = OpenAIServer(script.url).answer({"messages": []})
    assert next(stream) == "Once"
    stream.close()
    assert script.client_left.wait(20)


def test_a_missing_server_is_unreachable() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but not listening
        with pytest.raises(NoAnswerError, match="nothing answers at") as caught:
            OpenAIServer(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1").first_model()
    assert caught.value.is_unreachable


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:many/v1", "http://[::1/v1"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--url"):
        OpenAIServer(url)


@pytest.mark.parametrize("command", [["chat"], ["bench", "serve", "--workload", "cold"]])
@pytest.mark.parametrize("key", ["sk-secret\nb", "sk-secret \u2603"])
def test_a_key_that_no_header_can_carry_is_refused_by_its_name_and_never_shown(
    command: list[str], key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--api-key", key]) == 2
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert main(command) == 2
    error_output = capsys.readouterr().err.splitlines()
    reason = "must be printable ASCII, or no header can carry it"
    assert error_output == [f"keepsight {command[0]}: {name}: {reason}" for name in ("--api-key", "OPENAI_API_KEY")]


def test_a_key_is_stripped_and_a_flag_takes_precedence_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " sk-secret\n")
    assert choose_api_key(None) == "sk-secret"
    assert choose_api_key("open sesame\r\n") == "open sesame"
    monkeypatch.setenv("OPENAI_API_KEY", "\n")
    assert choose_api_key(None) is None

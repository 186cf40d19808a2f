"""Measuring a scripted server."""

import asyncio
import os
import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from keepsight.bench import run_workloads
from keepsight.bench.address import Address
from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.measure import ONE_CLIENT, ClientLoad, Measurement, draw_gaps, find_words_per_picture, measure
from keepsight.bench.run_workloads import RunSettings, WorkloadRun, restart_by_command
from keepsight.bench.workloads import Conversation, Workload, WorkloadOptions, draw_workload, once
from keepsight.errors import InvalidArgumentError, NoAnswerError
from tests.cli.scripted_server import (
    DONE,
    FAILURES,
    STREAMS_OF_OTHERS,
    USAGE_EVENT,
    Script,
    answer,
    event,
    scripted_server,
)

OPTIONS = WorkloadOptions(seed=1, num_requests=4, num_warm_up=1, picture_size=(16, 16), num_turns=2)
OPENING = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted_server(Script()) as running:
        yield running


def server_of(script: Script) -> Server:
    return Server(Address.parse(script.url), "first", "a key", {"max_tokens": 3})


def run(script: Script, workload: Workload, load: ClientLoad = ONE_CLIENT) -> tuple[Measurement, list[Answer]]:
    answers: list[Answer] = []
    return asyncio.run(measure(server_of(script), workload, load, answers.append)), answers


def test_an_answer_has_the_times_of_its_tokens_and_what_the_server_counted(script: Script) -> None:
    script.answers = [[OPENING, *answer("Hel", "lo", "")]]
    result = asyncio.run(ask(server_of(script), [b'{"role":"user","content":"?"}']))
    assert result.error is None
    assert result.text == "Hello"
    assert len(result.token_times) == 3, "a token may have no text; the opening is none"
    assert sorted(result.token_times) == result.token_times
    assert result.token_times[-1] <= result.seconds
    assert (result.num_tokens, result.num_prompt_tokens, result.num_cached_tokens) == (3, 20, 16)
    [body] = script.bodies
    assert (body["model"], body["max_tokens"], body["stream"]) == ("first", 3, True)


@pytest.mark.parametrize(("key", "sent"), [("a key", "Bearer a key"), (None, None)])
def test_a_server_is_sent_the_key_if_there_is_one(script: Script, key: str | None, sent: str | None) -> None:
    result = asyncio.run(ask(replace(server_of(script), api_key=key), []))
    assert (result.error, script.authorizations) == (None, [sent])


@pytest.mark.parametrize(
    ("events", "num_tokens"),
    [
        ([*map(event, ("Hel", "l", "o")), END, USAGE_EVENT], 3),
        ([*map(event, ("Hel", "l", "o")), END], 3),
        ([*map(event, ("Hel", "lo")), END, USAGE_EVENT], 3),
        ([END], 1),
    ],
)
def test_a_separate_final_event_is_a_token_only_if_counted_or_if_no_other_is(
    script: Script, events: list[bytes], num_tokens: int
) -> None:
    script.answers = [[OPENING, *events, DONE]]
    result = asyncio.run(ask(server_of(script), []))
    assert (result.num_tokens, len(result.token_times)) == (num_tokens, num_tokens)


def test_the_end_is_no_token_if_events_carry_several(script: Script) -> None:
    usage = USAGE_EVENT.replace(b'"completion_tokens": 3', b'"completion_tokens": 4')
    script.answers = [[OPENING, event("Hello, "), event("you there"), END, usage, DONE]]
    result = asyncio.run(ask(server_of(script), []))
    assert (result.num_tokens, len(result.token_times)) == (4, 2)


def test_an_annotation_is_no_token(script: Script) -> None:
    annotation = b'data: {"choices": [{"index": 0, "content_filter_results": {}}]}\n\n'
    script.answers = [[annotation, event("Hello"), annotation, event(" you"), END, DONE]]
    result = asyncio.run(ask(server_of(script), []))
    assert (result.text, len(result.token_times)) == ("Hello you", 2)


def test_an_empty_finish_reason_does_not_complete_an_answer(script: Script) -> None:
    script.answers = [[b'data: {"choices": [{"delta": {"content": "w"}, "finish_reason": ""}]}\n\n'] * 3]
    assert asyncio.run(ask(server_of(script), [])).error == "the connection ended before the answer did"


def test_an_answer_with_a_finish_reason_is_complete_without_done(script: Script) -> None:
    script.answers = [[event("Hello"), END]]
    result = asyncio.run(ask(server_of(script), []))
    assert (result.error, result.text) == (None, "Hello")


def test_counts_that_are_null_count_as_not_reported(script: Script) -> None:
    usage = b'{"prompt_tokens": null, "completion_tokens": null, "prompt_tokens_details": {"cached_tokens": null}}'
    script.answers = [[OPENING, *map(event, ("Hel", "lo")), b'data: {"choices": [], "usage": %b}\n\n' % usage, DONE]]
    result = asyncio.run(ask(server_of(script), []))
    assert (result.error, result.num_tokens, result.num_prompt_tokens, result.num_cached_tokens) == (None, 2, 0, None)


@pytest.mark.parametrize("events", STREAMS_OF_OTHERS)
def test_stream_formats_of_other_servers_are_measured(script: Script, events: list[bytes]) -> None:
    script.answers = [events]
    result = asyncio.run(ask(server_of(script), []))
    assert (result.error, result.text, result.num_tokens, len(result.token_times)) == (None, "Hi", 1, 1)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_text_or_reasoning_is_a_token_even_in_an_event_with_the_role(script: Script, name: str) -> None:
    event = b'data: {"choices": [{"delta": {"role": "assistant", "%b": "t"}}]}\n\n' % name.encode()
    script.answers = [[OPENING, event, event, DONE]]
    assert len(asyncio.run(ask(server_of(script), [])).token_times) == 2


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([event("Hi"), b'data: {"error": {"message": "out of luck"}}\n\n', DONE], "out of luck"),
        ([b"data: nonsense\n\n", DONE], "Expecting value"),
        ([b"data: %b\n\n" % (b"[" * 100_000), DONE], "recursion"),
        ([OPENING, USAGE_EVENT, DONE], "has no token"),
        ([b"data: [1]\n\n", event("Hi"), DONE], "not in OpenAI's format"),
        ([b'data: {"choices": 5}\n\n', event("Hi"), DONE], "not in OpenAI's format"),
        ([b'data: {"choices": [{"delta": null}]}\n\n', event("Hi"), DONE], "not in OpenAI's format"),
        ([b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', event("Hi"), DONE], "not in OpenAI's format"),
        ([event("Hi"), b'data: {"choices": [], "usage": {"prompt_tokens": []}}\n\n', DONE], "[] is not a number"),
        ([event("Hi"), b'data: {"choices": [], "usage": {"completion_tokens": "3"}}\n\n', DONE], "'3' is not a number"),
        ([event("Hi"), b'data: {"choices": [], "usage": {"completion_tokens": 1.5}}\n\n', DONE], "1.5 is not a number"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(script: Script, pieces: list[bytes], message: str) -> None:
    script.answers = [pieces]
    result = asyncio.run(ask(server_of(script), []))
    assert result.error is not None
    assert message in result.error


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("end", [[DONE], [END, USAGE_EVENT, DONE], []])
def test_a_failure_is_an_error_with_the_server_s_message_whatever_comes_before_and_after(
    script: Script, failure: bytes, end: list[bytes]
) -> None:
    script.answers = [[OPENING, event("a"), event("b"), failure, *end]]
    assert asyncio.run(ask(server_of(script), [])).error == "It broke."


@pytest.mark.parametrize(
    ("headers", "piece"),
    [
        ({"Transfer-Encoding": "chunked"}, b"%x\r\n%b\r\n" % (len(event("Hi")), event("Hi"))),
        ({"Transfer-Encoding": "Chunked"}, b"fff\r\n" + event("Hi")),
        ({"Content-Length": "1000"}, event("Hi")),
        ({}, event("Hi")),
    ],
)
def test_a_lost_connection_has_the_same_error_with_any_transfer_encoding(
    script: Script, headers: dict[str, str], piece: bytes
) -> None:
    script.headers, script.answers = headers, [[piece]]
    result = asyncio.run(ask(server_of(script), []))
    assert result.error == "the connection ended before the answer did"


def test_a_server_that_does_not_stream_is_not_reported_as_a_lost_connection(script: Script) -> None:
    whole = b'{"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}'
    script.headers, script.answers = {"Content-Type": "application/json"}, [[whole]]
    assert asyncio.run(ask(server_of(script), [])).error == "the answer is not streamed, but application/json"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such adapter"}}', "no such adapter"),
        (b'{"object": "error",\n "message": "no such adapter"}', "no such adapter"),
        (b"[1]", "the answer is not streamed, but application/json"),
        (b"nonsense", "the answer is not streamed, but application/json"),
    ],
)
def test_an_error_in_place_of_a_stream_is_reported_with_the_server_s_message(
    script: Script, body: bytes, message: str
) -> None:
    script.headers, script.answers = {"Content-Type": "application/json"}, [[body]]
    assert asyncio.run(ask(server_of(script), [])).error == message
    script.headers = {}
    without_a_type = message if message == "no such adapter" else "the connection ended before the answer did"
    assert asyncio.run(ask(server_of(script), [])).error == without_a_type


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, b"busy", "503: busy"),
        (400, b'{"error": {"message": "too long"}}', "400: too long"),
        (401, b'{"error": {"message": "no key"}}', "401: no key (--api-key, or OPENAI_API_KEY in the environment)"),
        (404, b"", "404: Not Found (asked URL/chat/completions; a server's URL usually ends with /v1)"),
    ],
)
def test_a_refusal_is_an_error_with_the_server_s_message_and_advice(
    script: Script, status: int, body: bytes, message: str
) -> None:
    script.status, script.refusal = status, body
    assert asyncio.run(ask(server_of(script), [])).error == message.replace("URL/", f"{script.url}/")


def test_no_server_at_the_address_is_an_error() -> None:
    missing = Server(Address.parse("http://127.0.0.1:9/v1"), "first")
    assert asyncio.run(ask(missing, [])).error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a/v1", "http://", "http://a:port/v1"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--base-url"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://me:secret@a/v1", "must not contain credentials: no"),
        ("http://a/v1?key=secret", "must not contain a query: no"),
        ("http://a/v1#secret", "must not contain a fragment: no"),
    ],
)
def test_credentials_query_and_fragment_of_an_address_are_refused_unshown(url: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--base-url: {message}") as caught:
        Address.parse(url)
    assert "secret" not in str(caught.value)


def test_an_address_is_named_by_host_and_port() -> None:
    assert Address.parse("http://[::1]:8000/v1/").authority == "[::1]:8000"
    assert Address.parse("https://a.example/v1").authority == "a.example:443"
    assert Address.parse("http://[::1]:8000/v1/").url == "http://[::1]:8000/v1"


def test_warm_up_requests_are_sent_and_not_counted(script: Script) -> None:
    found, answers = run(script, draw_workload("cold", OPTIONS), ClientLoad(3))
    assert found.answers == answers
    assert (len(answers), len(script.bodies)) == (4, 5)


def test_new_clients_arrive_without_waiting_for_answers(script: Script) -> None:
    options = replace(OPTIONS, num_warm_up=0)
    script.together = threading.Barrier(options.num_requests)
    _, answers = run(script, draw_workload("cold", options), ClientLoad(new_per_second=100.0))
    assert [each.error for each in answers] == [None] * options.num_requests


def test_texts_beside_pictures_may_be_sent_at_a_rate(script: Script) -> None:
    # A rate that any machine can keep up with, and enough pictures for some texts to arrive meanwhile.
    workload = draw_workload("text-beside-pictures", replace(OPTIONS, num_requests=30))
    found, _ = run(script, workload, ClientLoad(new_per_second=100.0))
    assert found.answers
    num_pictures = OPTIONS.num_warm_up + 30
    assert len(script.bodies) == num_pictures + OPTIONS.num_warm_up + len(found.answers), "none is dropped"


def test_a_seed_draws_when_clients_come() -> None:
    gaps, same, others = (list(islice(draw_gaps(5.0, seed), 2000)) for seed in (1, 1, 2))
    assert gaps == same
    assert gaps != others
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)


def test_every_turn_sends_the_earlier_turns_with_the_server_s_answers(script: Script) -> None:
    _, answers = run(script, draw_workload("multi-turn", OPTIONS))
    assert len(answers) == 4
    roles = [[message["role"] for message in body["messages"]] for body in script.bodies]
    assert roles == [["user"], ["user", "assistant", "user"]] * 3
    assert script.messages[1]["content"] == "Hello!"


def test_texts_are_sent_as_long_as_pictures_are(script: Script) -> None:
    found, _ = run(script, draw_workload("text-beside-pictures", OPTIONS))
    pictures = [body for body in script.bodies if len(body["messages"][0]["content"]) == 2]
    assert len(pictures) == OPTIONS.num_warm_up + OPTIONS.num_requests
    num_before = 2 * OPTIONS.num_warm_up
    assert len(script.bodies) == num_before + OPTIONS.num_requests + len(found.answers), "none is dropped"


def test_a_failed_warm_up_ends_the_measurement(script: Script) -> None:
    script.status, script.refusal = 500, b"no"
    with pytest.raises(NoAnswerError, match=r"before or beside.*500: no"):
        run(script, draw_workload("cold", OPTIONS))


def counted_answer(num_tokens: int) -> list[bytes]:
    return [event("a"), USAGE_EVENT.replace(b'"prompt_tokens": 20', b'"prompt_tokens": %d' % num_tokens), DONE]


def test_words_per_picture_are_found_from_the_server_s_counts(script: Script) -> None:
    script.answers = [counted_answer(30), counted_answer(330), counted_answer(288)]
    assert asyncio.run(find_words_per_picture(server_of(script), OPTIONS)) == 172


def test_a_run_has_a_summary_of_each_workload_and_share_of_reuse(script: Script) -> None:
    async def restart() -> None:
        script.models = "restarted"

    settings = RunSettings(["cold", "zipf", "restart"], OPTIONS, reuse_percents=(0, 50), restart=restart)
    run = WorkloadRun(server_of(script), settings)
    asyncio.run(run.run())
    report = run.report
    assert list(report.summaries) == ["cold", "zipf-0", "zipf-50", "restart"]
    assert {summary.num_requests for summary in report.summaries.values()} == {4}
    assert report.summaries["cold"].cached_share == 0.8
    assert script.models == "restarted"
    assert report.facts["seed"] == 1
    assert "reuse_percent" not in report.facts, "the summary names contain it"


def test_a_workload_without_timed_requests_is_not_reported(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    words = b'{"type":"text","text":"?"}'
    too_late = Workload((), [Conversation(((words,),), pause_seconds=0.5)], beside=[once(words)])
    monkeypatch.setattr(run_workloads, "draw_workload", lambda *_: too_late)
    run = WorkloadRun(server_of(script), RunSettings(["text-beside-pictures"], OPTIONS))
    asyncio.run(run.run())
    assert "more --requests" in run.failures["text-beside-pictures"]
    assert not run.summaries


def test_a_restart_command_that_does_not_end_is_reported(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_workloads, "PATIENCE_SECONDS", 0.01)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def restart() -> None:
        restarting = asyncio.create_task(restart_by_command(f"read line < {pipe}", server_of(script)))
        async with asyncio.timeout(20):
            while "must leave the server in the background" not in caplog.text:
                await asyncio.sleep(0.01)
        pipe.write_text("end\n")
        await restarting

    asyncio.run(restart())
    assert len(script.bodies) == 1, "then the server is asked"


@pytest.mark.parametrize("load", [ONE_CLIENT, ClientLoad(new_per_second=0.03)])
def test_clients_due_after_the_last_answer_are_not_waited_for(script: Script, load: ClientLoad) -> None:
    words = b'{"type":"text","text":"?"}'
    too_late = Workload((), [Conversation(((words,),), pause_seconds=30)], beside=[once(words)])
    found, answers = run(script, too_late, load)
    assert not answers
    assert found.seconds < 15


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[event("a"), DONE]], "how many tokens"),
        ([counted_answer(20)], "does not count more tokens for a longer prompt"),
        (
            [counted_answer(30), counted_answer(330), [b'data: {"error": "text only"}\n\n', DONE], counted_answer(30)],
            "text only",
        ),
    ],
)
def test_text_lengths_are_guessed_if_a_picture_s_tokens_cannot_be_measured(
    script: Script, answers: list[list[bytes]], message: str
) -> None:
    script.answers = answers
    run = WorkloadRun(server_of(script), RunSettings(["text-only", "same-text-new-prompt"], OPTIONS))
    asyncio.run(run.run())
    assert run.words_per_picture_error is not None
    assert message in run.words_per_picture_error
    assert list(run.summaries) == ["text-only", "same-text-new-prompt"]
    assert [len(part["text"].split()) for part in script.messages[0]["content"]] == [256, 20]

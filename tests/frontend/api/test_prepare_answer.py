"""Where a request is prepared: on the event loop only if that is quick, else in a thread."""

import asyncio
import gc
import io
import json
import threading
import tracemalloc
import uuid
from contextlib import suppress
from typing import Any

import pytest
from PIL import ExifTags, Image
from starlette.requests import ClientDisconnect

from keepsight.api_settings import ApiSettings
from keepsight.config import Config
from keepsight.errors import KeepsightError
from keepsight.frontend.api.chat_request import ChatRequest, parse_chat_request
from keepsight.frontend.api.prepare_answer import (
    MAX_BYTES_ON_LOOP,
    MAX_PICTURES_ON_LOOP,
    MAX_URL_BYTES_ON_LOOP,
    AnswerPreparer,
    Client,
)
from keepsight.frontend.api.served_models import ServedModels
from keepsight.frontend.api.tool_fields import CallTerms
from keepsight.frontend.intake.media_intake import NOTHING_DOWNLOADED
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.call_text import CallForm
from keepsight.frontend.prompt.check_grammar import NUM_PROCESSES, GrammarChecker
from keepsight.frontend.prompt.read_messages import Conversation
from tests.drawn import ask, by_url, to_data_url, to_png
from tests.wait_until import wait_until

# Small enough to be prepared on the loop if it is known; larger ones never are.
PICTURE = by_url(Image.new("RGB", (8, 8)))
FILM = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
SOON = 20  # seconds; normally takes much less


@pytest.mark.parametrize(
    ("fields", "is_on_loop"),
    [
        ({"messages": ask("Hello")}, True),
        ({"messages": ask("Hello " * (MAX_BYTES_ON_LOOP // 5))}, False),
        ({"messages": ask(PICTURE, "What?")}, False),
        ({"messages": ask("Hello"), "guided_regex": "[ab]+"}, False),
    ],
)
def test_little_text_takes_no_thread(fields: dict[str, Any], is_on_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_in_turn([fields], monkeypatch) == [is_on_loop]


def make_answers(preparer: RequestPreparer) -> AnswerPreparer:
    return AnswerPreparer(preparer, ServedModels("demo", ApiSettings(), preparer))


def prepare_in_turn(requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[bool]:
    """Prepare the requests in turn; return for each whether that happened on the loop."""
    threads: list[threading.Thread] = []
    preparer = RequestPreparer.from_config(Config(**options))
    prepare_chat = preparer.prepare_chat

    def note_thread(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare_chat(*args)

    monkeypatch.setattr(preparer, "prepare_chat", note_thread)
    answers = make_answers(preparer)
    for fields in requests:
        body = json.dumps(fields).encode()
        with suppress(KeepsightError):
            asyncio.run(answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body)))
    return [thread is threading.current_thread() for thread in threads]


def test_a_small_known_picture_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"messages": ask(by_url(Image.new("RGB", (9, 8))), "What?")}
    requests = [{"messages": ask(PICTURE, question)} for question in ("What?", "Which colour?")]
    assert prepare_in_turn([*requests, other, *requests, other], monkeypatch) == [False, True, False, True, True, True]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ask(*[PICTURE] * (MAX_PICTURES_ON_LOOP + 1), "What?")},
        {"messages": ask(PICTURE, by_url(Image.new("RGB", (9, 8))), "What?")},
        {"messages": ask(PICTURE, "What? " * (MAX_BYTES_ON_LOOP // 5))},
        {"messages": ask(PICTURE, "What?"), "guided_regex": "[ab]+"},
        {"messages": ask(PICTURE | {"uuid": "its"}, "What?")},
    ],
)
def test_a_known_picture_takes_a_thread_if_the_rest_does(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare_in_turn([{"messages": ask(PICTURE, "What?")}, fields], monkeypatch) == [False, False]


def test_a_large_picture_takes_a_thread_even_if_known(monkeypatch: pytest.MonkeyPatch) -> None:
    content = to_png(Image.effect_noise((8, 8), 64)) + bytes(MAX_URL_BYTES_ON_LOOP)
    large = {"messages": ask({"type": "image_url", "image_url": {"url": to_data_url(content)}}, "What?")}
    assert prepare_in_turn([large, large], monkeypatch) == [False, False]


def test_a_film_takes_a_thread_even_if_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestPreparer, "recognize", lambda _self, conversation, _salt: conversation)
    assert prepare_in_turn([{"messages": ask(each, "What?")} for each in (PICTURE, FILM)], monkeypatch) == [True, False]


@pytest.mark.parametrize("are_counted", [False, True])
def test_films_that_wait_for_a_worker_leave_threads_for_others(
    are_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer, looked_at = RequestPreparer.from_config(Config()), threading.Event()
    prepare_chat = preparer.prepare_chat

    def wait_for_films(conversation: Conversation, *args: Any) -> Any:
        assert "video" not in conversation.kinds or looked_at.wait(SOON)
        return prepare_chat(conversation, *args)

    monkeypatch.setattr(preparer, "prepare_chat", wait_for_films)
    answers = make_answers(preparer)

    async def prepare(*content: Any) -> Any:
        body = json.dumps({"messages": ask(*content)}).encode()
        asked = parse_chat_request(body)
        if are_counted and FILM in content:
            return await answers.count_input(asked, None, NOTHING_DOWNLOADED)
        return await answers.chat(asked, None, NOTHING_DOWNLOADED, len(body))

    async def prepare_all() -> None:
        films = [asyncio.create_task(prepare(FILM, "What?")) for _ in range(50)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(prepare(PICTURE, "What?"), SOON / 2)
        finally:
            looked_at.set()
            await asyncio.gather(*films, return_exceptions=True)

    asyncio.run(prepare_all())


def test_grammars_that_take_long_to_try_delay_neither_known_forms_nor_media_nor_other_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparer, may_end = RequestPreparer.from_config(Config()), threading.Event()
    num_tries, tried = threading.Semaphore(0), list[str]()

    def try_slowly(grammar: str) -> str:
        tried.append(grammar)
        num_tries.release()
        assert "slow" not in grammar or may_end.wait(SOON)
        return ""

    monkeypatch.setattr("keepsight.frontend.prompt.check_grammar._CHECKER", GrammarChecker())
    monkeypatch.setattr("keepsight.frontend.prompt.check_grammar._try_to_compile", try_slowly)
    answers = make_answers(preparer)

    async def prepare(tenant: str, *content: Any, **fields: Any) -> Any:
        body = json.dumps({"messages": ask(*content), **fields}).encode()
        return await answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body), Client(tenant))

    async def prepare_all() -> None:
        await prepare("b", "What?", guided_regex="known")
        slow = [asyncio.create_task(prepare("a", "What?", guided_regex=f"slow{number}")) for number in range(70)]
        try:
            for _ in range(3):
                assert await asyncio.to_thread(num_tries.acquire, timeout=SOON / 2)
            known = asyncio.create_task(prepare("b", "What?", guided_regex="known"))
            film = asyncio.create_task(prepare("b", FILM, "What?"))
            new = asyncio.create_task(prepare("b", "What?", guided_regex="new"))
            await asyncio.wait_for(asyncio.wait({known, film}), SOON / 2)
            assert known.exception() is None
            assert isinstance(film.exception(), KeepsightError), "it is no film"
            async with asyncio.timeout(SOON / 2):
                while "b" not in answers._tries._waiting:
                    await asyncio.sleep(0.005)
            assert not any(each.done() for each in (*slow, new))
        finally:
            may_end.set()
            await asyncio.gather(new, *slow)
        assert any("new" in each for each in tried[:6]), "its turn came before those of the tenant that asked for 70"

    asyncio.run(prepare_all())


def test_the_grammar_of_a_client_that_leaves_while_it_waits_for_a_turn_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preparer, may_end, tried = RequestPreparer.from_config(Config()), threading.Event(), list[str]()

    def try_slowly(grammar: str) -> str:
        tried.append(grammar)
        assert may_end.wait(SOON)
        return ""

    monkeypatch.setattr("keepsight.frontend.prompt.check_grammar._CHECKER", GrammarChecker())
    monkeypatch.setattr("keepsight.frontend.prompt.check_grammar._try_to_compile", try_slowly)
    answers = make_answers(preparer)

    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def prepare(name: str, client: Client) -> Any:
        body = json.dumps({"messages": ask("What?"), "guided_regex": name}).encode()
        return await answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body), client)

    async def prepare_all() -> None:
        slow = [asyncio.create_task(prepare(f"slow{number}", Client())) for number in range(NUM_PROCESSES)]
        try:
            await asyncio.to_thread(wait_until, lambda: len(tried) == NUM_PROCESSES)
            with pytest.raises(ClientDisconnect):
                await asyncio.wait_for(prepare("left", Client(receive=leave)), SOON / 2)
        finally:
            may_end.set()
            await asyncio.gather(*slow)
        await prepare("new", Client(receive=leave))
        assert not any("left" in each for each in tried)
        assert answers._tries._num_free == NUM_PROCESSES

    asyncio.run(prepare_all())


@pytest.mark.parametrize("url", ["data:image/png;base64,????", "data:image/png;base64", "data:,%"])
def test_an_invalid_picture_is_never_known(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"messages": ask({"type": "image_url", "image_url": {"url": url}}, "What?")}
    assert prepare_in_turn([broken, broken], monkeypatch) == [False, False]


def test_a_picture_whose_exif_names_it_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.ImageID] = str(uuid.UUID(int=1))
    Image.new("RGB", (8, 8)).save(file, "PNG", exif=exif)
    named = {"type": "image_url", "image_url": {"url": to_data_url(file.getvalue())}}
    unnamed, named_so = ({"messages": ask(each, "What?")} for each in (PICTURE, named))
    requests = [unnamed, unnamed, named_so, named_so]
    assert prepare_in_turn(requests, monkeypatch, trust_exif_image_id=True) == [False, True, False, False]


def test_the_schemas_of_tools_are_read_by_the_model_s_form_once_and_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    read_call_terms = ChatRequest.read_call_terms

    def note_thread(request: ChatRequest, *form: CallForm) -> CallTerms:
        if form:
            threads.append(threading.current_thread())
        return read_call_terms(request, *form)

    monkeypatch.setattr(ChatRequest, "read_call_terms", note_thread)
    body = json.dumps({"messages": ask("Hello"), "tools": [{"type": "function", "function": {"name": "look"}}]})
    answers = make_answers(RequestPreparer.from_config(Config()))
    for _ in range(2):
        threads.clear()  # once, that is, if the grammar is known
        asyncio.run(answers.chat(parse_chat_request(body.encode()), None, NOTHING_DOWNLOADED, len(body)))
    [thread] = threads
    assert thread is not threading.current_thread()


def test_a_grammar_is_checked_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        "keepsight.frontend.api.response_format.check_structured_outputs",
        lambda *_: threads.append(threading.current_thread()),
    )
    body = json.dumps({"messages": ask("Hello"), "guided_regex": "[ab]+"}).encode()
    answers = make_answers(RequestPreparer.from_config(Config()))
    asyncio.run(answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body)))
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("name", ["user", "safety_identifier", "metadata", "tools"])
def test_a_request_s_body_is_not_kept_while_it_is_answered(name: str) -> None:
    text = "long" * 2**21
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    value = {"metadata": {"a": text}, "tools": [tool]}.get(name, text)
    body = json.dumps({"messages": ask("Hello"), name: value, "tool_choice": "none"}).encode()
    answers = make_answers(RequestPreparer.from_config(Config()))
    tracemalloc.start()
    answer = asyncio.run(answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body)))
    assert answer.prompts
    gc.collect()
    # The thread that prepared it releases its arguments a little later.
    wait_until(lambda: tracemalloc.get_traced_memory()[0] < len(text) // 2)
    tracemalloc.stop()

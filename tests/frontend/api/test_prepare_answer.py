"""Where a request is prepared: on the event loop only if that is quickly done."""

import asyncio
import gc
import json
import threading
import tracemalloc
from typing import Any

import pytest
from PIL import Image

from keepsight.config import Config
from keepsight.frontend.api.chat_request import parse_chat_request
from keepsight.frontend.api.prepare_answer import MAX_BYTES_ON_LOOP, AnswerPreparer
from keepsight.frontend.intake.media_intake import NOTHING_DOWNLOADED
from keepsight.frontend.prepare_request import RequestPreparer
from tests.drawn import ask, by_url

# Smaller than what may be on the loop; others of its kind are files.
PICTURE = by_url(Image.new("RGB", (8, 8)))


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
    threads: list[threading.Thread] = []
    preparer = RequestPreparer.from_config(Config())
    prepare_chat = preparer.prepare_chat

    def note_thread(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare_chat(*args)

    monkeypatch.setattr(preparer, "prepare_chat", note_thread)
    body = json.dumps(fields).encode()
    answers = AnswerPreparer(preparer, "demo")
    asyncio.run(answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body)))
    assert [thread is threading.current_thread() for thread in threads] == [is_on_loop]


def test_a_grammar_is_tried_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        "keepsight.frontend.api.response_format.check_structured_outputs",
        lambda *_: threads.append(threading.current_thread()),
    )
    body = json.dumps({"messages": ask("Hello"), "guided_regex": "[ab]+"}).encode()
    answers = AnswerPreparer(RequestPreparer.from_config(Config()), "demo")
    asyncio.run(answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body)))
    assert threads
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("name", ["user", "safety_identifier", "metadata", "tools"])
def test_what_an_answer_does_not_need_is_not_kept_while_it_takes(name: str) -> None:
    text = "long" * 2**21
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    value = {"metadata": {"a": text}, "tools": [tool]}.get(name, text)
    body = json.dumps({"messages": ask("Hello"), name: value, "tool_choice": "none"}).encode()
    answers = AnswerPreparer(RequestPreparer.from_config(Config()), "demo")
    tracemalloc.start()
    answer = asyncio.run(answers.chat(parse_chat_request(body), None, NOTHING_DOWNLOADED, len(body)))
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.prompts
    assert num_bytes < len(text) // 2

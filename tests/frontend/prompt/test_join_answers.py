"""An answer that a client split into several messages is one again, as the model wrote it."""

import os
from typing import Any

import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.find_beginnings import find_beginnings
from keepsight.frontend.prompt.join_answers import join_answers
from keepsight.frontend.prompt.read_messages import read_messages
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from tests.frontend.gemma_like import DEMO
from tests.qwen_template import CODER_LIKE, QWEN_LIKE, THINKING_QWEN_LIKE

USER = {"role": "user", "content": "Where?"}


def calls(*places: str) -> list[dict[str, Any]]:
    functions = [{"name": "look", "arguments": f'{{"at": "{place}"}}'} for place in places]
    return [{"id": each["arguments"], "type": "function", "function": each} for each in functions]


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None} | fields


RESULTS = [{"role": "tool", "tool_call_id": each["id"], "content": "the sea"} for each in calls("a", "b")]
WHOLE = answer(reasoning="Hm.", content="I look.", tool_calls=calls("a", "b"))
THOUGHT, TEXT = answer(reasoning="Hm."), answer(content="I look.")


@pytest.mark.parametrize(
    ("split", "whole"),
    [
        ([TEXT, answer(tool_calls=calls("a", "b"))], answer(content="I look.", tool_calls=calls("a", "b"))),
        ([answer(tool_calls=calls("a")), answer(tool_calls=calls("b"))], answer(tool_calls=calls("a", "b"))),
        ([THOUGHT, TEXT], answer(reasoning="Hm.", content="I look.")),
        # A thought that was not sent.
        ([answer(), TEXT], answer(content="I look.")),
        ([answer(content=[]), answer(tool_calls=calls("a"))], answer(tool_calls=calls("a"))),
        ([THOUGHT, answer(tool_calls=calls("a"))], answer(reasoning="Hm.", tool_calls=calls("a"))),
        ([THOUGHT, TEXT, answer(tool_calls=calls("a")), answer(content=[], tool_calls=calls("b"))], WHOLE),
        ([THOUGHT, answer(content=[{"type": "text", "text": "I look."}], tool_calls=calls("a", "b"))], WHOLE),
    ],
)
@pytest.mark.parametrize("source", [QWEN_LIKE, THINKING_QWEN_LIKE, CODER_LIKE, "demo"])
def test_a_split_answer_makes_the_prompt_of_the_whole_one(
    source: str, split: list[dict[str, Any]], whole: dict[str, Any]
) -> None:
    template = ChatTemplate.from_checkpoint(DEMO, {}) if source == "demo" else ChatTemplate(source, {})
    results = RESULTS[: len(whole.get("tool_calls", ()))]
    assert template.render([USER, *split, *results]) == template.render([USER, whole, *results])


@pytest.mark.parametrize(
    "messages",
    [
        [TEXT, TEXT],
        [TEXT, THOUGHT],
        [answer(tool_calls=calls("a")), TEXT],
        [answer(tool_calls=calls("a")), answer(reasoning="Hm.", tool_calls=calls("b"))],
        [answer(name="Ann", content="I look."), answer(name="Bob", tool_calls=calls("a"))],
        [USER, answer(tool_calls=calls("a")), RESULTS[0], answer(tool_calls=calls("b"))],
    ],
)
def test_what_one_answer_does_not_consist_of_stays_apart(messages: list[dict[str, Any]]) -> None:
    read = read_messages(messages).messages
    assert join_answers(read) == read


def test_the_messages_themselves_are_not_changed() -> None:
    read = read_messages([THOUGHT, TEXT, answer(tool_calls=calls("a")), answer(tool_calls=calls("b"))]).messages
    before = [dict(each) for each in read]
    assert len(join_answers(read)) == 1
    assert [len(each.get("tool_calls", ())) for each in read] == [0, 0, 1, 1]
    assert read == before


def test_a_breakpoint_before_a_split_answer_holds() -> None:
    part = {"type": "text", "text": "Where?", "prompt_cache_breakpoint": {"mode": "explicit"}}
    # This template refuses two turns of one role.
    template = ChatTemplate.from_checkpoint(DEMO, {})
    read = read_messages([{"role": "user", "content": [part]}, THOUGHT, TEXT, USER])
    [beginning] = find_beginnings(template, read, ())
    shared = os.path.commonprefix([beginning.text, template.render(read)])  # noqa: RUF071 - of texts
    assert "Where?" in shared
    assert "I look." not in shared


def test_what_is_wrong_behind_a_split_answer_is_named_as_it_was_sent() -> None:
    messages = [USER, TEXT, answer(tool_calls=calls("a")), {"role": "tool", "tool_call_id": "b", "content": "the sea"}]
    with pytest.raises(InvalidArgumentError) as caught:
        ChatTemplate.from_checkpoint(DEMO, {}).render(messages)
    assert caught.value.field == "messages[3].tool_call_id"

"""Rendering a template with its own text for tools, such as Qwen3-VL's, gives the text of transformers."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.errors import UnsupportedFieldError
from keepsight.frontend.prompt.find_beginnings import find_beginnings
from keepsight.frontend.prompt.read_messages import choose_end, read_messages
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from tests.byte_level_tokenizer import byte_level_checkpoint
from tests.qwen_template import CODER_LIKE, OLDER_QWEN_LIKE, QWEN3_5_LIKE, QWEN_LIKE, THINKING_QWEN_LIKE

NO_TOKENS: Mapping[str, str] = {}
SOURCES = (QWEN_LIKE, OLDER_QWEN_LIKE, THINKING_QWEN_LIKE, CODER_LIKE, QWEN3_5_LIKE)
TEMPLATES = {source: ChatTemplate(source, NO_TOKENS) for source in SOURCES}
# Those that want an object, although clients send a text.
WANTING_OBJECTS = (OLDER_QWEN_LIKE, CODER_LIKE, QWEN3_5_LIKE)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
PICTURE = {"type": "image", "url": "data:image/png;base64,AAAA"}

texts = st.text("ab<\n é", max_size=6)
contents = texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}) | st.just(PICTURE), min_size=1)
# JSON that stays the same when it is parsed and written again.
arguments = st.sampled_from(["{}", '{"at": "the séa", "times": [1, 2.5]}'])


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw a user's turn and an assistant's, which may contain a thought and calls."""
    thought = draw(st.sampled_from([{}, {"reasoning_content": "Hm.\n"}]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(contents)}]
    if calls := draw(st.lists(arguments, max_size=2)):
        functions = [{"name": "look", "arguments": each} for each in calls]
        listed = [{"id": f"c{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
        messages.append({"role": "assistant", "content": draw(texts), "tool_calls": listed} | thought)
        messages += [{"role": "tool", "content": draw(contents), "tool_call_id": each["id"]} for each in listed]
    return [*messages, {"role": "assistant", "content": draw(texts)} | thought]


systems = st.lists(contents.map(lambda content: {"role": "system", "content": content}), max_size=1)
conversations = st.tuples(systems, st.lists(turns(), min_size=1, max_size=2)).map(
    lambda drawn: [*drawn[0], *(message for turn in drawn[1] for message in turn)]
)


@pytest.fixture(scope="module")
def judge() -> Any:
    return transformers.AutoTokenizer.from_pretrained(byte_level_checkpoint())


def expect(judge: Any, source: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    shown = copy.deepcopy(messages)
    for call in (call for message in shown for call in message.get("tool_calls", ())):
        if source in WANTING_OBJECTS:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return judge.apply_chat_template(shown, chat_template=source, tokenize=False, **options)


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_text_is_that_of_transformers(judge: Any, source: str) -> None:
    @settings(max_examples=100)
    @given(
        conversations, st.booleans(), st.sampled_from([[], TOOLS]), st.sampled_from([{}, {"enable_thinking": False}])
    )
    def check(messages: list[dict[str, Any]], generate: bool, tools: Any, variables: dict[str, Any]) -> None:
        expected = expect(judge, source, messages, add_generation_prompt=generate, tools=tools or None, **variables)
        read = read_messages(messages, choose_end(generate, None), variables)
        assert TEMPLATES[source].render(read, tools=tools) == expected

    check()


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_last_message_is_gone_on_with_as_by_transformers(judge: Any, source: str) -> None:
    @settings(max_examples=50)
    @given(conversations, st.text("ab", min_size=1))
    def check(messages: list[dict[str, Any]], last: str) -> None:
        messages = [*messages[:-1], {"role": "assistant", "content": last}]
        expected = expect(judge, source, messages, continue_final_message=True, tools=TOOLS)
        assert TEMPLATES[source].render(read_messages(messages, "text"), tools=TOOLS) == expected

    check()


def test_variables_are_those_that_the_template_looks_at() -> None:
    read = read_messages([{"role": "user", "content": "Hi"}], "answer", {"enable_thinking": False})
    assert TEMPLATES[QWEN_LIKE].render(read).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(UnsupportedFieldError, match="it uses enable_thinking"):
        TEMPLATES[QWEN_LIKE].render(read_messages([{"role": "user", "content": "Hi"}], "answer", {"add_vision": True}))


def test_earlier_thoughts_are_shown_as_far_as_the_template_has_a_place_for_them() -> None:
    asked, answered = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Red."}
    thinking = answered | {"reasoning_content": "Hm."}
    read = read_messages([asked, thinking])
    assert TEMPLATES[THINKING_QWEN_LIKE].render(read).count("Hm.") == 1
    for source, messages in ((THINKING_QWEN_LIKE, [asked, thinking, asked]), (QWEN_LIKE, [asked, thinking])):
        without = [{**each, "reasoning_content": ""} if each is thinking else each for each in messages]
        assert TEMPLATES[source].render(messages) == TEMPLATES[source].render(without)


@pytest.mark.parametrize("role", ["system", "user"])
def test_up_to_a_breakpoint_a_prompt_begins_as_it_did(role: str) -> None:
    marked = {"type": "text", "text": "Look.", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    behind = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}]
    conversation = read_messages([{"role": role, "content": [marked]}, *behind])
    whole = TEMPLATES[QWEN_LIKE].render(conversation, tools=TOOLS)
    [beginning] = find_beginnings(TEMPLATES[QWEN_LIKE], conversation, TOOLS)
    same = next(at for at, (one, other) in enumerate(zip(whole, beginning.text, strict=False)) if one != other)
    assert "Look." in whole[:same]
    assert whole[:same].endswith("<|im_end|>\n<|im_start|>user\n<|")


def test_a_thought_lies_behind_the_breakpoint_of_the_question_before_it() -> None:
    marked = {"type": "text", "text": "Look.", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    answer = {"role": "assistant", "content": "Red.", "reasoning_content": "Hm."}
    template = TEMPLATES[THINKING_QWEN_LIKE]
    conversation = read_messages([{"role": "user", "content": [marked]}, answer], "message")
    [beginning] = find_beginnings(template, conversation, TOOLS)
    assert "Hm." in template.render(conversation)
    assert "Hm." not in beginning.text

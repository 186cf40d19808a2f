"""Tools, their calls and results, written as ordinary turns."""

from typing import Any

import pytest

from keepsight.config import Config
from keepsight.errors import InvalidArgumentError, PictureError
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.write_tools_as_text import write_results_as_text, write_tools_as_text
from keepsight.sampling_params import SamplingParams
from tests.drawn import draw

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "strict": True, "parameters": {"type": "object"}},
}
SHOT = {"type": "image_url", "image_url": {"url": draw(5).data_url}}


@pytest.fixture(scope="module")
def preparer() -> RequestPreparer:
    return RequestPreparer.from_config(Config())


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(*names: str, content: Any = None, arguments: str = '{"at":  [1,2]}') -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name in names]
    calls = [{"id": f"call_{each['name']}", "type": "function", "function": each} for each in functions]
    return say("assistant", content, tool_calls=calls)


def result(name: str, content: Any) -> dict[str, Any]:
    return say("tool", content, tool_call_id=f"call_{name}")


def render(preparer: RequestPreparer, *messages: Any, **options: Any) -> str:
    return preparer.template.render(list(messages), **options)


def turns(preparer: RequestPreparer, *messages: Any, **options: Any) -> list[str]:
    written = render(preparer, *messages, **options).split("<start_of_turn>")[1:-1]
    return [turn.removesuffix("<end_of_turn>\n") for turn in written]


def test_tools_are_told_once_and_always_in_the_same_words(preparer: RequestPreparer) -> None:
    [turn] = turns(preparer, say("user", "Hello"), tools=[TOOL])
    assert turn == (
        "user\n"
        "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of"
        '\n{"name": function name, "parameters": dictionary of argument name and its value}\n\n'
        "You SHOULD NOT include any other text in the response if you call a function. "
        "Each call is in a line of its own.\n"
        '[{"name": "look", "description": "Looks.", "parameters": {"type": "object"}}]\n\nHello'
    )


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", ["Be kind.", [{"type": "text", "text": "Be kind."}]])
def test_tools_are_told_behind_what_the_system_says(preparer: RequestPreparer, role: str, content: Any) -> None:
    [turn] = turns(preparer, say(role, content), say("user", "Hello"), tools=[TOOL])
    assert turn.startswith("user\nBe kind.\n\nYou have access to functions.")
    assert turn.endswith("]\n\nHello")


def test_a_call_is_written_as_the_model_wrote_it(preparer: RequestPreparer) -> None:
    asked = turns(preparer, say("user", "Go"), call("look", "touch"), result("look", "sea"))
    assert (
        asked[1]
        == 'model\n{"name": "look", "parameters": {"at":  [1,2]}}\n{"name": "touch", "parameters": {"at":  [1,2]}}'
    )


@pytest.mark.parametrize(
    ("arguments", "written"), [('{"at": "the s', '{"at": "the s'), ("[1]", "[1]"), ("", "{}"), (" ", "{}")]
)
def test_what_a_call_was_cut_off_with_is_told_as_far_as_it_came(
    preparer: RequestPreparer, arguments: str, written: str
) -> None:
    asked = turns(preparer, say("user", "Go"), call("look", arguments=arguments), result("look", "That was no JSON."))
    assert asked[1:] == [
        f'model\n{{"name": "look", "parameters": {written}}}',
        "user\nResult of look:\nThat was no JSON.",
    ]


@pytest.mark.parametrize("content", ["I see.", [{"type": "text", "text": "I see."}]])
def test_what_was_said_with_a_call_stands_before_it(preparer: RequestPreparer, content: Any) -> None:
    asked = turns(preparer, say("user", "Go"), call("look", content=content, arguments="{}"), result("look", "sea"))
    assert asked[1] == 'model\nI see.\n{"name": "look", "parameters": {}}'


def test_a_result_is_a_users_turn_that_names_the_function(preparer: RequestPreparer) -> None:
    asked = turns(preparer, say("user", "Go"), call("look"), result("look", "blue"))
    assert asked[2] == "user\nResult of look:\nblue"


def test_several_results_and_what_the_user_says_behind_them_are_one_turn(preparer: RequestPreparer) -> None:
    results = result("touch", [{"type": "text", "text": "wet"}]), result("look", "blue")
    asked = turns(preparer, say("user", "Go"), call("look", "touch"), *results, say("user", "And now?"))
    assert asked[2] == "user\nResult of touch:\nwet\n\nResult of look:\nblue\n\nAnd now?"


def test_turns_without_results_are_left_as_they_are() -> None:
    messages = [say("user", "a"), say("user", "b"), say("assistant", "c")]
    assert write_results_as_text(messages) == messages


def test_a_result_may_be_a_picture(preparer: RequestPreparer) -> None:
    shown = [{"type": "text", "text": "The screen:"}, SHOT]
    messages = say("user", "Go"), call("look"), result("look", shown), say("user", "What is it?")
    assert turns(preparer, *messages)[2] == "user\nResult of look:\nThe screen:<start_of_image>What is it?"
    request = preparer.prepare_chat(list(messages), SamplingParams()).engine_request
    assert len(request.media) == 1


def test_a_fault_in_a_results_picture_is_told_where_it_was_sent(preparer: RequestPreparer) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [say("user", "Go"), call("look"), result("look", [broken])]
    with pytest.raises(PictureError) as caught:
        preparer.prepare_chat(messages, SamplingParams())
    assert caught.value.field == "messages[2].content[0].image_url.url"


@pytest.mark.parametrize("call_id", ["call_touch", None])
def test_a_result_of_no_call_is_refused(preparer: RequestPreparer, call_id: str | None) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        render(preparer, say("user", "Go"), call("look"), say("tool", "blue", tool_call_id=call_id))
    assert caught.value.field == "messages[2].tool_call_id"


def test_a_call_is_known_by_the_last_that_had_its_id(preparer: RequestPreparer) -> None:
    again = say("assistant", None, tool_calls=[{"id": "call_look", "function": {"name": "go", "arguments": "{}"}}])
    asked = turns(preparer, say("user", "Go"), call("look"), result("look", "a"), again, result("look", "b"))
    assert asked[2].startswith("user\nResult of look")
    assert asked[4].startswith("user\nResult of go")


@pytest.mark.parametrize("tool", ["look", {}, {"function": "look"}, {"function": {"name": 1}}])
def test_an_invalid_tool_is_refused(tool: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        write_tools_as_text([], [TOOL, tool])
    assert caught.value.field == "tools[1]"
    with pytest.raises(InvalidArgumentError, match="tools: cannot be written as JSON"):
        write_tools_as_text([], [{"function": {"name": "look", "parameters": {"a": object()}}}])


def test_results_of_one_functions_several_calls_may_come_in_any_order(preparer: RequestPreparer) -> None:
    calls = call("look", "go", "look")
    for number, each in enumerate(calls["tool_calls"]):
        each["id"] = f"c{number}"
    results = [say("tool", text, tool_call_id=f"c{number}") for number, text in ((2, "blue"), (0, "red"), (1, "gone"))]
    turn = turns(preparer, say("user", "Look"), calls, *results)[-1]
    assert turn == "user\nResult of look (call 3):\nblue\n\nResult of look (call 1):\nred\n\nResult of go:\ngone"

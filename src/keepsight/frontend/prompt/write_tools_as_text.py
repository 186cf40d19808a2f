"""Writes tools as ordinary text of ordinary turns, for models whose chat template has no place for them.

An earlier call is written as the model wrote it, so that the answer is found in the KV prefix cache. Results are the
user's text, as templates such as Gemma 3's allow no other role between two answers.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.call_text import BARE, CallForm, write_call
from keepsight.frontend.prompt.message_contents import join_all
from keepsight.frontend.prompt.read_messages import SYSTEM_ROLES

Message = dict[str, Any]
_INTRODUCTION = """\
You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of
{"name": function name, "parameters": dictionary of argument name and its value}

You SHOULD NOT include any other text in the response if you call a function. Each call is in a line of its own."""
# The fields of a tool that are of use to a model.
_TOLD = ("name", "description", "parameters")


def write_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Add the tools to the end of the system message, or as one if there is none."""
    description = _describe(tools)
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        system, *others = messages
        return [{**system, "content": join_all((system["content"], description))}, *others]
    return [{"role": "system", "content": description}, *messages]


def write_calls_as_text(message: Message, form: CallForm = BARE) -> Message:
    """Write a message's calls as text after its content."""
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    functions = [call["function"] for call in message["tool_calls"]]
    written = form.between.join(write_call(each["name"], each["arguments"], form) for each in functions)
    return {**others, "content": join_all((message["content"], written), "\n")}


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a result without a call, whose name would be unknown."""
    ids = set[str]()
    for index, message in enumerate(messages):
        ids |= {call["id"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message.get("tool_call_id") not in ids:
            raise InvalidArgumentError(
                f"messages[{index}].tool_call_id", "must be the id of a call in an earlier message"
            )


def write_results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write checked results as the user's messages, merged with each other and the user's messages around them."""
    merged: list[list[Message]] = []  # those that become one
    names: dict[str, str] = {}
    holds_result = False
    for message in messages:
        names |= _name_calls(message.get("tool_calls", ()))
        is_result = message["role"] == "tool"
        if is_result:
            content = join_all((f"Result of {names[message['tool_call_id']]}:", message["content"]), "\n")
            message = {"role": "user", "content": content}
        follows_user = bool(merged) and merged[-1][-1]["role"] == message["role"] == "user"
        if follows_user and (is_result or holds_result):
            merged[-1].append(message)
        else:
            merged.append([message])
        holds_result = is_result or (follows_user and holds_result)
    return [_merge(each) for each in merged]


def _merge(messages: Sequence[Message]) -> Message:
    *before, last = messages
    return {**last, "content": join_all([message["content"] for message in messages])} if before else last


def _describe(tools: Sequence[Mapping[str, Any]]) -> str:
    shown = [_describe_one(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    try:
        return f"{_INTRODUCTION}\n{json.dumps(shown, ensure_ascii=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError("tools", f"cannot be written as JSON: {error}") from error


def _describe_one(tool: object, field: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(field, 'must be {"type": "function", "function": {"name", ...}}')
    return {name: function[name] for name in _TOLD if function.get(name) is not None}


def _name_calls(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return functions' names by call ids. Several calls of one function are numbered: their results may come in any
    order.
    """
    names = [call["function"]["name"] for call in calls]
    times = Counter(names)
    return {
        call["id"]: name if times[name] == 1 else f"{name} (call {number})"
        for number, (call, name) in enumerate(zip(calls, names, strict=True), start=1)
    }

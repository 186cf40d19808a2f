"""Run third-party clients, unchanged, against a real server:

    pip install -e ".[clients]" && python -m tests.other_clients

LangChain and LiteLLM with their OpenAI adapters, and the Agents SDK as it is: pictures, streams, several turns,
structured outputs, tools, errors. Prints each client's results and fails if one is not as expected.
"""

import asyncio
import functools
import json
import operator
import sys
from collections.abc import Callable
from typing import Any

from tests.drawn import draw
from tests.real_server import RealServer, real_server

MODEL, KEY = "keepsight-demo", "a key"
DRAWN = draw(5)
QUESTION = DRAWN.questions[0]
PICTURE = {"type": "image_url", "image_url": {"url": DRAWN.data_url}}
INSIDE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2]}},
    "required": ["count"],
    "additionalProperties": False,
}
# Otherwise the demo model would write as much white space as the grammar allows.
TOOL_SCHEMA = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": TOOL_SCHEMA}}
REFUSED = "was not found on the public internet"
TOO_LONG, TOO_LONG_MESSAGE = "red " * 3000, "this model's maximum context length is 2048 tokens"


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION.text}]}]


def report(what: str, value: object, *, is_right: bool) -> None:
    print(f"  {'ok   ' if is_right else 'WRONG'} {what}: {str(value)[:80]!r}")
    assert is_right, what


def expect(what: str, value: object) -> None:
    report(what, value, is_right=value == QUESTION.answer)


def expect_refusal(what: str, call: Callable[[], object], words: str, kind: str = "") -> None:
    try:
        answer = call()
    except Exception as error:
        report(what, error, is_right=words in str(error) and kind in type(error).__name__)
    else:
        report(what, answer, is_right=False)


def try_langchain(server: RealServer) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=200, max_retries=0
    )
    answer = chat.invoke(ask(PICTURE))
    expect("a picture", answer.content)
    block = {"type": "image", "base64": DRAWN.data_url.partition(",")[2], "mime_type": "image/png"}
    expect("a picture in LangChain's own form", chat.invoke(ask(block)).content)
    expect("a stream", "".join(piece.content for piece in chat.stream(ask(PICTURE))))
    expect("asynchronously", asyncio.run(chat.ainvoke(ask(PICTURE))).content)
    again = chat.invoke([*ask(PICTURE), answer, *ask()])
    report("a second turn that finds the first", again.usage_metadata, is_right=_num_found(again) > 0)
    form = chat.with_structured_output({"title": "form", **SCHEMA}, method="json_schema").invoke(ask(PICTURE))
    report("a schema", form, is_right=form["count"] in (1, 2))
    expect_refusal("a picture from the inside", lambda: chat.invoke(ask(INSIDE)), REFUSED)
    expect_refusal("a prompt that is too long", lambda: chat.invoke(TOO_LONG), TOO_LONG_MESSAGE, "ContextOverflow")
    form = chat.with_structured_output({"title": "form", **TOOL_SCHEMA}, method="function_calling").invoke(ask(PICTURE))
    report("a schema by a call", form, is_right=form["count"] in (1, 2))
    tools = chat.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    called = tools.invoke(ask(PICTURE))
    report("a call", called.tool_calls, is_right=called.tool_calls[0]["args"]["count"] in (1, 2))
    streamed = functools.reduce(operator.add, tools.stream(ask(PICTURE)))
    report("a stream of a call", streamed.tool_calls, is_right=_args(streamed) == _args(called))
    result = {"role": "tool", "tool_call_id": called.tool_calls[0]["id"], "content": [PICTURE]}
    answer_to_result = chat.bind_tools([TOOL]).invoke([*ask(PICTURE), called, result])
    report(
        "a result that is a picture",
        answer_to_result.content,
        is_right=_num_found(answer_to_result) > called.usage_metadata["input_tokens"],
    )


def try_langchain_s_responses(server: RealServer) -> None:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
    chat = ChatOpenAI(**options, temperature=0, use_responses_api=True)
    answer = chat.invoke(ask(PICTURE))
    expect("a picture", answer.text)
    expect("a stream", "".join(str(piece.text) for piece in chat.stream(ask(PICTURE))))
    again = chat.invoke([*ask(PICTURE), answer, *ask()])
    report("a second turn that finds the first", again.usage_metadata, is_right=_num_found(again) > 0)
    continuing = ChatOpenAI(**options, temperature=0, use_responses_api=True, use_previous_response_id=True)
    same = continuing.invoke([*ask(PICTURE), answer, *ask()])
    report("the same by the first one's id", same.text, is_right=same.text == again.text)
    called = chat.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False).invoke(ask(PICTURE))
    report("a call", called.tool_calls, is_right=called.tool_calls[0]["args"]["count"] in (1, 2))
    result = {"role": "tool", "tool_call_id": called.tool_calls[0]["id"], "content": [PICTURE]}
    answer_to_result = chat.bind_tools([TOOL]).invoke([*ask(PICTURE), called, result])
    report(
        "a result that is a picture",
        answer_to_result.text,
        is_right=_num_found(answer_to_result) > called.usage_metadata["input_tokens"],
    )


def try_agents(server: RealServer) -> None:
    asyncio.run(_try_agents(f"{server.url}/v1"))


async def _try_agents(url: str) -> None:
    from agents import Agent, FunctionTool, ModelSettings, Runner, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))
    parts = [{"type": "input_image", "image_url": DRAWN.data_url}, {"type": "input_text", "text": QUESTION.text}]
    items: Any = [{"role": "user", "content": parts}]
    agent = Agent(name="plain", model=MODEL, model_settings=ModelSettings(temperature=0))
    first = await Runner.run(agent, items)
    expect("a picture", first.final_output)
    streamed = Runner.run_streamed(agent, items)
    async for _ in streamed.stream_events():
        pass
    expect("a stream", streamed.final_output)
    again = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": QUESTION.text}])
    same = await Runner.run(agent, QUESTION.text, previous_response_id=first.last_response_id)
    is_same = same.final_output == again.final_output
    report("a second turn, by its items and by an id", same.final_output, is_right=is_same)
    called: list[str] = []

    async def look(_context: object, arguments: str) -> str:
        called.append(arguments)
        return "That is right."

    tool = FunctionTool("look", "Counts them.", TOOL_SCHEMA, look, strict_json_schema=False)
    terms = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False, max_tokens=64)
    caller = Agent(name="caller", instructions="Look.", model=MODEL, tools=[tool], model_settings=terms)
    answer = await Runner.run(caller, items, max_turns=4)
    is_right = [json.loads(each)["count"] in (1, 2) for each in called] == [True]
    report("a call, its result, an answer", answer.final_output, is_right=is_right)


def _args(answer: Any) -> list[Any]:
    return [call["args"] for call in answer.tool_calls]


def _num_found(answer: Any) -> int:
    return int(answer.usage_metadata["input_token_details"]["cache_read"])


def _count_of(answer: Any) -> int:
    return int(json.loads(answer.tool_calls[0].function.arguments)["count"])


def try_litellm(server: RealServer) -> None:
    from litellm import acompletion, completion, stream_chunk_builder

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": KEY}
    options |= {"temperature": 0, "max_tokens": 200, "num_retries": 0}

    def say(messages: Any, **more: Any) -> Any:
        return completion(messages=messages, **options, **more).choices[0].message

    answer = say(ask(PICTURE))
    expect("a picture", answer.content)
    pieces = completion(messages=ask(PICTURE), stream=True, stream_options={"include_usage": True}, **options)
    # The usage comes in a chunk of its own, without choices.
    expect("a stream", "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))
    expect("asynchronously", asyncio.run(acompletion(messages=ask(PICTURE), **options)).choices[0].message.content)
    expect("a second turn", say([*ask(PICTURE), answer.model_dump(), *ask()]).content)
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
    formed = say(ask(PICTURE), response_format=form).content
    report("a schema", formed, is_right='"count"' in formed)
    tool_options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    called = say(ask(PICTURE), **tool_options)
    report("a call", called.tool_calls, is_right=_count_of(called) in (1, 2))
    streamed: Any = stream_chunk_builder(
        list(completion(messages=ask(PICTURE), stream=True, **options, **tool_options))
    )
    gathered = streamed.choices[0].message
    report("a stream of a call", gathered.tool_calls, is_right=_count_of(gathered) == _count_of(called))
    for answer in (called, gathered):
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": [PICTURE]}
        answer_to_result = say([*ask(PICTURE), answer.model_dump(), result], tools=[TOOL])
        report("a result that is a picture", answer_to_result.content, is_right=bool(answer_to_result.content))
    expect_refusal("a picture from the inside", lambda: say(ask(INSIDE)), REFUSED)
    longer = [{"role": "user", "content": TOO_LONG}]
    expect_refusal("a prompt that is too long", lambda: say(longer), TOO_LONG_MESSAGE, "ContextWindowExceeded")


def main() -> int:
    with real_server("--api-key", KEY) as server:
        for client in (try_langchain, try_langchain_s_responses, try_litellm, try_agents):
            print(client.__name__.removeprefix("try_"))
            client(server)
    return 0


if __name__ == "__main__":
    sys.exit(main())

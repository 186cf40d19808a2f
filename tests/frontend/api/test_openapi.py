"""The OpenAPI description matches the routes that are served and the fields that bodies may have."""

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.api.completion_request import CompletionRequest
from keepsight.frontend.api.messages_request import CountTokensRequest, MessagesRequest
from keepsight.frontend.api.openapi import describe_api
from keepsight.frontend.api.responses_request import ResponsesRequest
from keepsight.frontend.api.tokenize_request import DetokenizeRequest, TokenizeRequest
from keepsight.frontend.prompt.read_blocks import OF_ROLES
from tests.frontend.api.app_client import HELLO, Client


def describe(client: Client) -> Any:
    return client.send("GET", "/openapi.json").json()


def test_described_routes_exist_with_exactly_those_methods(client: Client) -> None:
    for path, operations in describe(client)["paths"].items():
        if "{" in path or path.startswith("/v1/media"):
            continue
        for method in ("get", "post"):
            is_there = client.send(method.upper(), path, content=b"{}").status_code != 405
            assert is_there == (method in operations), path


def test_every_reference_resolves(client: Client) -> None:
    document = describe(client)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)

    check(document)


def test_options_of_uploads_and_of_pins_may_be_in_the_query() -> None:
    paths = describe_api(ApiSettings(), has_uploads=True)["paths"]
    for path in ("/v1/media", "/v1/media/{id}/pin"):
        named = {each["name"] for each in paths[path]["post"]["parameters"] if each["in"] == "query"}
        assert named == {"ttl_seconds", "warm", "cache_salt"}, path


def test_routes_that_return_pictures_are_described_so(client: Client) -> None:
    assert "/debug/pictures" not in describe(client)["paths"]
    client.settings = ApiSettings(dashboard_thumbnails=True)
    paths = describe(client)["paths"]
    assert paths["/debug/pictures/{media_hash}/pin"].keys() == {"post", "delete"}
    assert "403" in paths["/debug/pictures"]["get"]["responses"]


@pytest.mark.parametrize(
    "schema", ["ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "TokenizeRequest"]
)
def test_unsupported_fields_allow_only_values_that_change_nothing(client: Client, schema: str) -> None:
    fields = describe(client)["components"]["schemas"][schema]["properties"]
    refused = {name: field["enum"] for name, field in fields.items() if "Not supported" in field.get("description", "")}
    assert refused
    messages: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    path, body = {
        "ChatRequest": ("/v1/chat/completions", messages),
        "CompletionRequest": ("/v1/completions", {"prompt": "Hello"}),
        "ResponsesRequest": ("/v1/responses", {"input": "Hello"}),
        "MessagesRequest": ("/v1/messages", messages | {"max_tokens": 9}),
        "TokenizeRequest": ("/tokenize", messages),
    }[schema]
    for name, values in refused.items():
        for value in values:
            assert client.send("POST", path, json=body | {name: value}).status_code == 200, (name, value)
        error = client.send("POST", path, json=body | {name: "something"}).json()["error"]
        assert error["message"].partition(":")[0] == error.get("param", name) == name


def test_messages_have_the_fields_that_are_described(client: Client) -> None:
    fields = describe(client)["components"]["schemas"]["ChatRequest"]["properties"]["messages"]["items"]["properties"]
    taken = {"assistant": "tool_calls", "tool": "tool_call_id"}
    for name in fields.keys() - {"role", "content", *taken.values()}:
        message = {"role": "user", "content": "Hello", name: None}
        assert client.send("POST", "/v1/chat/completions", json={"messages": [message]}).status_code == 200, name
    for role, field in taken.items():
        refused = client.send("POST", "/v1/chat/completions", json={"messages": [{"role": role, "something": "else"}]})
        known = ast.literal_eval(refused.json()["error"]["message"].partition("known: ")[2])
        assert field in known
        assert fields.keys() > set(known)


def test_content_parts_have_the_fields_that_are_described(client: Client) -> None:
    parts = describe(client)["components"]["schemas"]["ContentPart"]["anyOf"]
    plain = [part["properties"] for part in parts if "role" not in part["properties"]]
    [repeating] = [part["properties"] for part in parts if "role" in part["properties"]]
    for fields in plain:
        content = [{"type": fields["type"]["const"], "something": "else"}]
        refused = client.send("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert refused.json()["error"]["message"].endswith(f"known: {sorted(fields)}")
    text = {"type": "text", "text": "Hello", "role": "assistant"}
    answer = {"role": "assistant", "content": [dict.fromkeys(repeating) | text]}
    assert client.send("POST", "/v1/chat/completions", json={"messages": [*HELLO, answer, *HELLO]}).status_code == 200


def test_items_have_the_fields_that_are_described(client: Client) -> None:
    user: dict[str, Any] = {"role": "user", "content": "Hello"}
    call: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": ""}
    thought = {"type": "reasoning"}
    taken = {"message": user, "reasoning": thought, "function_call": call, "function_call_output": result}
    schemas = describe(client)["components"]["schemas"]
    for item in schemas["InputItem"]["anyOf"]:
        item = schemas[item["$ref"].rpartition("/")[2]] if "$ref" in item else item
        kind = item["properties"]["type"]["enum"][0]
        before = {"message": [], "function_call_output": [user, call]}.get(kind, [user])
        for name in item["properties"].keys() - taken[kind].keys() - {"type"}:
            items = [*before, taken[kind] | {name: None}]
            assert client.send("POST", "/v1/responses", json={"input": items}).status_code == 200, name
        refused = client.send("POST", "/v1/responses", json={"input": [*before, taken[kind] | {"something": "else"}]})
        assert refused.json()["error"]["param"] == f"input[{len(before)}].something"


def test_keys_are_described_where_they_are_needed(client: Client) -> None:
    chat, reset, health = (("/v1/chat/completions", "post"), ("/reset_mm_cache", "post"), ("/health", "get"))
    for settings, closed in (
        (ApiSettings(), set()),
        (ApiSettings(admin_api_key="a"), {reset}),
        (ApiSettings(api_keys=("one",)), {chat, reset}),
    ):
        client.settings = settings
        paths = describe(client)["paths"]
        assert {each for each in (chat, reset, health) if "security" in paths[each[0]][each[1]]} == closed


def test_blocks_have_the_fields_that_are_described(client: Client) -> None:
    schemas = describe(client)["components"]["schemas"]
    for role, kinds in OF_ROLES.items():
        for kind, struct in kinds.items():
            schema = schemas[struct.__name__]
            assert set(schema["properties"]) == {"type", *struct.__struct_fields__}
            assert not schema["additionalProperties"]
            messages = [{"role": role, "content": [{"type": kind, "something": "else"}]}]
            refused = client.send("POST", "/v1/messages", json={"max_tokens": 9, "messages": messages})
            assert refused.json()["error"]["message"].startswith("messages[0].content[0].something:")


@pytest.mark.parametrize(
    "body",
    [
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        CountTokensRequest,
        TokenizeRequest,
        DetokenizeRequest,
    ],
)
def test_the_documentation_names_each_field(body: type[msgspec.Struct]) -> None:
    documented = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    assert [name for name in body.__struct_fields__ if f"`{name}`" not in documented] == []

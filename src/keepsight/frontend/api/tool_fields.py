"""The fields of a chat request that define tools and choose which of them to call, in OpenAI's shapes, checked.

They become a form of the answer, like any other requested form; errors in it are reported at the tool's position.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.call_parser import CallParser
from keepsight.frontend.prompt.call_grammar import CallGrammar
from keepsight.frontend.prompt.call_text import BARE, MAX_NAME_LENGTH, NAME_PATTERN, CallForm
from keepsight.frontend.prompt.check_grammar import check_structured_outputs
from keepsight.frontend.prompt.json_types import Allowance, ArgumentTypes, Schema, SchemaReader
from keepsight.frontend.prompt.parameter_rules import read_parameters
from keepsight.structured_outputs import WHITE_SPACE, StructuredOutputsParams, write_schema

MAX_TOOLS = 128
MAX_SHOWN_NAMES = 16
# Finding each fault takes compiling the whole grammar again; after this many, every tool that is not strict is freed.
MAX_FREED_SINGLY = 8
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # Unless true, parts of the schema that no grammar can enforce are only shown to the model.
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """Only the name is used; some clients repeat the whole tool, which is known from `tools`."""

    function: Function

    def without_bulky_fields(self) -> "NamedTool":
        return NamedTool(Function(self.function.name))


class AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolsChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools

    def without_bulky_fields(self) -> "ToolsChoice":
        named = [tool.without_bulky_fields() for tool in self.allowed_tools.tools]
        return ToolsChoice(msgspec.structs.replace(self.allowed_tools, tools=named))


ToolChoice = Literal["none", "auto", "required"] | NamedTool | ToolsChoice


@dataclass(frozen=True, slots=True)
class CallTerms:
    """Which functions an answer may call, if any, and how calls are written."""

    names: tuple[str, ...] = ()
    must_call: bool = False
    is_single: bool = False
    is_named: bool = False  # the caller chose this one function
    form: CallForm = BARE
    # What has to be known of the functions' parameters to read their arguments, if anything.
    types: Mapping[str, ArgumentTypes] = field(default_factory=dict)

    def begin_parsing(self) -> CallParser:
        return CallParser(self.names, self.form, self.types)


NO_CALLS = CallTerms()


def check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidArgumentError("tools", f"must be at most {MAX_TOOLS}, not {len(tools)}")
    names: set[str] = set()
    for index, name in enumerate(tool.function.name for tool in tools):
        field = f"tools[{index}].function.name"
        if not re.fullmatch(NAME_PATTERN, name):
            characters = "letters, digits, '_', '-' and '.'"
            raise InvalidArgumentError(field, f"must be 1 to {MAX_NAME_LENGTH} of {characters}")
        if name in names:
            raise InvalidArgumentError(field, f"is {name!r}, the name of another tool")
        names.add(name)


def read_terms(tools: Sequence[Tool], choice: ToolChoice | None, form: CallForm, *, is_parallel: bool) -> CallTerms:
    """Return the call terms for tools that were checked."""
    names = tuple(tool.function.name for tool in tools)
    if isinstance(choice, NamedTool):
        named = _choose([choice], names, "tool_choice.function.name")
        types = _find_types(tools, named, form)
        return CallTerms(named, must_call=True, is_single=True, is_named=True, form=form, types=types)
    mode, is_single = choice, not is_parallel
    if isinstance(choice, ToolsChoice):
        mode, allowed = choice.allowed_tools.mode, choice.allowed_tools.tools
        names = _choose(allowed, names, "tool_choice.allowed_tools.tools[{}].function.name")
    if mode == "required" and not names:
        raise InvalidArgumentError("tool_choice", "asks for a call, but there are no tools")
    if mode == "none":
        return NO_CALLS
    return CallTerms(names, mode == "required", is_single, form=form, types=_find_types(tools, names, form))


def guide_calls(
    tools: Sequence[Tool], terms: CallTerms, form: StructuredOutputsParams | None, form_field: str
) -> StructuredOutputsParams:
    """Return the grammar of an answer that may, or must, call tools.

    `form`: the form of an answer without calls; `form_field`: the field that requested it.
    """
    if form is not None and form.field not in ("json", "json_object"):
        reason = "cannot be requested together with tools: request JSON, or leave out the tools for any other form"
        raise InvalidArgumentError(form_field, reason)
    functions = {tool.function.name: (index, tool.function) for index, tool in enumerate(tools)}
    form_schema = None if form is None else form.to_schema()
    freed: set[str] = set()
    while True:
        schemas = {name: _write_schema(*functions[name], terms, is_free=name in freed) for name in terms.names}
        grammar = CallGrammar(schemas, terms.must_call, terms.is_single, form_schema, terms.form)
        try:
            params = StructuredOutputsParams(grammar=str(grammar))
            check_structured_outputs(params, "tools")
        except InvalidArgumentError as error:
            freed |= _find_to_free(error, grammar, functions, freed)
        else:
            return params


def _find_to_free(
    error: InvalidArgumentError, grammar: CallGrammar, functions: Mapping[str, tuple[int, Function]], freed: set[str]
) -> set[str]:
    """Return the functions to free from their argument schemas, if that can repair the grammar; otherwise raise."""
    if (fault := grammar.find_function_at_fault(error.message)) is None:
        raise type(error)("tools", error.message) from error
    name, reason = fault
    index, function = functions[name]
    if function.strict or name in freed:
        raise InvalidArgumentError(_name_field(index), f"cannot be compiled: {reason}") from error
    if len(freed) < MAX_FREED_SINGLY:
        return {name}
    return {name for name, (_, function) in functions.items() if not function.strict}


def _find_types(tools: Sequence[Tool], names: Sequence[str], form: CallForm) -> dict[str, ArgumentTypes]:
    allowance, found = Allowance(), dict[str, ArgumentTypes]()
    for index, function in enumerate(tool.function for tool in tools):
        if function.name in names:
            try:
                found[function.name] = form.arguments.find_types(function.parameters or {}, allowance)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(_name_field(index), error.message) from error
    return {name: types for name, types in found.items() if types}


def _choose(chosen: Sequence[NamedTool], names: Sequence[str], field: str) -> tuple[str, ...]:
    """Return the chosen names, each once. `field`: the name's field, to be formatted with its index."""
    for index, tool in enumerate(chosen):
        if tool.function.name not in names:
            reason = f"is {tool.function.name!r}, which is not a tool's name: {_list_names(names)}"
            raise InvalidArgumentError(field.format(index), reason)
    return tuple(dict.fromkeys(tool.function.name for tool in chosen))


def _list_names(names: Sequence[str]) -> str:
    shown, num_others = names[:MAX_SHOWN_NAMES], len(names) - MAX_SHOWN_NAMES
    others = f" and {num_others} more" if num_others > 0 else ""
    return f"there are {', '.join(shown)}{others}" if names else "there are no tools"


def _name_field(index: int) -> str:
    return f"tools[{index}].function.parameters"


def _write_schema(index: int, function: Function, terms: CallTerms, *, is_free: bool) -> Schema:
    """Return a function's schema for llguidance. `is_free`: arguments keep their names but may have any values."""
    schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise InvalidArgumentError(f"{_name_field(index)}.type", "must be 'object'")
    try:
        own = json.loads(json.dumps(_name_arguments(schema) if is_free else schema))
    except RecursionError as error:
        raise InvalidArgumentError(_name_field(index), "is nested too deeply") from error
    white_space = terms.form.spacing if terms.must_call else WHITE_SPACE
    written = write_schema(own | {"type": "object"}, {**white_space, "lenient": not function.strict})
    if function.strict and (unenforced := terms.form.arguments.find_unenforced(written)):
        what = f"in this model's form of calls no grammar enforces {', '.join(sorted(unenforced))}"
        raise InvalidArgumentError(_name_field(index), f"cannot be compiled: {what}")
    return written


def _name_arguments(schema: Schema) -> dict[str, Any]:
    """Return a schema with only the names of the arguments, and those required, as far as `schema` lists them."""
    found = read_parameters(SchemaReader(schema, Allowance()))
    named = {"properties": {name: {} for name in found.named}, "required": sorted(found.required)}
    return named if found.others is None else {**named, "additionalProperties": True}

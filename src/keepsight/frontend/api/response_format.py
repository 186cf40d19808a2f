"""The fields of a chat request that set the form of its answer: OpenAI's `response_format` and vLLM's own names.

All become one `StructuredOutputsParams`; errors in it are reported under the name that the caller used.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.decode_body import NeutralValues, Refused
from keepsight.frontend.prompt.check_grammar import check_structured_outputs
from keepsight.structured_outputs import StructuredOutputsParams


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    # No effect: the answer always has the requested form.
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Applies to JSON requested by any of the fields.
    disable_any_whitespace: bool | None = None

    disable_additional_properties: Refused = None
    structural_tag: Refused = None
    whitespace_pattern: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {"disable_additional_properties": (False,)}


# The caller's field name, the name in `StructuredOutputsParams`, the value.
RequestedForm = tuple[str, str, Any]


def list_forms(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None, guided: Mapping[str, Any]
) -> list[RequestedForm]:
    """List all requested forms. `guided`: vLLM's older `guided_*` fields, by name."""
    forms = [*_read_response_format(response_format), *_read_structured_outputs(structured_outputs)]
    return forms + [(name, name.removeprefix("guided_"), value) for name, value in guided.items() if value is not None]


def read_structured_outputs(
    forms: list[RequestedForm], structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Return the parameters of the requested form, or None if any text will do."""
    is_compact = structured_outputs is not None and bool(structured_outputs.disable_any_whitespace)
    if not forms:
        if is_compact:
            raise InvalidArgumentError(
                "structured_outputs.disable_any_whitespace", "applies to JSON only, and none is requested"
            )
        return None
    form, *others = forms
    params = _as_params(form, is_compact)
    for other in others:
        # Clients that do not know a server's version ask for a form by vLLM's older name, too.
        if _as_params(other, is_compact) != params:
            raise InvalidArgumentError(other[0], f"cannot be given together with {form[0]}")
    check_structured_outputs(params, form[0])
    return params


def _as_params(form: RequestedForm, is_compact: bool) -> StructuredOutputsParams:
    field, name, value = form
    try:
        return StructuredOutputsParams(**{name: value}, disable_any_whitespace=is_compact)
    except InvalidArgumentError as error:
        path = f"structured_outputs.{name}"
        if not error.field.startswith(path):
            raise
        raise InvalidArgumentError(field + error.field.removeprefix(path), error.message) from error


def _read_response_format(response_format: ResponseFormat | None) -> Iterator[RequestedForm]:
    if response_format is None:
        return
    if (response_format.type == "json_schema") != (response_format.json_schema is not None):
        raise InvalidArgumentError(
            "response_format.json_schema", 'must be given with the type "json_schema", and only with it'
        )
    if response_format.json_schema is not None and response_format.json_schema.schema is not None:
        yield "response_format.json_schema.schema", "json", response_format.json_schema.schema
    elif response_format.type != "text":
        yield "response_format", "json_object", True


def _read_structured_outputs(structured_outputs: StructuredOutputs | None) -> Iterator[RequestedForm]:
    if structured_outputs is None:
        return
    for name, value in msgspec.structs.asdict(structured_outputs).items():
        if name != "disable_any_whitespace" and value not in (None, False):
            yield f"structured_outputs.{name}", name, value

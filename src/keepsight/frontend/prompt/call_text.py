"""How a tool call is written as text: in the form that the chat template teaches or, if it teaches none known here, in
the form that Google documents for Gemma 3, which has no special tokens for calls.

The instructions to the model, the grammar of its answer and the parser of its answer are all built from this.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from keepsight.frontend.prompt.arguments_as_json import ArgumentsAsJson
from keepsight.frontend.prompt.arguments_as_parameters import ArgumentsAsParameters
from keepsight.frontend.prompt.json_types import Allowance, ArgumentTypes, Schema
from keepsight.frontend.prompt.parameter_tags import IN_LINE
from keepsight.structured_outputs import NO_WHITE_SPACE

MAX_NAME_LENGTH = 128
# The characters that OpenAI allows, and the dot of MCP's names. None of them is escaped in JSON.
NAME_PATTERN = rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME_LENGTH}}}"
WHITE_SPACE = r"[ \n\t]{0,24}"
# A model that is not constrained may put its JSON between two Markdown fences.
_FENCES = rf"{WHITE_SPACE}(?:```[a-z_]{{0,16}}{WHITE_SPACE}){{0,2}}"
# As `tojson` writes values into a later turn.
_LIKE_TEMPLATES = {**NO_WHITE_SPACE, "item_separator": ", ", "key_separator": ": "}


class ArgumentsReader(Protocol):
    """Makes JSON of the arguments of one call, which come in pieces."""

    @property
    def has_ended(self) -> bool: ...

    def read(self, text: str) -> tuple[str, int]:
        """Return JSON, and the number of characters that have been read: the others are to come again, with more."""
        ...

    def cut_off(self) -> str:
        """Return the JSON, so far, of what was read but not returned, as arguments go on no further."""
        ...


class ArgumentsForm(Protocol):
    """How the arguments of a call are written."""

    # A pattern of what an unconstrained model must go on with for its text to be a call.
    BEGIN: str

    def write(self, arguments: str) -> str:
        """Write arguments, which are JSON but may be cut off."""
        ...

    def find_types(self, schema: Schema, allowance: Allowance) -> ArgumentTypes:
        """Return what has to be known of a function's parameters to read its arguments."""
        ...

    def begin_reading(self, types: ArgumentTypes) -> ArgumentsReader: ...

    def list_rules(self, schemas: Iterable[Schema]) -> Sequence[str]:
        """Return the rule `args_{index}` for each schema, and those that they need, named `args_{index}_...`."""
        ...

    def find_unenforced(self, schema: Schema) -> Set[str]:
        """Return the keywords of a schema that the rules leave out; those at which llguidance fails are not meant."""
        ...


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity
class CallForm:
    """A form of calls: some tokens, a function's name between two quotes, some tokens, its arguments, and some tokens.

    Between two tokens the model may write white space, unless it is constrained. Tokens end with their usual one.
    """

    before_name: tuple[str, ...]
    quotes: tuple[str, str]
    behind_name: tuple[str, ...]
    end: tuple[str, ...]
    arguments: ArgumentsForm
    # Patterns of what a template writes that teaches this form.
    signs: tuple[str, ...]
    # White space in forced arguments. It is limited: a model that would rather not call may go on with spaces for long.
    spacing: Mapping[str, Any]
    # Patterns of what an unconstrained model may put before a call, of unfinished forms of that, and of what it may put
    # after the last call.
    lead: str
    begun_leads: tuple[str, ...]
    tail: str
    # If False, an answer consists of calls from its beginning on, or contains none.
    can_follow_text: bool = False
    # What stands between two calls.
    between: str = "\n"

    @property
    def name_end(self) -> str:
        return self.quotes[1].strip()

    @property
    def pattern_before_name(self) -> str:
        """The pattern of how an unconstrained model begins a call. Text that reaches the end of the name is a call."""
        return "".join((self.lead, *self._to_name))

    @property
    def pattern_behind_name(self) -> str:
        return "".join(self._to_arguments)

    @property
    def pattern_of_end(self) -> str:
        return WHITE_SPACE + WHITE_SPACE.join(re.escape(each.strip()) for each in self.end)

    @property
    def _to_name(self) -> tuple[str, ...]:
        return (*_loosely(self.before_name), *map(re.escape, self.quotes[0]))

    @property
    def _to_arguments(self) -> tuple[str, ...]:
        return tuple(_loosely((self.quotes[1], *self.behind_name)))

    def match_unfinished_opening(self, name: str) -> str:
        """Return a pattern of `pattern_before_name`, a name and `pattern_behind_name`, and of every beginning of it."""
        rest = ""
        for pattern in reversed((*self._to_name, name, *self._to_arguments)):
            rest = f"(?:{pattern}{rest})?"
        return f"{self.lead}(?:{'|'.join((*self.begun_leads, rest))})"


BARE = CallForm(
    before_name=("{", '"name"', ": "),
    quotes=('"', '"'),
    behind_name=(", ", '"parameters"', ": "),
    end=("}",),
    arguments=ArgumentsAsJson(),
    signs=(),
    spacing={"whitespace_pattern": " ?"},
    lead=_FENCES,
    begun_leads=("`{1,2}",),
    tail=rf"{WHITE_SPACE}(?:```{WHITE_SPACE})?",
)
# The form of Hermes and Qwen: each call is on lines of its own, after the text that accompanies it.
TAGGED = CallForm(
    before_name=("<tool_call>\n", "{", '"name"', ": "),
    quotes=('"', '"'),
    behind_name=(", ", '"arguments"', ": "),
    end=("}\n", "</tool_call>"),
    arguments=ArgumentsAsJson(),
    signs=("<tool_call>", '"arguments"'),
    spacing=_LIKE_TEMPLATES,
    lead=r"\n?",
    begun_leads=(),
    tail=r"\n?",
    can_follow_text=True,
)
# The form of Qwen3-Coder and Qwen3.5. Templates put an empty line between a text and the first call.
PARAMETERS = CallForm(
    before_name=("<tool_call>\n",),
    quotes=("<function=", ">\n"),
    behind_name=(),
    end=("</function>\n", "</tool_call>"),
    arguments=ArgumentsAsParameters(),
    signs=("<tool_call>\n<function=", "<parameter=", "\n</parameter>"),
    spacing=_LIKE_TEMPLATES,
    lead=r"\n{0,2}",
    begun_leads=(),
    tail=r"\n?",
    can_follow_text=True,
)
# The form of MiMo: values are in line with their tags, and nothing stands between a text and a call, or two calls.
INLINE_PARAMETERS = replace(
    PARAMETERS,
    arguments=ArgumentsAsParameters(IN_LINE),
    # Descriptions of tools may have other tags with these names, so both say how a call's are written.
    signs=(
        "<tool_call>\n<function=",
        "<parameter=[^<>\n]+>[^<>\n]+</parameter>\n",
        r"\A(?s:(?!.*<parameter=[^<>\n]*>\n))",
    ),
    lead="",
    between="",
)
# In this order: a template of one form may contain the signs of the next, and any contains the signs of the last.
_FORMS = (INLINE_PARAMETERS, PARAMETERS, TAGGED, BARE)


def find_taught_form(text: str) -> CallForm:
    """Return the form that a template teaches. `text`: everything that the template may write."""
    return next(form for form in _FORMS if all(re.search(each, text) for each in form.signs))


def write_opening(name: str, form: CallForm = BARE) -> str:
    """Return everything that comes before the arguments."""
    quoted = json.dumps(name, ensure_ascii=False)[1:-1].join(form.quotes)
    return "".join((*form.before_name, quoted, *form.behind_name))


def write_closing(form: CallForm = BARE) -> str:
    return "".join(form.end)


def write_call(name: str, arguments: str, form: CallForm = BARE) -> str:
    return f"{write_opening(name, form)}{form.arguments.write(arguments)}{write_closing(form)}"


def _loosely(tokens: Sequence[str]) -> Iterator[str]:
    """Yield patterns, each matching one character of a token or one run of white space after it."""
    for token in tokens:
        yield from map(re.escape, token.strip())
        yield WHITE_SPACE

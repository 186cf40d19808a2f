"""Renders messages into one text with the checkpoint's own chat template, in the sandbox that transformers uses.

The template comes with the checkpoint and is not trusted: it sees plain strings, lists and dicts only, and a text that
grows without end is refused. A picture is only a marker in the text here.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.nodes
from jinja2.defaults import DEFAULT_NAMESPACE

from keepsight.errors import ChatTemplateError, CheckpointConfigError, InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.prompt.call_text import BARE, find_taught_form
from keepsight.frontend.prompt.join_answers import join_answers
from keepsight.frontend.prompt.mark_end import GOES_ON, cut_at_mark, mark_end
from keepsight.frontend.prompt.message_contents import as_parts, join_all, join_texts
from keepsight.frontend.prompt.read_messages import SYSTEM_ROLES, TemplateMessage, read_messages, show_to_template
from keepsight.frontend.prompt.read_tool_calls import show_tool_calls
from keepsight.frontend.prompt.reasoning_effort import Effort, spell_effort
from keepsight.frontend.prompt.template_environment import compile_template, describe_error, make_environment
from keepsight.frontend.prompt.template_names import find_texts, find_tool_words, find_variables
from keepsight.frontend.prompt.thought_text import TAGS, find_thought
from keepsight.frontend.prompt.write_tools_as_text import (
    check_results,
    write_calls_as_text,
    write_results_as_text,
    write_tools_as_text,
)
from keepsight.json_fields import read_json_object, read_optional_json_object
from keepsight.media import KINDS, SEVERAL, Kind

MAX_RENDERED_CHARACTERS = 64 * 2**20
MAX_PROBED_CHARACTERS = 2**16
# The two forms that a message's content has in OpenAI's API.
ContentForm = Literal["text", "parts"]
CONTENT_FORMS: tuple[ContentForm, ...] = ("text", "parts")
# OpenAI's. Further roles are those that the template names.
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
# Variables that every template gets, and globals of the environment.
_OWN_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE)
)
_PROBE = "What does this template show?"


class ChatTemplate:
    """One compiled template; `render` may be called from several threads."""

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], path: Path | str = "chat template"
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = None if source is None else compile_template(source, path)
        parsed = make_environment().parse(source or "")
        # The roles that the template knows are among them.
        self._texts = find_texts(parsed)
        # Those that a request may set.
        self._variables = find_variables(parsed) - _OWN_VARIABLES - special_tokens.keys()
        # The names related to tools that the template knows.
        self._tool_words = find_tool_words(parsed, self._texts)
        # Everything that the template may write.
        written = "\n".join((*(each.data for each in parsed.find_all(jinja2.nodes.TemplateData)), *self._texts))
        # How the model writes calls: as the template teaches, if it describes tools itself, in a form known here.
        self.call_form = find_taught_form(written) if "tools" in self._tool_words else BARE
        # How the model writes its thoughts; None: the template has none.
        self.thought_form = TAGS if all(tag in written for tag in TAGS) else None
        self._content_form = self._find_content_form()
        self._takes_texts_as_arguments = self._writes_like_object('{"probe": [1, 2]}')
        self._takes_texts_as_values = self._writes_like_object({"probe": "[1, 2]"})
        self._always_thinks = self._find_whether_it_opens_thoughts()
        # What the template silently leaves out.
        self._drops_system_parts = self._find_whether_it_drops_system_parts()
        self._drops_later_systems = self._find_whether_it_drops_later_systems()
        self._shows_one_system = self._find_whether_it_shows_one_system()
        self._drops_lone_systems = self._find_whether_it_drops_lone_systems()
        self._roles_without: Mapping[Kind, frozenset[str]] = {
            kind: frozenset(self._find_roles_without(kind)) for kind in KINDS
        }

    @classmethod
    def from_checkpoint(
        cls, directory: Path | str, special_tokens: Mapping[str, str], *, reads_pictures: bool = False
    ) -> "ChatTemplate":
        source, path = _find_source(Path(directory), reads_pictures=reads_pictures)
        return cls(source, special_tokens, path)

    def render(
        self,
        messages: object,
        max_characters: int = MAX_RENDERED_CHARACTERS,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        conversation = read_messages(messages)
        variables = self._spell_effort(conversation.effort) | self._choose_variables(conversation.variables)
        # Checked before tools are written into the messages, as errors name a message by its index in the request.
        num_joined = self._count_joined(conversation.messages)
        self._check_is_not_alone(conversation.messages)
        for index, message in enumerate(conversation.messages):
            self._check_role(message["role"], f"messages[{index}].role")
            self._check_is_shown(index, message, is_first=index < max(num_joined, 1))
        if "tool" not in self._tool_words:
            check_results(conversation.messages)
        written = join_answers(_write_contents(conversation.messages, self._content_form))
        written = _write_contents(self._with_tools(written, tools, num_joined), self._content_form)
        tools = tools if "tools" in self._tool_words else ()
        if self._drops_system_parts:
            written = [_with_one_part(each) for each in written]
        if conversation.end == "text":
            marked = self._render_text(mark_end(written), tools, False, max_characters + len(GOES_ON), variables)
            return cut_at_mark(marked, is_blank=not conversation.begun_answer.strip())
        return self._render_text(written, tools, conversation.end == "answer", max_characters, variables)

    def _render_text(
        self,
        messages: list[TemplateMessage],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        max_characters: int,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise ChatTemplateError("messages", "this model has no chat template; send a plain prompt instead")
        pieces = self._template.generate(
            **(variables or {}),
            messages=self._name_roles(messages),
            # None if there are none, as templates test for that; a list, as `tojson` can write it.
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )
        try:
            return _join_at_most(pieces, max_characters)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can raise whatever Python can
            raise ChatTemplateError("messages", f"the chat template refused them: {describe_error(error)}") from error

    def _choose_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that the template reads. Others are accepted only if they are falsy."""
        for name, value in given.items():
            field = f"chat_template_kwargs.{name[:64]}"
            if name in _OWN_VARIABLES or name in self._special_tokens:
                raise UnsupportedFieldError(field, "is set by other fields, the checkpoint or the server")
            if name not in self._variables and value:
                reason = f"it uses {', '.join(sorted(self._variables)) or 'none'}"
                raise UnsupportedFieldError(field, f"is not a variable of this model's chat template; {reason}")
        return {name: value for name, value in given.items() if name in self._variables}

    def _spell_effort(self, effort: Effort | None) -> dict[str, Any]:
        if effort is None:
            return {}
        may_think = self.thought_form is not None
        return spell_effort(effort, self._variables, may_think=may_think, always_thinks=self._always_thinks)

    def _check_role(self, role: str, field: str) -> None:
        """Refuse an unknown role: many templates would write any role into the prompt."""
        if role in ROLES or role in self._texts:
            return
        hint = "; results of calls now have the role tool" if role == "function" else ""
        raise InvalidArgumentError(field, f"must be one of {', '.join(ROLES)}, not {role[:40]!r}{hint}")

    def _count_joined(self, messages: Sequence[TemplateMessage]) -> int:
        """Return how many messages at the beginning become one system message: those of systems and developers, if the
        template shows only one, or, as in vLLM, if a developer is among them. A template that knows developers has all.
        """
        roles = [*takewhile(SYSTEM_ROLES.__contains__, (message["role"] for message in messages))]
        is_one = "developer" in roles or (len(roles) > 1 and self._shows_one_system)
        return len(roles) if is_one and "developer" not in self._texts else 0

    def _check_is_not_alone(self, messages: Sequence[TemplateMessage]) -> None:
        if self._drops_lone_systems and all(each["role"] in SYSTEM_ROLES for each in messages):
            what = "this model's chat template shows a system message only with another message, such as a user's"
            raise UnsupportedFieldError("messages", what)

    def _check_is_shown(self, index: int, message: TemplateMessage, *, is_first: bool) -> None:
        role = "system" if message["role"] in SYSTEM_ROLES else message["role"]
        if not is_first and role == "system" and self._drops_later_systems:
            what = "this model's chat template shows a system message only if it is the first"
            raise UnsupportedFieldError(f"messages[{index}].role", what)
        for kind in _kinds_in(message["content"]):
            if role in self._roles_without[kind]:
                what = f"this model's chat template has no place for {SEVERAL[kind]} in {role} messages"
                raise UnsupportedFieldError(f"messages[{index}].content", what)

    def _with_tools(
        self, messages: list[TemplateMessage], tools: Sequence[Mapping[str, Any]], num_joined: int
    ) -> list[TemplateMessage]:
        """Write tools, calls and results as text where the template does not know them and would silently drop them.

        `num_joined`: the number of messages at the beginning that become one.
        """
        if "tool" not in self._tool_words:
            messages = write_results_as_text(messages)
        messages = [self._write_calls(message) if "tool_calls" in message else message for message in messages]
        if num_joined:
            content = join_all([message["content"] for message in messages[:num_joined]])
            messages = [{**messages[0], "content": content}, *messages[num_joined:]]
        return write_tools_as_text(messages, tools) if tools and "tools" not in self._tool_words else messages

    def _write_calls(self, message: TemplateMessage) -> TemplateMessage:
        if "tool_calls" not in self._tool_words:
            return write_calls_as_text(message, self.call_form)
        return message if self._takes_texts_as_arguments else show_tool_calls(message, self._takes_texts_as_values)

    def _find_content_form(self) -> ContentForm | None:
        """Find by trial the one form that the template shows; None if it shows both, or neither.

        Many templates know only one form, and would write the other as Python does, or leave it out.
        """
        shown = [form for form in CONTENT_FORMS if self._shows(form)]
        return shown[0] if len(shown) == 1 else None

    def _shows(self, form: ContentForm) -> bool:
        text = self._try_out(_write_contents([{"role": "user", "content": _PROBE}], form))
        return _PROBE in text and not any(quoted in text for quoted in (f"'{_PROBE}'", f'"{_PROBE}"'))

    def _writes_like_object(self, arguments: object) -> bool:
        """Find this out by trial: many templates would quote a text, or write an object in a notation of their own."""
        return self._try_call(arguments) == self._try_call({"probe": [1, 2]}) != ""

    def _try_call(self, arguments: object) -> str:
        call = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        user, assistant = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": ""}
        return self._try_out(_write_contents([user, assistant | {"tool_calls": [call]}], self._content_form))

    def _find_whether_it_opens_thoughts(self) -> bool:
        """Find out whether a prompt ends within a thought, if no variable says otherwise."""
        prompt = self._try_out(_write_contents([_turn("user")], self._content_form))
        thought = None if self.thought_form is None else find_thought(self.thought_form, prompt)
        return thought is not None and thought.is_open

    def _find_whether_it_drops_system_parts(self) -> bool:
        """Find this out by trial: Gemma 3's template shows only the first part of a system message."""
        first, second = ({"type": "text", "text": f"{_PROBE} {number}"} for number in (1, 2))
        user = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
        text = self._try_out([{"role": "system", "content": [first, second]}, user])
        return first["text"] in text and second["text"] not in text

    def _find_whether_it_drops_later_systems(self) -> bool:
        text = self._try_out(
            _write_contents([_turn("user"), _turn("system", _PROBE), _turn("user")], self._content_form)
        )
        return bool(text) and _PROBE not in text

    def _find_whether_it_shows_one_system(self) -> bool:
        """Find out whether one of two at the beginning is left out, or both are refused, as by Gemma 3's template."""
        texts = [f"{_PROBE} {number}" for number in (1, 2)]
        systems = [_turn("system", each) for each in texts]
        shown = self._try_out(_write_contents([*systems, _turn("user")], self._content_form))
        return not all(each in shown for each in texts)

    def _find_whether_it_drops_lone_systems(self) -> bool:
        """Find this out by trial: Gemma 3's template writes a system's text only into the turn of a user."""
        system = _turn("system", _PROBE)
        alone, asked = (
            self._try_out(_write_contents(each, self._content_form)) for each in ([system], [system, _turn("user")])
        )
        return _PROBE in asked and _PROBE not in alone

    def _find_roles_without(self, kind: Kind) -> Iterator[str]:
        """Yield the roles whose text is the same with and without the picture, the film or the sound."""
        if self._drops_system_parts:
            yield "system"
        if self._content_form == "text":
            return  # `_as_text` refuses media in any role
        for role in ("system", "user", "assistant", "tool"):
            before = [] if role in ("system", "user") else [_turn("user")]
            plain = _turn(role)
            shown = {**plain, "content": [show_to_template(kind), *plain["content"]]}
            text, text_of_plain = (self._try_out([*before, each, _turn("user")]) for each in (shown, plain))
            if text and text == text_of_plain:
                yield role

    def _try_out(self, messages: list[TemplateMessage]) -> str:
        """Render messages; return an empty text if the template refuses them."""
        if self._template is None:
            return ""
        try:
            return self._render_text(messages, (), True, MAX_PROBED_CHARACTERS)
        except ChatTemplateError:
            return ""

    def _name_roles(self, messages: list[TemplateMessage]) -> list[TemplateMessage]:
        """Replace the role `developer`, which newer clients send for `system` and few templates know."""
        if "developer" in self._texts:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _write_contents(messages: list[TemplateMessage], form: ContentForm | None) -> list[TemplateMessage]:
    """Return messages with contents in the one form that the template shows; None: as the client wrote them."""
    if form is None:
        return messages
    if form == "parts":
        return [{**each, "content": as_parts(each["content"])} for each in messages]
    return [{**each, "content": _as_text(each["content"], f"messages[{at}]")} for at, each in enumerate(messages)]


def _as_text(content: str | list[Mapping[str, Any]], field: str) -> str:
    """Return the content as one text."""
    if (kind := next(_kinds_in(content), None)) is not None:
        raise UnsupportedFieldError(f"{field}.content", f"this model's chat template has no place for {SEVERAL[kind]}")
    return join_texts(content)


def _turn(role: str, text: str = "Hello") -> TemplateMessage:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _kinds_in(content: str | list[Mapping[str, Any]]) -> Iterator[Kind]:
    """Yield the kind of each part that is not text."""
    if not isinstance(content, str):
        yield from (part["type"] for part in content if part["type"] != "text")


def _with_one_part(message: TemplateMessage) -> TemplateMessage:
    """Merge the texts of a system message into one part."""
    content = message["content"]
    if message["role"] not in SYSTEM_ROLES or isinstance(content, str) or len(content) < 2:
        return message
    return {**message, "content": as_parts(_as_text(content, "messages"))}


def _find_source(directory: Path, *, reads_pictures: bool) -> tuple[str | None, Path]:
    """Find the template as transformers does. Its processors have files that its tokenizers never read: where nothing
    else is found, those are used here.
    """
    of_processors = ["processor_config.json", "chat_template.json"]
    of_tokenizers = ["chat_template.jinja", "tokenizer_config.json"]
    for name in of_processors + of_tokenizers if reads_pictures else of_tokenizers + of_processors:
        path = directory / name
        if path.stem == "chat_template":
            if path.exists():
                return _read_source(path), path
        elif (template := read_optional_json_object(path).get("chat_template")) is not None:
            return _choose_source(path, template), path
    return None, directory


def _read_source(path: Path) -> str:
    if path.suffix == ".json":
        return _choose_source(path, read_json_object(path).get("chat_template"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointConfigError(path, f"cannot be read: {error}") from error


def _choose_source(path: Path, template: object) -> str:
    """Return the template's text. `template` is one text, or several named ones: "default" or the only one is used."""
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    if isinstance(template, dict):
        only = next(iter(template.values())) if len(template) == 1 else None
        if "default" not in template and only is None:
            raise CheckpointConfigError(path, f"chat_template: none of {list(template)} is named 'default'")
        template = template.get("default", only)
    if not isinstance(template, str):
        raise CheckpointConfigError(path, f"chat_template: must be a string, not {type(template).__name__}")
    return template


def _join_at_most(pieces: Iterator[str], max_characters: int) -> str:
    """Join the pieces, counting while the text grows: an endless loop in the template yields forever."""
    text: list[str] = []
    num_characters = 0
    for piece in pieces:
        text.append(piece)
        num_characters += len(piece) or 1  # an empty piece counts too: it may be all that a loop yields
        if num_characters > max_characters:
            raise ChatTemplateError("messages", f"the chat template wrote more than {max_characters} characters")
    return "".join(text)

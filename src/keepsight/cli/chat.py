"""`keepsight chat`: a conversation in the terminal, with any OpenAI server, about any pictures.

The whole conversation is sent with every message, as OpenAI's protocol requires; the server's caches make that cheap,
and the line under each answer shows how cheap. Answers go to standard output, everything else to standard error; input
may also come from a pipe. A partial answer stays in the conversation, however it ended; a message without any answer
is dropped.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from keepsight.cli.attach_picture import attach
from keepsight.cli.check_arguments import check_arguments_are_text, check_is_text
from keepsight.cli.openai_server import DEFAULT_URL, Cut, OpenAIServer, Thought, Usage, choose_api_key
from keepsight.cli.strip_controls import strip_controls
from keepsight.errors import InvalidArgumentError, KeepsightError, NoAnswerError

HELP = """\
/image PATH-or-URL ...   attach pictures to the next message
/video PATH-or-URL ...   attach films
/audio PATH-or-URL ...   attach sounds
/file PATH-or-URL ...    attach PDFs
/clear                   begin a new conversation
/save FILE               write the conversation as JSON: the body of a request
/help                    show this list
/quit                    leave, like Ctrl-D
Ctrl-C stops an answer; what has arrived stays in the conversation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"URL of the server (default: {DEFAULT_URL})")
    parser.add_argument("--model", help="model to use (default: the server's first)")
    parser.add_argument("--api-key", help="key, if the server needs one (default: OPENAI_API_KEY in the environment)")
    parser.add_argument("--system", help="system message, sent before the conversation")
    parser.add_argument("--temperature", type=_to_finite, help="0 takes the likeliest token (default: the server's)")
    parser.add_argument("--max-tokens", type=int, help="longest answer (default: the server's)")


def _to_finite(text: str) -> float:
    """Parse a finite number; JSON has no others."""
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"must be a finite number, not {text!r}")


def run(arguments: argparse.Namespace) -> int:
    check_arguments_are_text(arguments)
    server = OpenAIServer(arguments.url, choose_api_key(arguments.api_key))
    options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    chat = Chat(
        server,
        arguments.model or _find_model(server),
        {name: value for name, value in options.items() if value is not None},
        arguments.system,
    )
    _note(f"{chat.model} at {server.url}. /help lists the commands.")
    return chat.converse(_lines())


@dataclass
class Answer:
    """The part of an answer that has arrived, and how long it took. The clock starts with the question."""

    text: str = ""
    is_amid_thought: bool = False
    usage: Usage | None = None
    is_cut: bool = False
    is_stopped: bool = False
    started: float = field(default_factory=time.monotonic)
    first_seconds: float | None = None

    def take(self, piece: str | Thought) -> None:
        if self.first_seconds is None:
            self.first_seconds = time.monotonic() - self.started
        self.is_amid_thought = isinstance(piece, Thought)
        self.text += piece if isinstance(piece, str) else ""

    def describe_cost(self) -> str:
        facts = [] if self.first_seconds is None else [f"first token {self.first_seconds:.2f} s"]
        facts.append(f"{time.monotonic() - self.started:.2f} s in all")
        if self.usage and self.usage.num_tokens is not None:
            facts.append(f"{self.usage.num_tokens} tokens")
        if self.usage and self.usage.num_cached_tokens is not None:
            facts.append(f"{self.usage.num_cached_tokens} of {self.usage.num_prompt_tokens} prompt tokens cached")
        if self.is_cut:
            facts.append("cut at the token limit")
        if self.is_stopped:
            facts.append("stopped")
        return f"[{', '.join(facts)}]"


class Chat:
    def __init__(self, server: OpenAIServer, model: str, options: Mapping[str, Any], system: str | None) -> None:
        self.model = model
        self._server, self._options = server, options
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._pictures: list[dict[str, Any]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            **{command: partial(self._attach, command) for command in ("/image", "/video", "/audio", "/file")},
            "/clear": self._clear,
            "/save": self._save,
            "/help": lambda _rest: _note(HELP),
        }

    def converse(self, lines: Iterator[str]) -> int:
        """Process lines until they end or say `/quit`. Return 1 if any of them failed, else 0."""
        status = 0
        for line in map(str.strip, lines):
            if line == "/quit":
                break
            try:
                self._take(line)
            except KeepsightError as error:
                _note(f"error: {error}")
                status = 1
        return status

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            command, _, rest = line.partition(" ")
            if command not in self._commands:
                raise InvalidArgumentError(command, "is not a command; /help lists them")
            self._commands[command](rest.strip())
        elif line:
            # A message must be UTF-8; a file name in a command need not be.
            check_is_text(line, "standard input")
            self._ask(line)

    def _ask(self, text: str) -> None:
        content: Any = [*self._pictures, {"type": "text", "text": text}] if self._pictures else text
        question = {"role": "user", "content": content}
        self._pictures = []
        answer = Answer()
        try:
            self._print(answer, [*self._messages, question])
        except KeyboardInterrupt:
            answer.is_stopped = True
        finally:
            if answer.is_amid_thought:
                _note("")
            if answer.text:
                print(flush=True)
                self._messages += [question, {"role": "assistant", "content": answer.text}]
        _note(answer.describe_cost())

    def _print(self, answer: Answer, messages: list[dict[str, Any]]) -> None:
        with closing(self._server.answer({"model": self.model, "messages": messages, **self._options})) as pieces:
            for piece in pieces:
                if isinstance(piece, Usage):
                    answer.usage = piece
                elif isinstance(piece, Cut):
                    answer.is_cut = True
                elif isinstance(piece, Thought):
                    answer.take(piece)
                    _note(piece.text, end="")
                elif piece:
                    if answer.is_amid_thought:
                        _note("")
                    answer.take(piece)
                    print(strip_controls(piece), end="", flush=True)

    def _attach(self, command: str, typed: str) -> None:
        self._pictures += attach(command, typed)
        _note(f"{len(self._pictures)} attached to the next message")

    def _clear(self, _rest: str) -> None:
        self._messages, self._pictures = list(self._opening), []
        _note("a new conversation")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidArgumentError("/save", "needs a file")
        body = {"model": self.model, "messages": self._messages, **self._options}
        try:
            Path(name).expanduser().write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", "utf-8")
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidArgumentError("/save", f"cannot write {name}: {error}") from error
        _note(f"{len(self._messages)} messages written to {name}")


def _find_model(server: OpenAIServer) -> str:
    try:
        return server.first_model()
    except NoAnswerError as error:
        if error.is_unreachable:
            raise NoAnswerError(
                f"{error}\nStart a server with `keepsight serve`, or name another with --url."
            ) from error
        raise


def _lines() -> Iterator[str]:
    try:
        yield from _typed_lines() if sys.stdin.isatty() else sys.stdin
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("standard input", f"is not {error.encoding}: {error.reason}") from error


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() its editing and its history
    while True:
        try:
            yield _ask_for_line()
        except KeyboardInterrupt:
            _note("\nCtrl-D or /quit leaves")
        except EOFError:
            _note("")
            return


def _ask_for_line() -> str:
    """Read a line. `input` would write its prompt among the answers if these do not go to the terminal."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


def _note(text: str, end: str = "\n") -> None:
    text = strip_controls(text)
    print(f"\x1b[2m{text}\x1b[0m" if _may_be_dim() else text, file=sys.stderr, end=end, flush=True)


def _may_be_dim() -> bool:
    """Return whether to dim notes: on a terminal that can (an editor's window cannot), unless NO_COLOR is set."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")

"""Translate GBNF grammars (`root ::= ...`), as llama.cpp, vLLM and SGLang take them, into Lark.

GBNF has characters and rules, and nothing in between. Lark first splits a text into terminals, each as long as
possible, and misses the end of `[0-9]+ ws` before a newline that `ws` could match, too. So terminals here are single
characters. But if no rule is recursive, the whole grammar is one terminal: a pattern, which is far faster.
One pass without recursion: a hostile text takes no longer than a good one.
"""

import json
import re
from graphlib import CycleError, TopologicalSorter

# No line of Lark can begin like this, and the first rule of GBNF must.
_RULE_HEAD = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
      | (?P<head>[\w-]+[ \t]*::=)
      | (?P<name>[\w-]+)
      | (?P<text>"(?:[^"\\]|\\.)*")
      | (?P<class>\[(?:[^\]\\]|\\.)*\])
      | (?P<any>\.)
      | (?P<open>\()
      | (?P<close>\))
      | (?P<or>\|)
      | (?P<times>[*+?]|\{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\})""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])|[^\\])"
_IN_TEXT = re.compile(f"({_CHARACTER})()", re.DOTALL)
_IN_CLASS = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in "\\\"'[]-^/"}
_MAX_SHOWN = 40

_Token = tuple[str, str, int]  # kind, text, offset


class GbnfError(ValueError):
    """The message says what is wrong, and in which line."""


def is_gbnf(text: str) -> bool:
    return _RULE_HEAD.search(text) is not None


def to_lark(text: str) -> str:
    rules = _read_rules(text)
    called = {name: {spelled for kind, spelled, _ in tokens if kind == "name"} for name, tokens in rules.items()}
    if missing := {"root"}.union(*called.values()) - rules.keys():
        raise GbnfError(f"there is no rule {_show(min(missing))}")
    is_pattern = _is_acyclic(called)
    # Lark tells terminals from rules by their upper-case names.
    names = {name: f"{'R' if is_pattern else 'r'}{index}" for index, name in enumerate(rules)}
    spelled = (
        f"{names[name]}: " + " ".join(_spell(token, text, names, is_pattern) for token in tokens)
        for name, tokens in rules.items()
    )
    return "\n".join((f"start: {names['root']}", *spelled))


def _read_rules(text: str) -> dict[str, list[_Token]]:
    """Return the tokens of each rule by its name, in source order."""
    rules: dict[str, list[_Token]] = {}
    num_open, last = 0, "head"
    for kind, token, place in _split(text):
        if kind == "times" and last not in {"name", "text", "class", "any", "close"}:
            raise _fault(text, place, f"nothing for {token} to repeat")
        num_open += (kind == "open") - (kind == "close")
        if num_open < 0 or (kind == "head" and num_open):
            raise _fault(text, place, "unmatched parenthesis")
        last = kind
        if kind == "head":
            name = token.removesuffix("::=").rstrip()
            if name in rules:
                raise _fault(text, place, f"rule {_show(name)} is defined twice")
            rules[name] = []
        elif not rules:
            raise _fault(text, place, "expected the start of a rule")
        else:
            rules[next(reversed(rules))].append((kind, token, place))
    if num_open:
        raise _fault(text, len(text), "unmatched parenthesis")
    return rules


def _split(text: str) -> list[_Token]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _fault(text, place, f"cannot be parsed: {_show(text[place:])}")
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match[0], place))
        place = match.end()
    return tokens


def _is_acyclic(called: dict[str, set[str]]) -> bool:
    try:
        TopologicalSorter(called).prepare()
    except CycleError:
        return False
    return True


def _spell(token: _Token, text: str, names: dict[str, str], is_pattern: bool) -> str:
    kind, spelled, place = token
    if kind == "name":
        return names[spelled]
    if kind == "any":
        return "/(?s:.)/"
    if kind == "times":
        return re.sub(r"\s", "", spelled)
    if kind == "text":
        characters = "".join(first for first, _ in _read_characters(_IN_TEXT, spelled[1:-1], text, place))
        if is_pattern:
            return json.dumps(characters)
        return f"({' '.join(map(json.dumps, characters))})"
    if kind == "class":
        return _spell_class(spelled[1:-1], text, place)
    return spelled


def _spell_class(inner: str, text: str, place: int) -> str:
    negation = "^" if inner.startswith("^") else ""
    ranges = _read_characters(_IN_CLASS, inner[len(negation) :], text, place)
    if not ranges:
        raise _fault(text, place, "empty character class")
    if any(last and last < first for first, last in ranges):
        raise _fault(text, place, f"range ends before it begins: {_show(inner)}")
    return f"/[{negation}{''.join('-'.join(map(_in_pattern, filter(None, each))) for each in ranges)}]/"


def _in_pattern(character: str) -> str:
    return character if character.isalnum() else f"\\u{{{ord(character):x}}}"


def _read_characters(expression: re.Pattern[str], inner: str, text: str, place: int) -> list[tuple[str, str]]:
    """Return characters and ranges as pairs (first, last); for a single character, `last` is empty."""
    read, end = [], 0
    while end < len(inner):
        match = expression.match(inner, end)
        if match is None:
            raise _fault(text, place, f"invalid escape: {_show(inner[end:])}")
        first, last = (_unescape(each or "", text, place) for each in match.groups())
        read.append((first, last))
        end = match.end()
    return read


def _unescape(spelled: str, text: str, place: int) -> str:
    if not spelled.startswith("\\"):
        return spelled
    if spelled[1] not in "xuU":
        if spelled[1] not in _ESCAPES:
            raise _fault(text, place, f"invalid escape: {_show(spelled)}")
        return _ESCAPES[spelled[1]]
    code = int(spelled[2:], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise _fault(text, place, f"not a character: {spelled}")
    return chr(code)


def _fault(text: str, place: int, what: str) -> GbnfError:
    return GbnfError(f"line {text.count(chr(10), 0, place) + 1}: {what}")


def _show(part: str) -> str:
    return repr(part if len(part) <= _MAX_SHOWN else part[:_MAX_SHOWN] + "...")

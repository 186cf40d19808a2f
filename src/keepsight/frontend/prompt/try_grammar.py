"""A program: compiles the grammar on its standard input as the engine will, and writes why that cannot be done.

`check_grammar.py` runs it; its arguments are limits. It imports nothing of Keepsight, which would take longer than
most grammars.
"""

import json
import re
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# No vocabulary is larger.
MAX_TOKENS = 2**19
_TOKEN = re.compile(r"<[^<>\s]+>")
# llguidance fails on longer names.
MAX_NAME_BYTES = 255


class _Bytes:
    """A vocabulary of the bytes, and of what a grammar refers to: which tokens exist only the engine knows."""

    bos_token_id = None

    def __init__(self, grammar: str) -> None:
        names = {name for name in _find_names(grammar) if len(name.encode()) <= MAX_NAME_BYTES}
        ids = [int(each) for name in names if name.startswith("<[") for each in re.findall("[0-9]{1,9}", name)]
        self.tokens = [*(bytes([each]) for each in range(256)), b"<eos>", *(name.encode() for name in sorted(names))]
        self.eos_token_id = 256
        self.special_token_ids = range(256, len(self.tokens))
        self.tokens += [b""] * (min(max(ids, default=0) + 1, MAX_TOKENS) - len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


def _find_names(grammar: str) -> list[str]:
    return [name for part in json.loads(grammar)["grammars"] for name in _TOKEN.findall(part.get("lark_grammar", ""))]


def find_fault(grammar: str, max_lexer_states: int, max_items_in_row: int) -> str:
    """Return llguidance's message without the parser's state and the whole grammar; empty if the grammar compiles."""
    limits = LLParserLimits(max_lexer_states=max_lexer_states, max_items_in_row=max_items_in_row)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes(grammar))), grammar, log_level=0, limits=limits)
    return str(matcher.get_error()).partition("\n<state>")[0] if matcher.is_error() else ""


if __name__ == "__main__":
    max_bytes, max_seconds, *engine_limits = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds))
    sys.stdout.write(find_fault(sys.stdin.read(), *engine_limits))

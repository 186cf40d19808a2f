"""Rejects a schema or a grammar that cannot be compiled, before it reaches the engine.

A few hundred characters can keep a compiler busy for hours (intersections of patterns), and nothing within the process
could stop it. So each unknown grammar is compiled once in a subprocess with limits on its time and its memory, exactly
as the engine will, except for the vocabulary, which hardly matters. The verdict is cached; a timeout because no CPU was
free is not a verdict. Whoever must not wait for a try gets an `UnknownGrammarError` instead.
"""

import hashlib
import importlib.util
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from keepsight.errors import InvalidArgumentError, ServerOverloadedError, UnsupportedFieldError
from keepsight.lru_cache import LruCache
from keepsight.program_identity import PYTHON
from keepsight.structured_outputs import MAX_ITEMS_IN_ROW, MAX_LEXER_STATES, StructuredOutputsParams

MAX_BYTES, MAX_CPU_SECONDS = 2**31, 5
# With a CPU to itself, a process would have ended earlier, or hit the limit above.
MAX_SECONDS = 2 * MAX_CPU_SECONDS
# An empty verdict with its grammar's digest takes some 500.
MAX_REMEMBERED_BYTES = 2**20
MAX_MESSAGE_CHARACTERS = 500
# What llguidance says of a `oneOf` unless it sees that no value can match two of its schemas, and what a caller can do.
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_INSTEAD_OF_ONE_OF = (
    "a value is not seen to match only one schema of a oneOf: write anyOf, "
    'or add "x-guidance": {"coerce_one_of": true} to the whole schema, by which oneOf means anyOf'
)
_PROGRAM = Path(__file__).with_name("try_grammar.py")


NUM_PROCESSES = 2
_may_try: ContextVar[bool] = ContextVar("_may_try", default=True)


class UnknownGrammarError(Exception):
    """Raised for a grammar that was not tried yet."""

    def __init__(self, grammar: str) -> None:
        super().__init__("a grammar was not tried yet")
        self.grammar = grammar


@contextmanager
def without_tries() -> Iterator[None]:
    """Have a grammar without a verdict raise UnknownGrammarError, also in threads that are started within."""
    before = _may_try.set(False)
    try:
        yield
    finally:
        _may_try.reset(before)


def try_grammar(grammar: str) -> None:
    """Find the verdict, which is remembered."""
    _CHECKER.find_fault(grammar)


def check_structured_outputs(structured: StructuredOutputsParams | None, field: str | None = None) -> None:
    """Raise an error if the grammar asked for cannot be compiled. `field`: the caller's name for it."""
    if structured is None:
        return
    field = field or structured.path
    if importlib.util.find_spec("llguidance") is None:
        raise UnsupportedFieldError(field, "needs llguidance, which is not installed on this server")
    if fault := _CHECKER.find_fault(structured.to_grammar()):
        raise InvalidArgumentError(field, f"cannot be compiled: {fault}")


class GrammarChecker:
    def __init__(self, num_processes: int = NUM_PROCESSES) -> None:
        # By the grammars' digests, as grammars are long. An empty verdict means that the grammar compiles.
        self._verdicts = LruCache[bytes, str](MAX_REMEMBERED_BYTES, lambda verdict: 500 + len(verdict))
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(num_processes)

    def find_fault(self, grammar: str) -> str:
        """Return why the grammar cannot be compiled; empty if it can."""
        digest = hashlib.blake2b(grammar.encode(), digest_size=32).digest()
        if (known := self._recall(digest)) is not None:
            return known
        if not _may_try.get():
            raise UnknownGrammarError(grammar)
        with self._turns:
            # Another thread may have checked the same grammar while we waited.
            known = self._recall(digest)
            verdict = _try_to_compile(grammar) if known is None else known
        with self._lock:
            self._verdicts.put_if_fits(digest, verdict)
        return verdict

    def _recall(self, digest: bytes) -> str | None:
        with self._lock:
            return self._verdicts.get_and_update(digest)


_CHECKER = GrammarChecker()


def _try_to_compile(grammar: str) -> str:
    limits = (MAX_BYTES, MAX_CPU_SECONDS, MAX_LEXER_STATES, MAX_ITEMS_IN_ROW)
    command = [*PYTHON, str(_PROGRAM), *map(str, limits)]
    try:
        done = subprocess.run(
            command, input=grammar, capture_output=True, text=True, encoding="utf-8", timeout=MAX_SECONDS
        )
    except OSError as error:  # no process can be started, or no file opened
        raise ServerOverloadedError(f"no grammar can be compiled at the moment, try again: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        message = f"a grammar was not compiled within {MAX_SECONDS} seconds, as the machine is too busy; try again"
        raise ServerOverloadedError(message) from error
    if done.returncode:
        return f"it takes more than {MAX_CPU_SECONDS} seconds or 2 GiB of memory"
    return _shorten(done.stdout.strip().replace(_ONE_OF, _INSTEAD_OF_ONE_OF))


def _shorten(message: str) -> str:
    """Cut out the middle of a long message: the fault is often told at the end, after the whole grammar."""
    half = MAX_MESSAGE_CHARACTERS // 2
    return message if len(message) <= 2 * half else f"{message[:half]} ... {message[-half:]}"

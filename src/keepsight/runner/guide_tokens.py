"""Keeps answers to a grammar (structured outputs): tells which tokens each guided sequence may say next.

Grammars are compiled on a separate thread, and a request is computed once its grammar is compiled: all streams would
otherwise wait for it in the step of its first token. A guide follows one sequence and its errors fail that sequence
alone; `fault` says whether the grammar or the server is to blame. A thought before the answer is not constrained.
Knows nothing of how a token is chosen. llguidance is imported with the first grammar, or by `prepare`.
"""

import itertools
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor

from keepsight.requests import ThoughtTokens
from keepsight.scheduling.step_plan import Fault
from keepsight.structured_outputs import MAX_ITEMS_IN_ROW, MAX_LEXER_STATES, StructuredOutputsParams
from keepsight.token_bytes import read_token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)
MAX_KEPT = 64
# An object with 2,000 optional properties takes 10 ms, JSON in GBNF 20 ms with the largest vocabularies.
SECONDS_PER_TOKEN = 0.05
MAX_EXCESS_SECONDS = 1.0
_TOO_SLOW = f"finding the next tokens takes more than {SECONDS_PER_TOKEN} seconds for each"


class GrammarError(Exception):
    """Raised for a grammar that cannot be followed: it refers to something undefined, or is too large."""


class GuideTime:
    """The processor time that the guides of one request may take.

    Each step waits for the masks of all its sequences, and an ambiguous grammar of a few characters can make masks take
    seconds. Some slow masks are fine: what counts is the time beyond `SECONDS_PER_TOKEN`, less what others left of it.
    """

    def __init__(self) -> None:
        self._excess = 0.0

    @contextmanager
    def counting(self, allowed: float = 0.0) -> Iterator[None]:
        began = thread_time()
        yield
        self._excess = max(0.0, self._excess + thread_time() - began - allowed)

    @property
    def is_spent(self) -> bool:
        return self._excess > MAX_EXCESS_SECONDS


@dataclass(slots=True)
class CompiledGrammar:
    matcher: "LLMatcher"
    # Set once a request has spent its time on it: each that asks for it again would stall everybody again.
    is_too_slow: bool = False

    def begin(self) -> "LLMatcher":
        if self.is_too_slow:
            raise GrammarError(_TOO_SLOW)
        return self.matcher.deep_copy()


class Guide:
    """One sequence's place in its grammar."""

    def __init__(
        self,
        compiled: Future[CompiledGrammar],
        field: str,
        thought: ThoughtTokens | None = None,
        time: GuideTime | None = None,
    ) -> None:
        """Initialize; `field` names the grammar's request field, `thought` the tags of a thought before the answer."""
        self._compiled, self._field, self._time = compiled, field, time or GuideTime()
        # The token that would begin a thought now, and the one that ends a thought.
        self._opening = None if thought is None else thought.opening
        self._closing = None if thought is None else thought.closing
        self._is_thinking = thought is not None and thought.opening is None
        self._matcher: LLMatcher | None = None
        self.fault: Fault | None = None

    def mask(self) -> bytes | None:
        """Return a bit for each token of the tokenizer, set if allowed; None if any token is allowed now."""
        if self._is_thinking:
            return None
        matcher = self._find_matcher()
        if matcher is None:
            return None
        with self._time.counting(SECONDS_PER_TOKEN):
            mask: bytes = matcher.compute_bitmask()
        self._note_faults(matcher)
        if self.fault:
            return None
        return mask if self._opening is None else _with_token(mask, self._opening)

    def follow(self, token_id: int) -> None:
        """Advance by a sampled token.

        The token that ends an answer is no part of what the grammar describes; none follows it.
        """
        may_open, self._opening = self._opening, None
        if self._is_thinking or token_id == may_open:
            self._is_thinking = token_id != self._closing
            return
        matcher = self._find_matcher()
        if matcher is not None and not matcher.is_stopped():
            with self._time.counting():
                matcher.consume_token(token_id)
            self._note_faults(matcher)

    def _find_matcher(self) -> "LLMatcher | None":
        """Return this guide's matcher, which rarely has to be waited for; None if there is a fault."""
        if self._time.is_spent and self.fault is None:
            self._blame_grammar(_TOO_SLOW)
        if self._matcher is None and self.fault is None:
            try:
                self._matcher = self._compiled.result().begin()
            except GrammarError as error:
                self._blame_grammar(str(error))
            except Exception as error:
                logger.exception("cannot make a guide for this grammar")
                self.fault = Fault(f"structured outputs: {error}")
        return None if self.fault else self._matcher

    def _note_faults(self, matcher: "LLMatcher") -> None:
        if self._time.is_spent:
            self._compiled.result().is_too_slow = True
        if matcher.is_error():
            self._blame_grammar(_short_error(matcher))

    def _blame_grammar(self, error: str) -> None:
        self.fault = Fault(f"the answer cannot be constrained to it: {error}", self._field)


class GuideMaker:
    """Makes guides for one tokenizer; compiled grammars are kept, and the least recently used are dropped first."""

    def __init__(self, tokenizer_path: Path | None, end_ids: frozenset[int]) -> None:
        self._path, self._end_ids = tokenizer_path, end_ids
        # Starts with the first grammar.
        self._thread = ThreadPoolExecutor(1, "guides")
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        # All that are kept here or held by whoever waits for them or uses them.
        self._in_use = WeakValueDictionary[str, Future[CompiledGrammar]]()

    def prepare(self) -> "Future[LLTokenizer]":
        """Read the tokenizer now instead of with the first grammar.

        For a vocabulary of 262,144 this takes two seconds, and blocks the whole process for most of them: all streams
        would stall.
        """
        return self._thread.submit(self._find_tokenizer)

    def compile(self, form: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """Begin to compile a form's grammar unless it is kept, or being compiled."""
        grammar = form.to_grammar()
        compiled = self._in_use.get(grammar)
        if compiled is None:
            compiled = self._in_use[grammar] = self._thread.submit(self._compile, grammar)
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return compiled

    def begin(
        self, form: StructuredOutputsParams, thought: ThoughtTokens | None = None, time: GuideTime | None = None
    ) -> Guide:
        return Guide(self.compile(form), form.path, thought, time)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _find_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._path is None:
            raise ValueError("this model has no tokenizer")
        if self._tokenizer is None:
            vocabulary = _Vocabulary(self._path, self._end_ids)
            self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.end_ids or None)
        return self._tokenizer

    def _compile(self, grammar: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS_IN_ROW)
        matcher = LLMatcher(self._find_tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_short_error(matcher))
        return CompiledGrammar(matcher)


def _short_error(matcher: "LLMatcher") -> str:
    """Return the error without the parser state and whole grammar that llguidance appends, as it is logged."""
    return str(matcher.get_error()).partition("\n<state>")[0]


class _Vocabulary:
    """A tokenizer in the form that llguidance expects: no text becomes a special token, whatever it spells.

    By itself llguidance reads a required text `<eos>` as the token, which has no text, and takes added tokens that look
    like tags, such as `<table>`, for special ones; it fails on both.
    """

    def __init__(self, path: Path, end_ids: frozenset[int]) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(path))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special]
        token_bytes, ids = read_token_bytes(self._backend), range(max(self._backend.get_vocab().values()) + 1)
        # A checkpoint may name end ids that its tokenizer lacks.
        self.end_ids = sorted(end_ids.intersection(ids))
        self.bos_token_id = None
        self.eos_token_id = min(self.end_ids, default=0)
        # Empty where an id has no token.
        self.tokens = [*map(token_bytes.of, ids)]
        of_bytes = [each for each in ids if token_bytes.is_bytes(each)]
        self._byte_ids = {self.tokens[each][0]: each for each in of_bytes if len(self.tokens[each]) == 1}
        if token_bytes.drops_first_space:
            _write_no_first_space(self._backend)
        if len(of_bytes) == len(ids):
            # Tokens can spell any text as it is, while a normalizer such as NFC would change it.
            self._backend.normalizer = None

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text; characters without tokens are spelled in bytes if all bytes have tokens."""
        whole = self._try_encode(text)
        if whole is not None:
            return whole
        has_tokens = {each: self._try_encode(each) is not None for each in set(text)}
        runs = ("".join(run) for _, run in itertools.groupby(text, has_tokens.__getitem__))
        return [each for run in runs for each in self._try_encode(run) or map(self._byte_ids.__getitem__, run.encode())]

    def _try_encode(self, text: str) -> list[int] | None:
        """Return None if the tokens spell another text, as Gemma's do for `▁`: they spell a space."""
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        is_spelled = len(self._byte_ids) < 256 or b"".join(self.tokens[each] for each in token_ids) == text.encode()
        return token_ids if is_spelled else None


def forbid_tokens(logits: Tensor, guides: Sequence[Guide | None]) -> None:
    """Set what each row's guide forbids to minus infinity in `logits` [sequences, vocabulary]."""
    masks = {row: mask for row, guide in enumerate(guides) if guide is not None and (mask := guide.mask()) is not None}
    if not masks:
        return
    forbidden = _unpack(np.stack([np.frombuffer(mask, np.uint8) for mask in masks.values()]), logits)
    for row, each in zip(masks, forbidden, strict=True):
        logits[row].masked_fill_(each, float("-inf"))


def _with_token(mask: bytes, token_id: int) -> bytes:
    byte, bit = divmod(token_id, 8)
    return mask[:byte] + bytes([mask[byte] | 1 << bit]) + mask[byte + 1 :]


def _unpack(masks: npt.NDArray[np.uint8], logits: Tensor) -> Tensor:
    """Turn bits that allow into booleans that forbid [rows, vocabulary]; ids that the tokenizer lacks are forbidden."""
    vocab_size = logits.shape[1]
    bits = np.unpackbits(~masks, axis=1, bitorder="little")[:, :vocab_size]
    forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    return torch.nn.functional.pad(forbidden, (0, vocab_size - forbidden.shape[1]), value=True)


def _write_no_first_space(backend: tokenizers.Tokenizer) -> None:
    """Stop the tokenizer from writing a space before each text: here every text continues earlier output."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=backend.pre_tokenizer.split)
    if backend.normalizer is not None:
        normalizer = json.loads(backend.normalizer.__getstate__())
        steps = [each for each in normalizer.get("normalizers", [normalizer]) if each["type"] != "Prepend"]
        normalizer = normalizers.Sequence([])
        normalizer.__setstate__(json.dumps({"type": "Sequence", "normalizers": steps}).encode())
        backend.normalizer = normalizer

"""Keeps answers to a grammar: which tokens each guided sequence may say next.

A grammar is compiled on a thread of its own from when its sequence is made known, and waited for only with the first
token.  A guide follows its own sequence and no other; what goes wrong with it is that sequence's fault alone, told by
`fault`: its grammar's, or ours.  What is thought before an answer is free.  Knows nothing of how a token is chosen.
llguidance is imported with the first grammar, or by `prepare`.
"""

import itertools
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor

from keepsight.requests import ThoughtTokens
from keepsight.scheduling.step_plan import Fault
from keepsight.structured_outputs import StructuredOutputsParams
from keepsight.token_bytes import read_token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)
MAX_COMPILED = 64
# Of one or two kilobytes each; a pattern can be made to grow them without end.
MAX_LEXER_STATES = 50_000


class GrammarError(Exception):
    """Of a grammar that cannot be followed: it names what there is not, or is too large."""


class Guide:
    """One sequence's place in its grammar."""

    def __init__(self, compiled: "Future[LLMatcher]", field: str, thought: ThoughtTokens | None = None) -> None:
        """`field`: where in the request the grammar stands; `thought`: what may be before what it describes."""
        self._compiled, self._field = compiled, field
        # The token that would begin a thought now, and the one that ends what has begun.
        self._opening = None if thought is None else thought.opening
        self._closing = None if thought is None else thought.closing
        self._is_thinking = thought is not None and thought.opening is None
        self._matcher: LLMatcher | None = None
        self.fault: Fault | None = None

    def mask(self) -> bytes | None:
        """A bit for each token of the tokenizer, None if it has no say now."""
        if self._is_thinking:
            return None
        matcher = self._find_matcher()
        if matcher is None:
            return None
        mask: bytes = matcher.compute_bitmask()
        self._note_fault(matcher)
        if self.fault:
            return None
        return mask if self._opening is None else _with_token(mask, self._opening)

    def follow(self, token_id: int) -> None:
        """The end of an answer is no part of what the grammar describes, and the last that is heard of it."""
        may_open, self._opening = self._opening, None
        if self._is_thinking or token_id == may_open:
            self._is_thinking = token_id != self._closing
            return
        matcher = self._find_matcher()
        if matcher is not None and not matcher.is_stopped():
            matcher.consume_token(token_id)
            self._note_fault(matcher)

    def _find_matcher(self) -> "LLMatcher | None":
        """Waits until the grammar is compiled."""
        if self._matcher is None and self.fault is None:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except GrammarError as error:
                self._blame_grammar(str(error))
            except Exception as error:
                logger.exception("no guide for this grammar")
                self.fault = Fault(f"structured outputs: {error}")
        return None if self.fault else self._matcher

    def _note_fault(self, matcher: "LLMatcher") -> None:
        if matcher.is_error():
            self._blame_grammar(_tell_error(matcher))

    def _blame_grammar(self, error: str) -> None:
        self.fault = Fault(f"the answer cannot be kept to it: {error}", self._field)


class GuideMaker:
    """Of one tokenizer; its grammars are compiled once and kept, the least recently used going first."""

    def __init__(self, tokenizer_path: Path | None, end_ids: frozenset[int]) -> None:
        self._path, self._end_ids = tokenizer_path, end_ids
        # Begun with the first grammar.
        self._thread = ThreadPoolExecutor(1, "guides")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def prepare(self) -> "Future[LLTokenizer]":
        """Reads the tokenizer, which the first grammar does otherwise.

        Of a vocabulary of 262,144 it takes two seconds, through most of which nothing else runs in this process: all
        streams would stand still.
        """
        return self._thread.submit(self._find_tokenizer)

    def begin(self, form: StructuredOutputsParams, thought: ThoughtTokens | None = None) -> Guide:
        grammar = form.to_grammar()
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return Guide(self._compiled[grammar], form.path, thought)

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

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        matcher = LLMatcher(self._find_tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_tell_error(matcher))
        return matcher


def _tell_error(matcher: "LLMatcher") -> str:
    """Without what llguidance puts behind it, the parser's state and the whole grammar: this goes into the log."""
    return str(matcher.get_error()).partition("\n<state>")[0]


class _Vocabulary:
    """A tokenizer as llguidance asks for it: no text is a special token, whatever it spells.

    By itself it reads a demanded `<eos>` as the token, which is no text, and takes for special what is added and looks
    like a tag, such as `<table>`; over both it falls.
    """

    def __init__(self, path: Path, end_ids: frozenset[int]) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(path))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special]
        token_bytes, ids = read_token_bytes(self._backend), range(max(self._backend.get_vocab().values()) + 1)
        # A checkpoint may name some that its tokenizer lacks.
        self.end_ids = sorted(end_ids.intersection(ids))
        self.bos_token_id = None
        self.eos_token_id = min(self.end_ids, default=0)
        # Nothing where an id has no token.
        self.tokens = [*map(token_bytes.of, ids)]
        in_runs = [each for each in ids if token_bytes.is_in_run(each)]
        self._byte_ids = {self.tokens[each][0]: each for each in in_runs if len(self.tokens[each]) == 1}
        if token_bytes.drops_first_space:
            _write_no_first_space(self._backend)
        if len(in_runs) == len(ids):
            # Every text can be said as it stands; composed, as by NFC, it would be another.
            self._backend.normalizer = None

    def __call__(self, text: str) -> list[int]:
        """What its tokens do not say is said in bytes, where there are tokens of all bytes."""
        whole = self._try_encode(text)
        if whole is not None:
            return whole
        has_tokens = {each: self._try_encode(each) is not None for each in set(text)}
        runs = ("".join(run) for _, run in itertools.groupby(text, has_tokens.__getitem__))
        return [each for run in runs for each in self._try_encode(run) or map(self._byte_ids.__getitem__, run.encode())]

    def _try_encode(self, text: str) -> list[int] | None:
        """None where the tokens say another text, as Gemma's do of `▁`: they say a space."""
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        is_said = len(self._byte_ids) < 256 or b"".join(self.tokens[each] for each in token_ids) == text.encode()
        return token_ids if is_said else None


def forbid_tokens(logits: Tensor, guides: Sequence[Guide | None]) -> None:
    """`logits` [sequences, vocabulary]: what a row's guide rules out becomes minus infinity."""
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
    """From bits that allow to booleans that forbid [rows, vocabulary]; what the tokenizer lacks is forbidden."""
    vocab_size = logits.shape[1]
    bits = np.unpackbits(~masks, axis=1, bitorder="little")[:, :vocab_size]
    forbidden = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    return torch.nn.functional.pad(forbidden, (0, vocab_size - forbidden.shape[1]), value=True)


def _write_no_first_space(backend: tokenizers.Tokenizer) -> None:
    """Whatever is encoded goes on with what was said."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=backend.pre_tokenizer.split)
    if backend.normalizer is not None:
        said = json.loads(backend.normalizer.__getstate__())
        steps = [each for each in said.get("normalizers", [said]) if each["type"] != "Prepend"]
        normalizer = normalizers.Sequence([])
        normalizer.__setstate__(json.dumps({"type": "Sequence", "normalizers": steps}).encode())
        backend.normalizer = normalizer

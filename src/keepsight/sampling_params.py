"""How the tokens of one answer are sampled: vLLM's `SamplingParams`, with its names, defaults and ranges.

Every instance is valid: all fields are checked and normalized once, on construction. The vocabulary and the context
length are not known here; their limits are checked elsewhere.
"""

import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.other_options import find_closest
from keepsight.structured_outputs import StructuredOutputsParams

MAX_CHOICES = 128  # OpenAI's limit: every choice is a sequence that the engine keeps
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_CHARACTERS = 64 * 2**10  # of all stop strings, and of all bad words
# More than any model's vocabulary.
MAX_TOKEN_IDS = 2**19
MIN_TEMPERATURE = 0.01  # as in vLLM: below this, logits / temperature overflows; 0 itself means greedy
# Beyond these, float32 overflows, and NaN logits could be drawn in spite of any ban. Clamping changes nothing else.
MAX_TEMPERATURE = 1e30
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30
MAX_COUNT = 2**31 - 1

# What stands for a name of older versions of vLLM, or of OpenAI's API.
_RENAMED = {
    "guided_decoding": "structured_outputs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "response_format": "structured_outputs",
}
# Names of vLLM's that are not implemented here.
_NOT_IMPLEMENTED = frozenset(
    {
        "best_of",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "logits_processors",
        "logprob_token_ids",
        "output_kind",
        "repetition_detection",
        "skip_reading_prefix_cache",
        "spaces_between_special_tokens",
        "thinking_token_budget",
        "truncate_prompt_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class _Range:
    """The numbers that one field accepts, and how messages describe them."""

    described: str
    low: float = -math.inf
    high: float = math.inf
    is_integer: bool = False
    excludes_low: bool = False

    def accept(self, name: str, value: object) -> Any:
        number = self._to_number(value)
        if number is None or not self._holds(number):
            _refuse(name, value, self.described)
        return number

    def _to_number(self, value: object) -> int | float | None:
        if isinstance(value, bool):
            return None
        if isinstance(value, numbers.Integral) and self.is_integer:
            return int(value)
        if isinstance(value, numbers.Real) and not self.is_integer:
            return _to_finite_float(value)
        return None

    def _holds(self, number: int | float) -> bool:
        return self.low <= number <= self.high and not (self.excludes_low and number == self.low)


_RANGES = {
    "n": _Range(f"an integer from 1 to {MAX_CHOICES}", 1, MAX_CHOICES, is_integer=True),
    "temperature": _Range("a number of at least 0", 0),
    "top_p": _Range("a number above 0 and at most 1", 0, 1, excludes_low=True),
    "top_k": _Range(
        f"an integer from 1 to {MAX_COUNT}, or 0 or -1 to consider all tokens", -1, MAX_COUNT, is_integer=True
    ),
    "min_p": _Range("a number from 0 to 1", 0, 1),
    "presence_penalty": _Range("a number from -2 to 2", -2, 2),
    "frequency_penalty": _Range("a number from -2 to 2", -2, 2),
    "repetition_penalty": _Range("a number above 0", 0, excludes_low=True),
    "min_tokens": _Range(f"an integer from 0 to {MAX_COUNT}", 0, MAX_COUNT, is_integer=True),
}
_NUM_LOGPROBS = _Range(f"an integer from 0 to {MAX_LOGPROBS}, or None", 0, MAX_LOGPROBS, is_integer=True)
_OPTIONAL_RANGES = {
    "seed": _Range("a 64-bit integer or None", -(2**63), 2**63 - 1, is_integer=True),
    "max_tokens": _Range("an integer of at least 1, or None", 1, is_integer=True),
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_TOKEN_ID = _Range(f"a token id: an integer from 0 to {MAX_COUNT}", 0, MAX_COUNT, is_integer=True)
_BIAS = _Range("a number from -100 to 100", -100, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()  # a tuple, once constructed
    bad_words: Sequence[str] = ()  # a tuple, once constructed
    stop_token_ids: Sequence[int] = ()  # a tuple, once constructed
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as much as the context holds
    min_tokens: int = 0
    logprobs: int | None = None  # 0: only for the sampled token
    prompt_logprobs: int | None = None  # for the prompt's tokens, all of which are then recomputed
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None  # a tuple, once constructed
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    # A likely answer, such as a text to be corrected: where the answer matches it, it takes fewer steps.
    prediction: str | None = None

    def __new__(cls, *unnamed: object, **named: object) -> "SamplingParams":
        """Refuse what the generated `__init__` would, with a better message than its TypeError."""
        if unnamed:  # if the order differs from vLLM's, they would mean something else
            raise TypeError("SamplingParams takes only keyword arguments, such as temperature=0")
        for name in named:
            _check_is_known(name)
        return object.__new__(cls)

    def clone(self) -> "SamplingParams":
        """Return a copy, as vLLM's method does."""
        return replace(self)

    def __post_init__(self) -> None:
        for name, accepted in _RANGES.items():
            self._set(name, accepted.accept(name, getattr(self, name)))
        for name, accepted in _OPTIONAL_RANGES.items():
            if (value := getattr(self, name)) is not None:
                self._set(name, accepted.accept(name, value))
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                _refuse(name, value, "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _to_strings("stop", stop, MAX_STOP_STRINGS))
        self._set("bad_words", _to_strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        self._set("stop_token_ids", _to_token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _to_token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidArgumentError("allowed_token_ids", "is empty, so no token could be chosen")
        if not isinstance(self.prediction, str | None):
            _refuse("prediction", self.prediction, "a string or None")
        self._set("logit_bias", _to_logit_bias(self.logit_bias))
        self._check_structured_outputs()
        self._settle_special_values()

    def _check_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            _refuse("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        if self.ignore_eos:
            raise InvalidArgumentError(
                "ignore_eos", "cannot be combined with structured outputs: a complete form ends the answer"
            )

    def _settle_special_values(self) -> None:
        if 0 < self.temperature < MIN_TEMPERATURE:
            self._set("temperature", MIN_TEMPERATURE)
        self._set("temperature", min(self.temperature, MAX_TEMPERATURE))
        penalty = min(max(self.repetition_penalty, MIN_REPETITION_PENALTY), MAX_REPETITION_PENALTY)
        self._set("repetition_penalty", penalty)
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.seed == -1:  # as vLLM: "no seed"
            self._set("seed", None)
        if self.max_tokens is not None:
            # Clients express "no limit" as the largest number they have.
            self._set("max_tokens", min(self.max_tokens, MAX_COUNT))
            if self.min_tokens > self.max_tokens:
                _refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def ids_that_end(self, end_ids: frozenset[int]) -> frozenset[int]:
        """Return the token ids that end the answer. `end_ids` are the model's own."""
        return (frozenset() if self.ignore_eos else end_ids) | frozenset(self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _change(params: SamplingParams, name: str, value: Any) -> None:
    """Set a field (`params.max_tokens = 7`), as vLLM's users do, with full validation. Unused within the package."""
    changed = replace(params, **{name: value})
    for each in fields(SamplingParams):
        params._set(each.name, getattr(changed, each.name))


SamplingParams.__setattr__ = _change  # type: ignore[assignment, method-assign]


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise InvalidArgumentError(name, f"must be {expected}, not {shown}")


def _check_is_known(name: str) -> None:
    known = SamplingParams.__dataclass_fields__
    if name in known:
        return
    if name in _NOT_IMPLEMENTED:
        raise UnsupportedFieldError(name, "is not supported")
    meant = _RENAMED.get(name) or find_closest(name, known)
    hint = f"did you mean {meant!r}?" if meant else f"known are {', '.join(known)}"
    raise UnsupportedFieldError(name, f"is not a sampling parameter; {hint}")


def _to_finite_float(value: numbers.Real) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _to_strings(name: str, values: object, max_count: int) -> tuple[str, ...]:
    strings = () if values is None else _to_tuple(name, values, "a list of strings")
    if len(strings) > max_count:
        raise InvalidArgumentError(name, f"must hold at most {max_count} strings, not {len(strings)}")
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            _refuse(f"{name}[{index}]", string, "a string of at least one character")
    if sum(map(len, strings)) > MAX_CHARACTERS:
        raise InvalidArgumentError(name, f"must hold at most {MAX_CHARACTERS} characters in all")
    return strings


def _to_token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    values = _to_tuple(name, token_ids, "a list of token ids")
    _check_num_ids(name, len(values))
    if _are_all(int, values, _TOKEN_ID):
        return values
    return tuple(_TOKEN_ID.accept(f"{name}[{index}]", value) for index, value in enumerate(values))


def _are_all(type_: type, values: Collection[Any], accepted: _Range) -> bool:
    """Return whether all values are valid as they are. There may be many: only if this fails is each one checked."""
    if set(map(type, values)) != {type_}:
        return False
    return accepted.low <= min(values) and max(values) <= accepted.high and all(map(math.isfinite, values))


def _check_num_ids(name: str, num_ids: int) -> None:
    """Check the number of token ids before looking at any: there may be millions."""
    if num_ids > MAX_TOKEN_IDS:
        raise InvalidArgumentError(name, f"must hold at most {MAX_TOKEN_IDS} token ids, not {num_ids}")


def _to_tuple(name: str, values: object, expected: str) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        _refuse(name, values, expected)
    return tuple(values)


def _to_logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        _refuse("logit_bias", bias, "a mapping of token ids to biases")
    _check_num_ids("logit_bias", len(bias))
    if _are_all(int, bias, _TOKEN_ID) and _are_all(float, bias.values(), _BIAS):
        return dict(bias)
    read: dict[int, float] = {}
    for key, value in bias.items():
        field = f"logit_bias[{key!r}]"
        token_id = _to_biased_id(key, field)
        if token_id in read:
            raise InvalidArgumentError(field, f"must be given once, but token {token_id} has a bias already")
        read[token_id] = _BIAS.accept(field, value)
    return read or None


def _to_biased_id(key: object, field: str) -> int:
    """Return the token id of a key. JSON keys are strings, so "12" is 12."""
    is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
    token_id: int = _TOKEN_ID.accept(field, int(str(key)) if is_digits else key)
    return token_id

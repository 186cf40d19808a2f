"""Decodes token ids one at a time, and returns text as soon as it is certain.

The returned pieces, joined, are one decode() of all the tokens, cut at the first stop string to appear. Two things are
held back: the bytes of a character until it is complete, and text that may be the beginning of a stop string. A stop
string ends the answer with the token that completes it.
"""

from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.sampling_params import SamplingParams
from keepsight.token_bytes import BytesReader


class TextStreamer:
    """Decodes the text of one choice of one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, continues_prompt: bool = False) -> None:
        """`continues_prompt`: the text continues the prompt's, so that a space at its beginning is kept."""
        self._tokenizer = tokenizer
        self._skips_special_tokens = params.skip_special_tokens
        # An answer that must have a form has it with all the text of its tokens, the space included.
        drops_space = tokenizer.drops_first_space and not continues_prompt and params.structured_outputs is None
        self._stop = _StopStrings(tuple(params.stop), params.include_stop_str_in_output, drops_space)
        self._bytes = BytesReader()
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; the caller must then tell the engine, and push no more tokens."""
        return self._stop.found

    @property
    def has_undecoded_bytes(self) -> bool:
        """True while the text of the last bytes is not known yet."""
        return self._bytes.is_incomplete

    def push(self, token_id: int, is_stop_token: bool = False) -> str:
        """Return the text that is now certain.

        `is_stop_token`: the token ended the answer, as `<eos>` does, and so is part of it only if the caller asked.
        """
        assert self.stop_string is None, "the answer has ended"
        self._num_tokens += 1
        if is_stop_token and not self._includes_stop:
            return ""
        if self._skips_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._stop.push(self._bytes.push(self._tokenizer.token_bytes(token_id)), self._can_end)

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stop_string is not None:
            return ""
        return self._stop.push(self._bytes.finish(), self._can_end) + self._stop.finish()

    @property
    def _can_end(self) -> bool:
        return self._num_tokens > self._min_tokens


class _StopStrings:
    """Looks for the stop string that is complete first; of several that end at the same place, for the longest.

    So no token is generated in vain, and the answer does not depend on how the text was split into tokens.
    """

    def __init__(self, stop: tuple[str, ...], includes_stop: bool, drops_first_space: bool) -> None:
        self._stop = stop
        self._includes_stop = includes_stop
        # Until the first text.
        self._drops_space = drops_first_space
        self._held = ""  # the longest suffix of the text so far that is a prefix of a stop string
        self.found: str | None = None

    def push(self, text: str, can_end: bool) -> str:
        if self._drops_space and text:
            self._drops_space, text = False, text.removeprefix(" ")
        if not self._stop:
            return text
        num_seen = len(self._held)
        text = self._held + text
        match = self._find(text, num_seen) if can_end else None
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[: start + len(self.found)] if self._includes_stop else text[:start]
        num_held = self._count_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """Return the match's start and its string. It ends in the new text: no match in the text seen before counts."""
        starts = [(text.find(stop, max(0, num_seen - len(stop) + 1)), stop) for stop in self._stop]
        matches = [(start, stop) for start, stop in starts if start >= 0]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _count_held(self, text: str) -> int:
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stop):
                return length
        return 0

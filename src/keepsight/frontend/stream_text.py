"""Decodes token ids one at a time, and returns text as soon as it is certain.

The returned pieces, joined, are one decode() of all the tokens, cut at the first stop string to appear. Two things are
held back: bytes until their text is known (at the end of the character; where one bad byte turns a whole run into
U+FFFD, at the end of the run), and text that may be the beginning of a stop string. A stop string ends the answer with
the token that completes it, even within such a run.
"""

import copy

from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.sampling_params import SamplingParams
from keepsight.token_bytes import ByteRun


class TextStreamer:
    """Decodes the text of one choice of one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, continues_prompt: bool = False) -> None:
        """`continues_prompt`: the text continues the prompt's, so that a space at its beginning is kept."""
        self._tokenizer = tokenizer
        self._skips_special_tokens = params.skip_special_tokens
        # An answer that must have a form has it with all the text of its tokens, the space included.
        drops_space = tokenizer.drops_first_space and not continues_prompt and params.structured_outputs is None
        self._stop = _StopStrings(tuple(params.stop), params.include_stop_str_in_output, drops_space)
        self._open_run: _OpenRun | None = None
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
        return self._open_run is not None and self._open_run.bytes.is_incomplete

    def push(self, token_id: int, is_stop_token: bool = False) -> str:
        """Return the text that is now certain.

        `is_stop_token`: the token ended the answer, as `<eos>` does, and so is part of it only if the caller asked.
        """
        assert self.stop_string is None, "the answer has ended"
        self._num_tokens += 1
        if is_stop_token and not self._includes_stop:
            return ""
        if self._is_invisible(token_id):  # it does not end a run of bytes either
            return ""
        if self._tokenizer.is_in_run(token_id):
            return self._push_bytes(self._tokenizer.token_bytes(token_id))
        return self._end_run(self._tokenizer.token_bytes(token_id).decode())

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stop_string is not None:
            return ""
        return self._end_run("") + self._stop.finish()

    def _push_bytes(self, data: bytes) -> str:
        run = self._open_run = self._open_run or _OpenRun(self._tokenizer.begin_run(), self._stop)
        run.push(data, self._can_end)
        if run.is_on_trial:
            return ""
        self._stop = run.stop
        return run.take()

    def _end_run(self, text: str) -> str:
        """End the open run of bytes, if any. `text`: the text that follows it."""
        run, self._open_run = self._open_run, None
        if run is None:
            return self._stop.push(text, self._can_end)
        rest, begun = run.bytes.finish(), ""
        if not run.bytes.is_invalid:
            self._stop, begun = run.stop, run.take()
        return begun + self._stop.push(rest + text, self._can_end)

    @property
    def _can_end(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _is_invisible(self, token_id: int) -> bool:
        is_skipped = self._skips_special_tokens and self._tokenizer.is_special(token_id)
        return is_skipped or self._tokenizer.token(token_id) is None


class _OpenRun:
    """The text of bytes that are decoded together; on trial as long as a bad byte would replace all of it."""

    def __init__(self, read: ByteRun, stop: "_StopStrings") -> None:
        self.bytes, self.stop = read, copy.copy(stop)
        self._texts: list[str] = []

    @property
    def is_on_trial(self) -> bool:
        return self.bytes.can_be_invalid and self.stop.found is None

    def push(self, data: bytes, can_end: bool) -> None:
        self._texts.append(self.stop.push(self.bytes.push(data), can_end))

    def take(self) -> str:
        text = "".join(self._texts)
        self._texts.clear()
        return text


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

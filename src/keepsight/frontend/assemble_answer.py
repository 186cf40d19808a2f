"""Turns the tokens of a request's choices into their texts, splits off a leading thought if asked to, and ends each
choice exactly once.

The engine detects stop tokens and length limits; stop strings are found here, where the text is.
"""

from dataclasses import dataclass, replace

from keepsight.frontend.prompt.thought_text import Thought
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.frontend.split_thought import ThoughtSplitter
from keepsight.frontend.stream_text import TextStreamer
from keepsight.requests import FinishReason, TokenOutput
from keepsight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The text that one token added to one choice, and the choice's end if it ended there."""

    token: TokenOutput
    text: str
    finish_reason: FinishReason | None = None
    # The stop string, or the id of the caller's own stop token, that ended the choice.
    stop_reason: str | int | None = None
    # The text of the token's bytes is not known yet and comes with a later token.
    has_undecoded_bytes: bool = False
    # The text it added to the thought before the answer; and whether the token belongs to the thought, tags included.
    thought: str = ""
    is_of_thought: bool = False

    @property
    def choice(self) -> int:
        return self.token.choice


class AnswerAssembler:
    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        thought: Thought | None = None,
        *,
        continues_prompt: bool = False,
    ) -> None:
        """`thought`: the thought that each choice may begin with; None: all text is the answer's.

        `continues_prompt`: the choices continue the prompt's text.
        """
        self._streamers = {
            choice: TextStreamer(tokenizer, params, continues_prompt=continues_prompt) for choice in range(params.n)
        }
        self._splitters = {} if thought is None else {choice: ThoughtSplitter(thought) for choice in range(params.n)}
        self._tags = {} if thought is None else {tokenizer.token_id(tag): tag for tag in thought.form}
        self._stop_token_ids = frozenset(params.stop_token_ids)

    @property
    def is_finished(self) -> bool:
        return not self._streamers

    def push(self, token: TokenOutput) -> AnswerPiece | None:
        """Return what the token adds; None if its choice has ended: the engine learns of a stop string only later."""
        streamer = self._streamers.get(token.choice)
        if streamer is None:
            return None
        piece = self._read(token, streamer)
        if not self._splitters:
            return piece
        return _split(piece, self._splitters[token.choice], self._tags.get(token.token_id, ""))

    def _read(self, token: TokenOutput, streamer: TextStreamer) -> AnswerPiece:
        ends_by_token = token.finish_reason == "stop"
        text = streamer.push(token.token_id, is_stop_token=ends_by_token)
        if streamer.stop_string is None and token.finish_reason is None:
            return AnswerPiece(token, text, has_undecoded_bytes=streamer.has_undecoded_bytes)
        text += streamer.finish()
        del self._streamers[token.choice]
        if streamer.stop_string is not None:
            return AnswerPiece(token, text, "stop", streamer.stop_string)
        is_callers = ends_by_token and token.token_id in self._stop_token_ids
        return AnswerPiece(token, text, token.finish_reason, token.token_id if is_callers else None)


def _split(piece: AnswerPiece, splitter: ThoughtSplitter, tag: str) -> AnswerPiece:
    was_of_thought = splitter.state == "thought"
    thought, text = splitter.push(piece.text, tag, is_last=piece.finish_reason is not None)
    is_of_thought = was_of_thought or splitter.state == "thought" or thought != ""
    return replace(piece, text=text, thought=thought, is_of_thought=is_of_thought)

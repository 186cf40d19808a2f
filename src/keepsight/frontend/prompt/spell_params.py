"""Converts the texts in sampling parameters into tokens."""

import itertools
from collections.abc import Iterator, Sequence

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.prompt_limits import PromptLimits
from keepsight.frontend.prompt.tokenizer import Tokenizer


def spell_banned(tokenizer: Tokenizer, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word at the beginning of a text and, as they differ, those after a space.

    Both are banned, whichever the client wrote. A word that begins with other white space, or is nothing else, has no
    second form, so that the space itself is not banned because of it.
    """
    for word in words:
        bare = word.lstrip(" ")
        forms = (bare, f" {bare}") if bare[:1].strip() else (word,)
        yield from {tokenizer.encode(each, field="bad_words") for each in forms}


def spell_prediction(tokenizer: Tokenizer, text: str, limits: PromptLimits) -> tuple[int, ...]:
    """Return the tokens of a predicted answer, as far as the model can generate them."""
    longest = limits.max_model_len
    if tokenizer.is_far_too_long(text, longest, "prediction"):
        what = f"has {len(text)} characters, far more than the {longest} tokens of this model's longest answer"
        raise InvalidArgumentError("prediction", what)
    tokens = itertools.takewhile(limits.has_token, tokenizer.encode(text, field="prediction"))
    return tuple(itertools.islice(tokens, longest))

"""Makes texts of third parties plain: nothing in them is read as a token of a prompt's structure or as a marker."""

import re
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

from keepsight.made_once import made_once


class PlainText:
    """May be called from several threads."""

    def __init__(self, live: Iterable[str]) -> None:
        """`live`: the texts of such tokens and markers."""
        self._live = frozenset(filter(None, live))

    def __call__(self, text: str) -> str:
        """Return the text with a space behind the first character of whatever would be read as one of them."""
        return self._first_characters.sub(r"\g<0> ", text)

    @made_once
    def _first_characters(self) -> re.Pattern[str]:
        # Only the first character is consumed, as they may overlap or contain each other. Each branch begins with it,
        # so that a text is searched by it alone: a vocabulary may have thousands of tokens, a document a megabyte.
        branches = []
        for first, live in groupby(sorted(self._live), key=itemgetter(0)):
            rests = "|".join(re.escape(each[1:]) for each in live)
            branches.append(f"{re.escape(first)}(?={rests})")
        return re.compile("|".join(branches) or "(?!)")

"""Makes texts of third parties plain: nothing in them is read as a token of a prompt's structure or as a marker."""

import re
from collections.abc import Iterable

from keepsight.made_once import made_once


class PlainText:
    """May be called from several threads."""

    def __init__(self, live: Iterable[str]) -> None:
        """`live`: the texts of such tokens and markers."""
        self._live = frozenset(filter(None, live))

    def __call__(self, text: str) -> str:
        """Return the text with a space that splits whatever would be read as one of them."""
        return self._pattern.sub(lambda written: f"{written[0][:1]} {written[0][1:]}", text)

    @made_once
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._live, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

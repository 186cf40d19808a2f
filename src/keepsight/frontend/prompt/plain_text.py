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
        """Return the text with a space behind the first character of whatever would be read as one of them."""
        return self._first_characters.sub(r"\1 ", text)

    @made_once
    def _first_characters(self) -> re.Pattern[str]:
        # Looked for at each character, as they may overlap or contain each other.
        live = "|".join(map(re.escape, sorted(self._live))) or "(?!)"
        return re.compile(f"(?={live})(.)", re.DOTALL)

"""The tags around a parameter's value, as templates write them in two ways: on lines of their own, or in line.

<parameter=city>
Paris
</parameter>

<parameter=city>Paris</parameter>
"""

import re
from dataclasses import dataclass

from keepsight.made_once import made_once


@dataclass(frozen=True)
class ParameterTags:
    """`before`: what stands between the opening tag and the value. `closing`: what ends it, and cannot be in it."""

    before: str
    closing: str
    # What follows `closing`.
    behind: str
    # Characters that no name has: a name would end elsewhere.
    not_in_names: frozenset[str]
    # A pattern, as llguidance reads it, of texts that cannot be values.
    pattern_of_unfit: str

    @made_once
    def opening_or_end(self) -> re.Pattern[str]:
        """The pattern of an opening tag, with its `name`, or of the end of all parameters."""
        excluded = re.escape("".join(sorted(self.not_in_names)))
        return re.compile(f"<parameter=(?P<name>[^{excluded}]*)>(?={self.before})|</function>")

    @made_once
    def beginnings_of_closing(self) -> tuple[str, ...]:
        return tuple(self.closing[:length] for length in range(len(self.closing) - 1, 0, -1))

    def write(self, name: str, text: str) -> str:
        return f"<parameter={name}>{self.before}{text}{self.closing}{self.behind}"

    def can_hold(self, text: str) -> bool:
        """Return whether the text would end where it does."""
        return f"{self.before}{text}{self.closing}".index(self.closing) == len(self.before) + len(text)


# A value stands between two newlines. If it is empty, one may be both.
ON_LINES = ParameterTags(
    before="\n",
    closing="\n</parameter>",
    behind="\n",
    not_in_names=frozenset("<\n"),
    # No line begins like a closing tag.
    pattern_of_unfit=r"(?s:(.*\n)?<\/parameter>.*)",
)
# The newline belongs to the closing tag: without it, the tag may be in a string within JSON.
IN_LINE = ParameterTags(
    before="",
    closing="</parameter>\n",
    behind="",
    not_in_names=frozenset("<>\n"),
    pattern_of_unfit=r"(?s:.*<\/parameter>\n.*)",
)

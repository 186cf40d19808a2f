"""Reads messages of other APIs once they are chat messages; errors name the fields as the client wrote them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepsight.errors import renaming_fields
from keepsight.frontend.prompt.read_messages import Conversation, PromptEnd, read_messages

# Where a path may be cut: before the name of a field, or before an index.
_STEP = re.compile(r"(?=[.\[])")


@dataclass(frozen=True, slots=True)
class Places:
    """Maps paths in the converted messages to the paths that the client wrote."""

    of_items: Mapping[str, str]

    def find(self, place: str) -> str:
        """Return the client's path: the longest known beginning is replaced, and the rest is the same in both."""
        for end in [len(place), *(step.start() for step in reversed([*_STEP.finditer(place)]))]:
            if (own := self.of_items.get(place[:end])) is not None:
                return own + place[end:]
        return place


NO_PLACES = Places({})


def read_at_places(
    messages: Sequence[Any], places: Places, end: PromptEnd = "answer", variables: Mapping[str, Any] | None = None
) -> Conversation:
    with renaming_fields(places.find):
        read = read_messages(messages, end, variables)
    pictures = tuple(replace(each, field=places.find(each.field)) for each in read.pictures)
    return replace(read, pictures=pictures)

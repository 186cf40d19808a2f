"""In a conversation a PDF becomes its pages: each a heading, the page as a picture, and the text on it.

As OpenAI and Anthropic show them: small letters are seldom seen well enough.  Knows nothing of PDFs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from keepsight.frontend.prompt.check_fields import Fields
from keepsight.frontend.prompt.read_messages import (
    Breakpoint,
    Conversation,
    DocumentPart,
    PicturePart,
    TemplateMessage,
    pin_pictures,
    show_to_template,
)

# Of a document: each page as a picture, and the text on it.
PagesOf = Callable[[DocumentPart], Iterable[tuple[PicturePart, str]]]


def unfold_documents(conversation: Conversation, pages_of: PagesOf, as_plain: Callable[[str], str]) -> Conversation:
    """`as_plain`: what a text is in which nothing is a token that its caller did not mean."""
    sent = iter(conversation.pictures)
    messages, pictures = list[TemplateMessage](), list[PicturePart]()
    # By how many messages and parts of the next lie before a place: how many parts, and pictures of all, do now.
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for index, message in enumerate(conversation.messages):
        parts: list[Fields] = []
        for number, part in enumerate(_parts_of(message), start=1):
            own = None if part["type"] == "text" else next(sent)
            for shown, picture in _unfold(part, own, pages_of, as_plain):
                parts.append(shown)
                pictures += filter(None, [picture])
            places[index, number] = len(parts), len(pictures)
        messages.append({**message, "content": parts} if parts else message)
    breakpoints = tuple(_move(each, places) for each in conversation.breakpoints)
    pinned = pin_pictures(pictures, breakpoints)
    return replace(conversation, messages=messages, pictures=pinned, breakpoints=breakpoints)


def _parts_of(message: TemplateMessage) -> Sequence[Fields]:
    content = message["content"]
    return () if isinstance(content, str) else content


def _unfold(
    part: Fields, sent: PicturePart | None, pages_of: PagesOf, as_plain: Callable[[str], str]
) -> Iterator[tuple[Fields, PicturePart | None]]:
    """What is shown, and of which picture.

    In brackets, as many templates trim each text and write nothing between two.
    """
    if not isinstance(sent, DocumentPart):
        yield part, sent
        return
    pages, name = list(pages_of(sent)), sent.name
    for number, (picture, text) in enumerate(pages, start=1):
        place = f"page {number} of {len(pages)}"
        yield _say(f"[{name}, {place}]\n" if name else f"[{place}]\n"), None
        yield show_to_template("image"), picture
        yield _say(f"\n{as_plain(text)}\n"), None
    yield _say(f"[end of {name or 'the document'}]\n"), None


def _say(text: str) -> Fields:
    return {"type": "text", "text": text}


def _move(breakpoint_: Breakpoint, places: Mapping[tuple[int, int], tuple[int, int]]) -> Breakpoint:
    num_parts, num_pictures = places[breakpoint_.num_messages, breakpoint_.num_parts]
    return breakpoint_._replace(num_parts=num_parts, num_pictures=num_pictures)

"""Replaces each PDF in a conversation by its pages: for each a heading, the page as a picture, and the text on it.

OpenAI and Anthropic do the same: small letters are seldom seen well enough. Knows nothing of PDFs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from keepsight.errors import MediaTooLargeError
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

# Returns each page of a document as a picture, and the text on it.
PagesOf = Callable[[DocumentPart], Iterable[tuple[PicturePart, str]]]
# For all documents of a conversation together: more than any model reads at once.
MAX_CHARACTERS = 8 * 2**20


def quote_plainly(conversation: Conversation, as_plain: Callable[[str], str]) -> Conversation:
    """Return the conversation with texts of documents that give the prompt no structure, if `as_plain` sees to that.

    A client's own texts that were joined with them are then plain, too.
    """
    if not (quoted := conversation.quoted):
        return conversation
    messages = list[TemplateMessage]()
    for index, message in enumerate(conversation.messages):
        parts = [
            _text_part(as_plain(part["text"])) if (index, number) in quoted else part
            for number, part in enumerate(_parts_of(message))
        ]
        messages.append({**message, "content": parts} if parts else message)
    return replace(conversation, messages=messages, quoted=frozenset())


def unfold_documents(
    conversation: Conversation,
    pages_of: PagesOf,
    as_plain: Callable[[str], str],
    check_count: Callable[[Sequence[PicturePart]], object],
) -> Conversation:
    """Return the conversation with pages in place of documents.

    `as_plain` keeps a text from giving the prompt structure.
    `check_count` refuses too many pictures before the next document is unfolded: a small file may have very many pages.
    """
    sent, num_characters = iter(conversation.pictures), 0
    messages, pictures = list[TemplateMessage](), list[PicturePart]()
    # Maps (messages, parts of the next message) before a place to (parts of that message, pictures) before it now.
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for index, message in enumerate(conversation.messages):
        parts: list[Fields] = []
        for number, part in enumerate(_parts_of(message), start=1):
            own = None if part["type"] == "text" else next(sent)
            shown = list(_unfold(part, own, pages_of, as_plain))
            parts += (each for each, _ in shown)
            pictures += (picture for _, picture in shown if picture is not None)
            if isinstance(own, DocumentPart):
                check_count(pictures)
                num_characters += sum(len(each.get("text", "")) for each, _ in shown)
                _check_length(num_characters, own.field)
            places[index, number] = len(parts), len(pictures)
        messages.append({**message, "content": parts} if parts else message)
    check_count(pictures)  # with those behind the last document
    breakpoints = tuple(_move(each, places) for each in conversation.breakpoints)
    pinned = pin_pictures(pictures, breakpoints)
    return replace(conversation, messages=messages, pictures=pinned, breakpoints=breakpoints)


def _check_length(num_characters: int, field: str) -> None:
    if num_characters > MAX_CHARACTERS:
        message = f"brings the text of all PDFs to more than the {MAX_CHARACTERS} characters that are read"
        raise MediaTooLargeError(field, message)


def _parts_of(message: TemplateMessage) -> Sequence[Fields]:
    content = message["content"]
    return () if isinstance(content, str) else content


def _unfold(
    part: Fields, sent: PicturePart | None, pages_of: PagesOf, as_plain: Callable[[str], str]
) -> Iterator[tuple[Fields, PicturePart | None]]:
    """Yield each part to show, and its picture if it has one.

    Headings are in brackets, as many templates trim each text and write nothing between two.
    """
    if not isinstance(sent, DocumentPart):
        yield part, sent
        return
    pages, name = list(pages_of(sent)), sent.name
    for number, (picture, text) in enumerate(pages, start=1):
        place = f"page {number} of {len(pages)}"
        # Made plain as a whole: with the bracket before it, a name may spell `[INST]`.
        yield _text_part(as_plain(f"[{name}, {place}]\n") if name else f"[{place}]\n"), None
        yield show_to_template("image"), picture
        yield _text_part(f"\n{as_plain(text)}\n"), None
    yield _text_part(as_plain(f"[end of {name or 'the document'}]\n")), None


def _text_part(text: str) -> Fields:
    return {"type": "text", "text": text}


def _move(breakpoint_: Breakpoint, places: Mapping[tuple[int, int], tuple[int, int]]) -> Breakpoint:
    num_parts, num_pictures = places[breakpoint_.num_messages, breakpoint_.num_parts]
    return breakpoint_._replace(num_parts=num_parts, num_pictures=num_pictures)

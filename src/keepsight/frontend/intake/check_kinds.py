"""Checks whether a model takes the media a client sends (pictures, films, sounds), and detects a file's kind.

Kinds are detected by a file's first bytes. Clients that send the wrong kind are told what to send instead.
"""

from collections.abc import Sequence

from keepsight.errors import PictureCountError, UnsupportedFieldError, UnsupportedPictureError
from keepsight.frontend.intake.open_document import may_be_a_document
from keepsight.frontend.intake.open_film import looks_like_a_film
from keepsight.frontend.intake.open_picture import find_format
from keepsight.frontend.intake.open_sound import looks_like_a_sound
from keepsight.frontend.intake.read_header import shows_several_frames
from keepsight.frontend.prompt.read_messages import DocumentPart, PicturePart
from keepsight.media import KINDS, SEVERAL, Kind
from keepsight.processor_config import ProcessorConfig


def check_kinds(parts: Sequence[PicturePart], processor: ProcessorConfig) -> None:
    frames = "; send its frames as pictures" if processor.takes_pictures else ""
    reasons = {
        "image": None if processor.takes_pictures else "is a picture, but this model takes none",
        "video": None if processor.film else f"is a video, but this model takes none{frames}",
        "audio": None if processor.sound else "is a sound, but this model takes none",
    }
    of_pages = "is a PDF, whose pages are read as pictures, but this model takes none"
    for part in parts:
        if (reason := reasons[part.kind]) is not None:
            raise UnsupportedFieldError(part.field, of_pages if isinstance(part, DocumentPart) else reason)


def why_no_embeds(processor: ProcessorConfig | None) -> str | None:
    """Return why the model takes no embeddings in place of pictures; None if it does, or is refused any media."""
    if processor is None:
        return None
    if processor.borrowed is not None:
        return "are not supported by this model: its pictures are encoded by transformers' modules only"
    if processor.image.sizes is not None:
        return "are not supported by this model: they do not say how many rows and columns a picture had"
    return None


def refuse_all(parts: Sequence[PicturePart], field: str) -> PictureCountError:
    """Return the refusal of media by a text-only model; `field` is where they were sent."""
    kinds = {part.kind for part in parts}
    what = " and ".join(SEVERAL[kind] for kind in KINDS if kind in kinds)
    return PictureCountError(field, f"holds {len(parts)} {what}, but this model reads text only")


def guess_kind(content: bytes, field: str, processor: ProcessorConfig, max_pixels: int) -> Kind:
    """Return the kind that the model would treat this as: an animated GIF is a film if the model takes films."""
    if processor.sound is not None and (looks_like_a_sound(content) or not processor.takes_pictures):
        return "audio"
    may_move = processor.film is not None and content.startswith(b"GIF8")
    is_film = looks_like_a_film(content) or (may_move and shows_several_frames(content, field, max_pixels))
    return "video" if is_film else "image"


def looks_like_a_document(content: bytes) -> bool:
    """Return whether a file of unstated kind is a PDF. It may begin with other bytes, such as a byte order mark."""
    if not may_be_a_document(content):
        return False
    return find_format(content) is None and not looks_like_a_film(content) and not looks_like_a_sound(content)


def check_is_picture(content: bytes, field: str, processor: ProcessorConfig) -> None:
    """Refuse a PDF, a film or a sound; content of unknown kind passes."""
    if looks_like_a_document(content):
        raise UnsupportedPictureError(field, "is a PDF, not a picture; send it as one (file)")
    if looks_like_a_film(content):
        way = "send its frames" if processor.film is None else "send it as one (video_url)"
        raise UnsupportedPictureError(field, f"is a film, not a picture; {way}")
    if looks_like_a_sound(content):
        way = "this model takes none" if processor.sound is None else "send it as one (audio_url)"
        raise UnsupportedPictureError(field, f"is a sound, not a picture; {way}")

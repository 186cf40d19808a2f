"""Reads the UUID that a picture's own metadata gives as its identity (EXIF's ImageID), without decoding anything.

Whether to trust it is not decided here: editors copy it, so two different pictures can have the same one.
"""

import uuid

import numpy as np
from PIL import ExifTags, Image

from keepsight.frontend.intake.open_picture import PictureSource, exif_of, open_picture, translating_parser_errors


def read_image_id(source: PictureSource, field: str) -> uuid.UUID | None:
    if isinstance(source, np.ndarray):
        return None
    with translating_parser_errors(field, len(source) if isinstance(source, bytes) else None):
        exif = (
            Image.Image.getexif(source)
            if isinstance(source, Image.Image)
            else exif_of(open_picture(source, field), source, field)
        )
        return _parse(exif.get(ExifTags.Base.ImageID))


def _parse(value: object) -> uuid.UUID | None:
    """Return the UUID given as text, as 16 bytes or as a UUID (in a PIL image of this process), or None."""
    try:
        match value:
            case uuid.UUID():
                image_id = value
            case bytes() if len(value) == 16:
                image_id = uuid.UUID(bytes=value)
            case bytes():
                image_id = uuid.UUID(value.rstrip(b"\0").decode())
            case str():
                image_id = uuid.UUID(value.rstrip("\0"))
            case _:
                return None
    except ValueError:
        return None
    # Zeros are written by software that fills the field without knowing an identity.
    return image_id if image_id.int else None

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
    if isinstance(value, uuid.UUID):
        return _unless_nil(value)
    try:
        if isinstance(value, bytes):
            return _unless_nil(uuid.UUID(bytes=value) if len(value) == 16 else uuid.UUID(value.rstrip(b"\0").decode()))
        return _unless_nil(uuid.UUID(value.rstrip("\0"))) if isinstance(value, str) else None
    except ValueError:
        return None


def _unless_nil(image_id: uuid.UUID) -> uuid.UUID | None:
    """Return None for zeros, which are written by software that fills the field without knowing an identity."""
    return image_id if image_id.int else None

"""Renders a page of a PDF as it would be printed, with annotations and filled-in form fields."""

from contextlib import closing

import numpy as np

from keepsight.frontend.intake.open_document import open_document, scale_of
from keepsight.requests import Pixels


def render_page(data: bytes, number: int, field: str) -> Pixels:
    """Return uint8 [height, width, 3] of the size that `read_document` gives; `number` is from 0."""
    with (
        open_document(data, field) as document,
        closing(document[number]) as page,
        closing(page.render(scale=scale_of(page, field), rev_byteorder=True)) as bitmap,
    ):
        # A copy, as the memory is PDFium's.
        return np.array(bitmap.to_numpy()[..., :3])

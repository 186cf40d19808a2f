"""A page of a PDF as it would be printed: its pixels, with annotations and what is filled in."""

from contextlib import closing

import numpy as np

from keepsight.frontend.intake.open_document import open_document, scale_of
from keepsight.requests import Pixels


def render_page(data: bytes, number: int, field: str) -> Pixels:
    """uint8 [height, width, 3], as large as `read_document` says; `number` is from 0."""
    with (
        open_document(data, field) as document,
        closing(document[number]) as page,
        closing(page.render(scale=scale_of(page, field), rev_byteorder=True)) as bitmap,
    ):
        # A copy: the memory is PDFium's.
        return np.array(bitmap.to_numpy()[..., :3])

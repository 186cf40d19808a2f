"""Layouts of pictures in the prompts of a borrowed model, by size: requested once from its processor and kept.

Knows sizes, not pictures. Invariant: a caller whose size is known never waits for another.
"""

from functools import partial

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import PictureTooLargeError
from keepsight.frontend.identity.single_flight import SingleFlight
from keepsight.frontend.pixels.make_pixels import BorrowedLook, RunLook
from keepsight.lru_cache import LruCache
from keepsight.media import Geometry, PictureLayout
from keepsight.requests import MAX_PIXEL_BYTES
from keepsight.shown_sizes import check_can_show

# Enough for some hundreds of sizes with thousands of tokens each.
MAX_BYTES = 32 * 2**20


class BorrowedLayouts:
    """May be used from several threads."""

    def __init__(self, processor: BorrowedProcessor, run_look: RunLook) -> None:
        self._processor, self._run_look = processor, run_look
        kept = LruCache[Geometry, PictureLayout](MAX_BYTES, _count_bytes)
        self._looks = SingleFlight(kept.get_and_update, kept.put_if_fits)

    def knows(self, geometry: Geometry) -> bool:
        return self._looks.knows(geometry)

    def of(self, geometry: Geometry, field: str) -> PictureLayout:
        """Return the layout; raise PictureError if the processor refuses this size, or its output is too large."""
        # Many processors first enlarge the shorter side, without limiting the longer one: a few bytes become gigabytes.
        check_can_show(geometry, field)
        look = partial(self._run_look, BorrowedLook(self._processor, geometry, field))
        layout: PictureLayout = self._looks.get_or_compute(geometry, field, look)
        if layout.num_tokens > (most := self._processor.max_tokens):
            of_size = f"a picture of {geometry.width} x {geometry.height} pixels has {layout.num_tokens} tokens"
            raise PictureTooLargeError(field, f"{of_size} in this model; at most {most} are allowed")
        if layout.num_bytes > MAX_PIXEL_BYTES:
            of_size = f"a picture of {geometry.width} x {geometry.height} pixels takes {layout.num_bytes} bytes"
            raise PictureTooLargeError(field, f"{of_size} in this model; at most {MAX_PIXEL_BYTES} are allowed")
        return layout


def _count_bytes(layout: PictureLayout) -> int:
    """Return the size with the integer objects (28 bytes each), and about 500 bytes for everything else."""
    return 36 * len(layout.token_ids) + 500

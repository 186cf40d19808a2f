"""The functions that examine media with a decoder or a checkpoint's own processor, in a worker or in this process."""

from collections.abc import Callable
from dataclasses import dataclass

from keepsight.borrowed import BorrowedProcessor
from keepsight.frontend.intake.read_document import ReadDocument, read_document
from keepsight.frontend.intake.read_film import ReadFilm, read_film
from keepsight.frontend.intake.read_sound import ReadSound, read_sound
from keepsight.frontend.pixels.make_pixels import BorrowedLook
from keepsight.media import Geometry, PictureLayout

LayOutBorrowed = Callable[[BorrowedProcessor, Geometry, str], PictureLayout]


def lay_out_borrowed(processor: BorrowedProcessor, geometry: Geometry, field: str) -> PictureLayout:
    return BorrowedLook(processor, geometry, field).run()


@dataclass(frozen=True, slots=True)
class Readers:
    film: ReadFilm = read_film
    sound: ReadSound = read_sound
    document: ReadDocument = read_document
    borrowed: LayOutBorrowed = lay_out_borrowed

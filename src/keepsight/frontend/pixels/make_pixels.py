"""Jobs that decode one picture, film or sound once, and make the encoder's input of each of its parts.

Knows nothing of requests, threads or processes: a job is a value that can be run anywhere. A job whose source is a
file's bytes can be sent to another process, encoded by msgspec; msgspec does not know the other types of sources, so
sources are `Any` here.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from keepsight.borrowed import BorrowedProcessor
from keepsight.frontend.intake.read_document import Document, check_document, read_document
from keepsight.frontend.intake.read_embeds import Embeds
from keepsight.frontend.intake.read_film import check_film, read_film
from keepsight.frontend.intake.read_sound import check_sound, read_sound
from keepsight.frontend.intake.sound_samples import check_values
from keepsight.frontend.pixels.decode_film import decode_film
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.frontend.pixels.decode_sound import decode_sound
from keepsight.frontend.pixels.render_page import render_page
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import DEFAULT_MAX_PIXELS, FRAMES_PER_MOMENT, CropBox, Geometry, Moment, PictureLayout
from keepsight.pixels import carried_arrays, carried_samples, carry_embeddings, carry_samples, shape_of_arrays
from keepsight.requests import Pixels


@dataclass(frozen=True, slots=True)
class Made:
    # By media hash.
    pixels: dict[str, Pixels]
    # Of decoding and of resizing, as measured where it was done.
    seconds: tuple[float, float]


# Films may take minutes to make. Looks take moments, but a request cannot be prepared before they are done.
Work = Literal["pictures", "films", "looks"]


class _Job(msgspec.Struct, frozen=True, tag=True):
    # What the source is: messages name it so, and a worker may take longer for a sound.
    what: ClassVar[Literal["picture", "film", "sound", "PDF"]] = "picture"
    # Waits for no other kind of work.
    work: ClassVar[Work] = "pictures"

    def check(self, made: Any) -> None:
        """Check what an untrusted worker found, or made of one part.

        Raises PictureError if the source is to be refused because of it, and ValueError if no such job has this result.
        """


class _Look(_Job, frozen=True):
    work = "looks"
    # The type of what `run` returns.
    finds: ClassVar[Any] = Geometry


class PictureJob(_Job, frozen=True):
    source: Any  # PictureSource, or Embeds
    # The caller's name for the picture.
    field: str
    # By media hash; None stands for the whole picture.
    parts: dict[str, CropBox | None]
    config: ImageProcessorConfig
    max_pixels: int = DEFAULT_MAX_PIXELS
    # The page's number from 0, if the source is a PDF.
    page: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of each part's pixels."""
        return self.config.height, self.config.width, 3

    def run(self) -> Made:
        """Make the pixels. Raises PictureError if the picture cannot be decoded."""
        began = time.perf_counter()
        if isinstance(self.source, Embeds):
            carried = dict.fromkeys(self.parts, carry_embeddings(self.source.values))
            return Made(carried, (time.perf_counter() - began, 0.0))
        # Imported when needed: a frontend that leaves this to other processes does not load torch.
        from keepsight.frontend.pixels.preprocess_image import preprocess_image

        rgb = _draw(self)
        decoded = time.perf_counter()
        made = preprocess_image(rgb, tuple(self.parts.values()), self.config)
        return Made(dict(zip(self.parts, made, strict=True)), (decoded - began, time.perf_counter() - decoded))


class FilmJob(_Job, frozen=True):
    source: Any  # FilmSource
    field: str
    parts: dict[str, Moment]
    config: ImageProcessorConfig
    max_pixels: int = DEFAULT_MAX_PIXELS
    what = "film"
    work = "films"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of each moment's pixels: its second frame lies below the first."""
        return FRAMES_PER_MOMENT * self.config.height, self.config.width, 3

    def run(self, is_given_up: Callable[[], bool] = lambda: False) -> Made:
        """Make the pixels. Each frame is resized before the next is decoded, so only one is held at full size."""
        from keepsight.frontend.pixels.preprocess_image import resize_pixels

        began, resizing = time.perf_counter(), 0.0
        made, places = self._make_room()
        for number, rgb in decode_film(self.source, places.keys(), self.field, self.max_pixels, is_given_up):
            decoded = time.perf_counter()
            resized = resize_pixels(rgb, self.config)
            for place in places[number]:
                place[:] = resized
            resizing += time.perf_counter() - decoded
        return Made(made, (time.perf_counter() - began - resizing, resizing))

    def _make_room(self) -> tuple[dict[str, Pixels], Mapping[int, list[Pixels]]]:
        """Allocate the pixels of each moment; also return the views of them that each frame fills, by its number."""
        made: dict[str, Pixels] = {}
        places: defaultdict[int, list[Pixels]] = defaultdict(list)
        for media_hash, moment in self.parts.items():
            pixels = made[media_hash] = np.empty(self.shape, np.uint8)
            places[moment.first].append(pixels[: self.config.height])
            places[moment.last].append(pixels[self.config.height :])
        return made, places


class SoundJob(_Job, frozen=True):
    source: Any  # SoundSource
    field: str
    # There is only one.
    parts: dict[str, None]
    # Samples in a second, as the model takes them; and in total.
    sampling_rate: int
    num_samples: int
    what = "sound"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the samples, which are carried as pixels are."""
        return self.num_samples, 1, 4

    def run(self) -> Made:
        """Decode the samples. Raises PictureError if the sound cannot be decoded."""
        began = time.perf_counter()
        samples = decode_sound(self.source, self.sampling_rate, self.num_samples, self.field)
        return Made(dict.fromkeys(self.parts, carry_samples(samples)), (time.perf_counter() - began, 0.0))

    def check(self, pixels: Pixels) -> None:
        check_values(carried_samples(pixels), self.field)


class BorrowedJob(_Job, frozen=True):
    """A picture for the checkpoint's own processor, which has already laid it out by its size."""

    source: Any  # PictureSource
    field: str
    # There is only one.
    parts: dict[str, None]
    processor: BorrowedProcessor
    layout: PictureLayout
    max_pixels: int = DEFAULT_MAX_PIXELS
    page: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of all its arrays together, as they are carried."""
        return shape_of_arrays(self.layout.num_bytes)

    def run(self) -> Made:
        """Make the arrays. Raises PictureError if the picture cannot be decoded, or if the processor refuses it."""
        # Imported when needed, as above.
        from keepsight.frontend.pixels.borrowed_pictures import load_pictures

        pictures, began = load_pictures(self.processor), time.perf_counter()
        rgb = _draw(self)
        decoded = time.perf_counter()
        pixels = pictures.prepare(rgb, self.field)
        self.check(pixels)
        return Made(dict.fromkeys(self.parts, pixels), (decoded - began, time.perf_counter() - decoded))

    def check(self, pixels: Pixels) -> None:
        """Check that the result fits the prompt, which was laid out by the picture's size alone."""
        arrays = carried_arrays(pixels)
        if pixels.shape != self.shape or tuple(arrays.pop("token_ids").tolist()) != self.layout.token_ids:
            raise ValueError("the checkpoint's processor laid out a picture differently from a blank one of its size")
        if not all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f"):
            raise ValueError("the checkpoint's processor made NaN or infinite values of a picture")


def _draw(job: PictureJob | BorrowedJob) -> Pixels:
    if job.page is None:
        return decode_picture(job.source, job.field, job.max_pixels)
    return render_page(job.source, job.page, job.field)


class BorrowedLook(_Look, frozen=True):
    """Finds how the checkpoint's own processor lays out a picture of some size."""

    processor: BorrowedProcessor
    geometry: Geometry
    field: str
    source: bytes = b""  # unused
    finds = PictureLayout

    def run(self) -> PictureLayout:
        from keepsight.frontend.pixels.borrowed_pictures import load_pictures

        return load_pictures(self.processor).lay_out(self.geometry, self.field)

    def check(self, layout: PictureLayout) -> None:
        tokens, columns, num_bytes = layout.token_ids, layout.columns, layout.num_bytes
        # Too many bytes are refused where layouts are kept.
        if not tokens or min(tokens) < 0 or columns < 0 or (columns and len(tokens) % columns) or num_bytes <= 0:
            raise ValueError(f"a picture of {num_bytes} bytes in {len(tokens)} tokens, in rows of {columns}")
        if layout != PictureLayout(len(tokens), columns=columns, token_ids=tokens, num_bytes=num_bytes):
            raise ValueError("a layout that no processor's is")


class FilmLook(_Look, frozen=True):
    """Counts and measures a film's frames, which takes the same code that decodes them."""

    source: Any  # FilmSource
    field: str
    max_pixels: int = DEFAULT_MAX_PIXELS
    what = "film"

    def run(self) -> Geometry:
        return read_film(self.source, self.field, self.max_pixels)

    def check(self, geometry: Geometry) -> None:
        if geometry.timeline is None:
            raise ValueError("a film without a timeline")
        check_film(geometry, self.field, self.max_pixels)


class SoundLook(_Look, frozen=True):
    """Counts a sound's samples, which takes the same code that decodes them."""

    source: Any  # SoundSource
    field: str
    sampling_rate: int
    what = "sound"

    def run(self) -> Geometry:
        return read_sound(self.source, self.field, self.sampling_rate)

    def check(self, geometry: Geometry) -> None:
        if geometry.timeline is not None:
            raise ValueError("a sound with a timeline")
        check_sound(geometry, self.field, self.sampling_rate)


class DocumentLook(_Look, frozen=True):
    """Measures a PDF's pages, and reads their text."""

    source: bytes
    field: str
    what = "PDF"
    finds = Document

    def run(self) -> Document:
        return read_document(self.source, self.field)

    def check(self, pages: Document) -> None:
        check_document(pages, self.field)


MakingJob = PictureJob | FilmJob | SoundJob | BorrowedJob
Look = FilmLook | SoundLook | DocumentLook | BorrowedLook
# What a look returns.
Found = Geometry | Document | PictureLayout
Job = MakingJob | Look
MakePixels = Callable[[MakingJob], Made]
# Returns what the look's `run` returns.
RunLook = Callable[[Look], Any]


def run_job(job: MakingJob, is_given_up: Callable[[], bool] = lambda: False) -> Made:
    """Run a job in the calling thread. A film, which may take minutes, fails once it is given up."""
    return job.run(is_given_up) if isinstance(job, FilmJob) else job.run()


def look_here(look: Look) -> Any:
    """Look in the calling thread."""
    return look.run()

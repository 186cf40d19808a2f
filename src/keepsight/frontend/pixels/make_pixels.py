"""One picture's, film's or sound's work: decoded once, and made into what the encoder takes of each part.

Knows nothing of requests, threads or processes: a job is a value, and whoever has one may run it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from keepsight.borrowed import BorrowedProcessor
from keepsight.frontend.intake.open_film import FilmSource
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.read_embeds import Embeds
from keepsight.frontend.intake.read_film import check_film, read_film
from keepsight.frontend.intake.read_sound import check_sound, read_sound
from keepsight.frontend.intake.sound_samples import SoundSource
from keepsight.frontend.pixels.decode_film import decode_film
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.frontend.pixels.decode_sound import decode_sound
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import DEFAULT_MAX_PIXELS, FRAMES_PER_MOMENT, CropBox, Geometry, Moment, Part, PictureLayout
from keepsight.pixels import carried_arrays, carry_embeddings, carry_samples, shape_of_arrays
from keepsight.requests import Pixels


@dataclass(frozen=True, slots=True)
class Made:
    # By media hash.
    pixels: dict[str, Pixels]
    # Of decoding and of resizing, as whoever did it says.
    seconds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class PictureJob:
    source: PictureSource | FilmSource | Embeds
    # What the caller calls the picture, or the film.
    field: str
    # By media hash; None is the whole of a picture. All those of a film are moments.
    parts: Mapping[str, Part]
    config: ImageProcessorConfig
    max_pixels: int = DEFAULT_MAX_PIXELS

    @property
    def moments(self) -> dict[str, Moment]:
        return {media_hash: part for media_hash, part in self.parts.items() if isinstance(part, Moment)}

    @property
    def crops(self) -> dict[str, CropBox | None]:
        return {media_hash: part for media_hash, part in self.parts.items() if not isinstance(part, Moment)}

    @property
    def is_film(self) -> bool:
        return bool(self.moments)

    @property
    def what(self) -> str:
        return "film" if self.is_film else "picture"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the pixels of each part: the second frame of a moment lies below the first."""
        return (FRAMES_PER_MOMENT if self.is_film else 1) * self.config.height, self.config.width, 3

    def run(self) -> Made:
        """Raises PictureError if the picture cannot be decoded."""
        if isinstance(self.source, Embeds):
            began = time.perf_counter()
            carried = dict.fromkeys(self.parts, carry_embeddings(self.source.values))
            return Made(carried, (time.perf_counter() - began, 0.0))
        if not self.is_film:
            return self._make_picture(self.source)
        assert isinstance(self.source, bytes | np.ndarray), "an image has no moments"
        return self._make_film(self.source)

    def _make_picture(self, source: PictureSource) -> Made:
        # Imported when needed: a frontend that leaves this to other processes does without torch.
        from keepsight.frontend.pixels.preprocess_image import preprocess_image

        began = time.perf_counter()
        rgb = decode_picture(source, self.field, self.max_pixels)
        decoded = time.perf_counter()
        made = preprocess_image(rgb, tuple(self.crops.values()), self.config)
        return Made(dict(zip(self.parts, made, strict=True)), (decoded - began, time.perf_counter() - decoded))

    def _make_film(self, source: FilmSource) -> Made:
        """Each frame is resized before the next is decoded: never are two held at their full size."""
        from keepsight.frontend.pixels.preprocess_image import resize_pixels

        began, resizing = time.perf_counter(), 0.0
        made, places = self._make_room()
        for number, rgb in decode_film(source, places.keys(), self.field, self.max_pixels):
            decoded = time.perf_counter()
            resized = resize_pixels(rgb, self.config)
            for place in places[number]:
                place[:] = resized
            resizing += time.perf_counter() - decoded
        return Made(made, (time.perf_counter() - began - resizing, resizing))

    def _make_room(self) -> tuple[dict[str, Pixels], Mapping[int, list[Pixels]]]:
        """For each moment; and where in them each frame goes, by its number."""
        made: dict[str, Pixels] = {}
        places: defaultdict[int, list[Pixels]] = defaultdict(list)
        for media_hash, moment in self.moments.items():
            pixels = made[media_hash] = np.empty(self.shape, np.uint8)
            places[moment.first].append(pixels[: self.config.height])
            places[moment.last].append(pixels[self.config.height :])
        return made, places


@dataclass(frozen=True, slots=True)
class SoundJob:
    source: SoundSource
    # What the caller calls the sound.
    field: str
    # By media hash: a sound has one part.
    parts: Mapping[str, Part]
    # In a second, as the model takes them; and in all.
    sampling_rate: int
    num_samples: int
    is_film = False
    what = "sound"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of its samples, as pixels are carried."""
        return self.num_samples, 1, 4

    def run(self) -> Made:
        """Raises PictureError if the sound cannot be decoded."""
        began = time.perf_counter()
        samples = decode_sound(self.source, self.sampling_rate, self.num_samples, self.field)
        return Made(dict.fromkeys(self.parts, carry_samples(samples)), (time.perf_counter() - began, 0.0))


@dataclass(frozen=True, slots=True)
class BorrowedJob:
    """A picture for the checkpoint's own processor, which has laid it out by its size."""

    source: PictureSource
    # What the caller calls the picture.
    field: str
    # By media hash: it has one part.
    parts: Mapping[str, Part]
    processor: BorrowedProcessor
    layout: PictureLayout
    max_pixels: int = DEFAULT_MAX_PIXELS
    is_film = False
    what = "picture"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of all its arrays together, as they are carried."""
        return shape_of_arrays(self.layout.num_bytes)

    def run(self) -> Made:
        """Raises PictureError if the picture cannot be decoded, or is none that the processor takes."""
        # Imported when needed, as above.
        from keepsight.frontend.pixels.borrowed_pictures import load_pictures

        pictures, began = load_pictures(self.processor), time.perf_counter()
        rgb = decode_picture(self.source, self.field, self.max_pixels)
        decoded = time.perf_counter()
        pixels = pictures.prepare(rgb, self.field)
        self.check(pixels)
        return Made(dict.fromkeys(self.parts, pixels), (decoded - began, time.perf_counter() - decoded))

    def check(self, pixels: Pixels) -> None:
        """The prompt was laid out by the picture's size alone.  Raises ValueError."""
        arrays = carried_arrays(pixels)
        if pixels.shape != self.shape or tuple(arrays.pop("token_ids").tolist()) != self.layout.token_ids:
            raise ValueError("the checkpoint's processor has laid out a picture otherwise than a blank one of its size")
        if not all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f"):
            raise ValueError("the checkpoint's processor has made of a picture what are no numbers")


@dataclass(frozen=True, slots=True)
class BorrowedLook:
    """How the checkpoint's own processor lays out a picture of a size."""

    processor: BorrowedProcessor
    geometry: Geometry
    field: str
    source = b""
    is_film = False
    what = "picture"

    def run(self) -> PictureLayout:
        from keepsight.frontend.pixels.borrowed_pictures import load_pictures

        return load_pictures(self.processor).lay_out(self.geometry, self.field)


@dataclass(frozen=True, slots=True)
class FilmLook:
    """A film's frames counted and measured, which takes the same code that decodes them."""

    source: FilmSource
    field: str
    max_pixels: int = DEFAULT_MAX_PIXELS
    is_film = True
    what = "film"

    def run(self) -> Geometry:
        return read_film(self.source, self.field, self.max_pixels)

    def check(self, geometry: Geometry) -> None:
        check_film(geometry, self.field, self.max_pixels)


@dataclass(frozen=True, slots=True)
class SoundLook:
    """A sound's samples counted, which takes the same code that decodes them."""

    source: SoundSource
    field: str
    sampling_rate: int
    is_film = False
    what = "sound"

    def run(self) -> Geometry:
        return read_sound(self.source, self.field, self.sampling_rate)

    def check(self, geometry: Geometry) -> None:
        check_sound(geometry, self.field, self.sampling_rate)


MakingJob = PictureJob | SoundJob | BorrowedJob
Look = FilmLook | SoundLook | BorrowedLook
# By looking.
Found = Geometry | PictureLayout
MakePixels = Callable[[MakingJob], Made]


def run_job(job: MakingJob) -> Made:
    """Where it is called."""
    return job.run()

"""Who looks into files that only a decoder understands, so that nobody here has to: a media worker, or this process."""

from dataclasses import dataclass

from keepsight.frontend.intake.read_film import ReadFilm, read_film
from keepsight.frontend.intake.read_sound import ReadSound, read_sound


@dataclass(frozen=True, slots=True)
class Readers:
    film: ReadFilm = read_film
    sound: ReadSound = read_sound

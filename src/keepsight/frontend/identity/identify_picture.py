"""Which picture a caller means, before anything of it is decoded: its geometry, and its name in every cache.

Its content names it, or in place of the content a *given name*: its caller's uuid, or its EXIF ImageID where that is
trusted.  Nobody proves what it is given to, so invariant: a given name is no content's alias and has none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keepsight.errors import (
    MediaConflictError,
    PictureEmbedsError,
    UnknownMediaError,
    UnreadablePictureError,
)
from keepsight.frontend.identity.common_geometries import CommonGeometries
from keepsight.frontend.identity.exif_image_id import read_image_id
from keepsight.frontend.identity.hash_media import (
    MediaHasher,
    hash_client_uuid,
    hash_content,
    hash_embeds_uuid,
    hash_exif_image_id,
    hash_shown_content,
)
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.frontend.identity.pan_and_scan import count_crops, plan_crops
from keepsight.frontend.intake.fetch_media import freeze, scheme_of, take_source
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.read_data_url import read_data_url
from keepsight.frontend.intake.read_embeds import Embeds, Values, read_embeds
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.frontend.pixels.make_pixels import PictureJob
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import (
    DEFAULT_MAX_PIXELS,
    TOKENS_PER_STRIP,
    CropBox,
    Geometry,
    KnownContent,
    MediaItem,
    Modality,
    PictureLayout,
    TokenSpan,
)
from keepsight.requests import Pixels


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that was looked at, but not decoded."""

    # None: only its uuid came.
    source: PictureSource | Embeds | None
    field: str
    geometry: Geometry
    layout: PictureLayout
    # Settled for it.
    config: ImageProcessorConfig
    uuid: str | None = None
    # What stands for its content, if anything does.
    given_name: str | None = None
    modality: Modality = "image"
    # Nobody had named one by its uuid before: should this fail, nobody has.
    is_first_of_its_name: bool = False
    # Its content's, where that was looked at before.
    content_name: str | None = None


@dataclass(frozen=True, slots=True)
class NamedPicture:
    picture: Picture
    # By media hash: the whole, then its crops.
    parts: Mapping[str, CropBox | None]
    _hasher: MediaHasher
    _known: KnownMedia
    _max_pixels: int

    def items(self, spans: Iterator[TokenSpan]) -> Iterator[MediaItem]:
        """One for each part, at the next of the spans."""
        modality, columns = self.picture.modality, self.picture.layout.columns
        for media_hash, crop in self.parts.items():
            geometry = self.picture.geometry if crop is None else Geometry(crop.width, crop.height)
            yield MediaItem(media_hash, next(spans), geometry, modality, crop is not None, columns)

    def job(self, media_hashes: Sequence[str]) -> PictureJob:
        """Raises UnknownMediaError if only its uuid came."""
        if self.picture.source is None:
            raise ask_for_picture(self.picture.field, self.picture.uuid)
        parts = {media_hash: self.parts[media_hash] for media_hash in media_hashes}
        return PictureJob(self.picture.source, self.picture.field, parts, self.picture.config, self._max_pixels)

    def forget(self) -> None:
        forget_name(self.picture, self._known)

    def names_by_now(self) -> Iterator[str]:
        """Of its parts: its pixels may have shown since it was named that it is another's picture."""
        return map(self._known.canonical_name, self.parts)

    def learn(self, media_hash: str, pixels: Pixels) -> None:
        """Other content that proves to have the same pixels goes by the same name from then on."""
        if self.picture.given_name is None and self.picture.modality == "image":
            pixel_hash = self._hasher.hash_pixels(pixels, self.picture.geometry, self.parts[media_hash])
            self._known.learn_pixels(media_hash, pixel_hash)


class PictureIdentifier:
    """Shared by all requests; may be used from several threads."""

    def __init__(
        self,
        model_id: str,
        algorithm: str,
        trusts_exif_image_id: bool = False,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        embeds_shape: tuple[int, int] = (0, 0),
        common: CommonGeometries | None = None,
    ) -> None:
        """`embeds_shape`: tokens of every picture, 0 where they follow from its size or there are none; hidden size."""
        self._model_id, self._algorithm, self._max_pixels = model_id, algorithm, max_pixels
        self._trusts_exif_image_id, self._embeds_shape = trusts_exif_image_id, embeds_shape
        self._known = KnownMedia(common=common)

    def recognize(self, parts: Sequence[PicturePart], cache_salt: str | None) -> tuple[PicturePart, ...] | None:
        """The same with their bytes and what is known of these, so that no header has to be read, which takes as long
        as who made it likes.  None where one was not looked at before.
        """
        recognized = []
        for part in parts:
            if (known := self._recognize(part, cache_salt)) is None:
                return None
            recognized.append(known)
        return tuple(recognized)

    def look_at(self, part: PicturePart, config: ImageProcessorConfig, cache_salt: str | None) -> Picture:
        if part.modality == "image_embeds":
            return self._look_at_embeds(part, config, cache_salt)
        if part.known is not None:
            return self._as_known(part, part.known, config)
        field, uuid, source, is_first = part.field, part.uuid, None, False
        given_name = None if uuid is None else hash_client_uuid(uuid, cache_salt, self._algorithm)
        if given_name is not None and part.source is None:
            geometry = self._recall(part, given_name)
            shown = self._show(geometry, config, field)
        else:
            sent = take_source(part.source, field)
            geometry = read_geometry(sent, field, self._max_pixels)
            # Whoever is refused has named nothing.
            shown = self._show(geometry, config, field)
            if given_name is None:
                given_name = self._name_given_by_exif(sent, field)
            else:
                is_first = self._is_first_or_the_same(part, geometry, given_name)
            source = freeze(sent, field)
        return Picture(source, field, geometry, *shown, uuid, given_name, is_first_of_its_name=is_first)

    def prefer_held(self, is_held: Callable[[str], bool]) -> None:
        """Content goes by the name of other content only while something is held under that."""
        self._known.is_held = is_held

    def forget(self, pictures: Iterable[Picture]) -> None:
        """The request that they were looked at for is refused."""
        for picture in pictures:
            forget_name(picture, self._known)

    def cut_prompt(self, source: object, field: str, config: ImageProcessorConfig) -> list[Picture]:
        """A prompt's embeddings as strips, which are named as pictures are: prompts that begin alike share those."""
        tokens, hidden = self._embeds_shape
        length = tokens or TOKENS_PER_STRIP
        values = read_embeds(source, field, (None, hidden)).values
        strips = [values[first : first + length] for first in range(0, len(values), length)]
        return [_as_strip(each, field, config) for each in strips]

    def name(self, pictures: Sequence[Picture], cache_salt: str | None) -> tuple[NamedPicture, ...]:
        hashers = {
            (config, modality): MediaHasher(self._model_id, config, cache_salt, self._algorithm, modality)
            for config, modality in {(picture.config, picture.modality) for picture in pictures}
        }
        named = [(picture, hashers[picture.config, picture.modality]) for picture in pictures]
        parts = [self._name_parts(picture, hasher, cache_salt) for picture, hasher in named]
        return tuple(
            NamedPicture(picture, names, hasher, self._known, self._max_pixels)
            for (picture, hasher), names in zip(named, parts, strict=True)
        )

    def _show(
        self, geometry: Geometry, config: ImageProcessorConfig, field: str
    ) -> tuple[PictureLayout, ImageProcessorConfig]:
        """How a picture of this size will lie in the prompt, and what its pixels are made by."""
        if config.sizes is None:
            return PictureLayout(self._embeds_shape[0], count_crops(geometry, config)), config
        config.sizes.check_can_show(geometry, field)
        rows, columns = config.sizes.grid_of(geometry)
        return PictureLayout(rows * columns, columns=columns), config.settled_for(geometry)

    def _as_known(self, part: PicturePart, known: KnownContent, config: ImageProcessorConfig) -> Picture:
        assert isinstance(part.source, bytes), part
        shown = self._show(known.geometry, config, part.field)
        return Picture(part.source, part.field, known.geometry, *shown, content_name=known.name)

    def _look_at_embeds(self, part: PicturePart, config: ImageProcessorConfig, cache_salt: str | None) -> Picture:
        """Of a picture as large as the tower's: whatever it was, its embeddings are of the whole."""
        if config.sizes is not None:
            message = "are not taken by this model: they do not tell in how many rows and columns a picture was"
            raise PictureEmbedsError(part.field, message)
        given_name = None if part.uuid is None else hash_embeds_uuid(part.uuid, cache_salt, self._algorithm)
        source = None if part.source is None else read_embeds(part.source, part.field, self._embeds_shape)
        geometry, is_first = Geometry(config.width, config.height), False
        if source is None:
            assert given_name is not None
            geometry = self._recall(part, given_name)
        elif given_name is not None:
            is_first = self._is_first_or_the_same(part, geometry, given_name)
        layout = PictureLayout(self._embeds_shape[0])
        return Picture(source, part.field, geometry, layout, config, part.uuid, given_name, part.modality, is_first)

    def _name_parts(self, picture: Picture, hasher: MediaHasher, cache_salt: str | None) -> dict[str, CropBox | None]:
        crops = (None, *plan_crops(picture.geometry, picture.config)) if picture.layout.num_crops else (None,)
        if picture.given_name is not None:
            names: Iterable[str] = hasher.hash_parts(picture.given_name, picture.geometry, crops)
        else:
            assert picture.source is not None
            content = picture.content_name or self._name_content(picture.source, picture.geometry, cache_salt)
            names = map(self._known.canonical_name, hasher.hash_parts(content, picture.geometry, crops))
        return dict(zip(names, crops, strict=True))

    def _name_content(self, source: PictureSource | Embeds, geometry: Geometry, cache_salt: str | None) -> str:
        name = hash_content(source, self._algorithm)
        if isinstance(source, bytes):
            self._known.learn_content(hash_shown_content(name, cache_salt, self._algorithm), geometry)
        return name

    def _recognize(self, part: PicturePart, cache_salt: str | None) -> PicturePart | None:
        if part.source is None:
            return part
        # Whatever has another name, or may have, is not known by its content.
        is_named_so = part.uuid is None and part.modality == "image" and not self._trusts_exif_image_id
        if not is_named_so or not isinstance(part.source, str) or scheme_of(part.source) != "data":
            return None
        try:
            content = read_data_url(part.source, part.field)
        except UnreadablePictureError:
            return None
        name = hash_content(content, self._algorithm)
        geometry = self._known.recall_content(hash_shown_content(name, cache_salt, self._algorithm))
        return None if geometry is None else replace(part, source=content, known=KnownContent(name, geometry))

    def _name_given_by_exif(self, source: PictureSource, field: str) -> str | None:
        image_id = read_image_id(source, field) if self._trusts_exif_image_id else None
        return None if image_id is None else hash_exif_image_id(image_id, self._algorithm)

    def _recall(self, part: PicturePart, given_name: str) -> Geometry:
        geometry = self._known.geometry_of(given_name)
        if geometry is None:
            raise ask_for_picture(part.field, part.uuid)
        return geometry

    def _is_first_or_the_same(self, part: PicturePart, geometry: Geometry, given_name: str) -> bool:
        """The same as far as a header can tell; whether it is the first."""
        known = self._known.remember_geometry(given_name, geometry)
        if known != geometry:
            raise MediaConflictError(
                part.field,
                f"has {geometry.width} x {geometry.height} pixels, but the uuid {part.uuid!r} already names a picture "
                f"of {known.width} x {known.height}; another picture needs another uuid",
            )
        return known is geometry


def _as_strip(values: Values, field: str, config: ImageProcessorConfig) -> Picture:
    length, hidden = values.shape
    geometry, layout = Geometry(hidden, length), PictureLayout(length)
    return Picture(Embeds(values), field, geometry, layout, config, modality="prompt_embeds")


def forget_name(picture: Picture, known: KnownMedia) -> None:
    if picture.is_first_of_its_name:
        assert picture.given_name is not None
        known.forget_geometry(picture.given_name)


def ask_for_picture(field: str, uuid: str | None) -> UnknownMediaError:
    return UnknownMediaError(
        field, f"the picture of uuid {uuid!r} is not cached here (any more): send it with its uuid"
    )

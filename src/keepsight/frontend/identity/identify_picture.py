"""Identifies a picture, film or sound before it is decoded: finds its geometry, and its name in every cache.

It is named by its content or, in place of the content, by a *given name*: the client's uuid, or its EXIF ImageID where
that is trusted. Nobody verifies given names, so invariant: a given name is no content's alias, and has none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import (
    MediaConflictError,
    PictureEmbedsError,
    UnknownMediaError,
    UnreadablePictureError,
)
from keepsight.frontend.identity.borrowed_layouts import BorrowedLayouts
from keepsight.frontend.identity.common_geometries import CommonGeometries
from keepsight.frontend.identity.exif_image_id import read_image_id
from keepsight.frontend.identity.hash_media import (
    MediaHasher,
    PartConfig,
    Source,
    hash_client_uuid,
    hash_content,
    hash_content_for_tenant,
    hash_exif_image_id,
)
from keepsight.frontend.identity.identify_document import DocumentIdentifier
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.frontend.identity.pan_and_scan import count_crops, plan_crops
from keepsight.frontend.identity.single_flight import SingleFlight
from keepsight.frontend.intake.check_kinds import check_is_picture, guess_kind
from keepsight.frontend.intake.fetch_media import scheme_of
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.read_data_url import read_data_url
from keepsight.frontend.intake.read_document import PageSource
from keepsight.frontend.intake.read_embeds import Embeds, Values, read_embeds
from keepsight.frontend.intake.read_film import read_film
from keepsight.frontend.intake.read_header import check_size, read_geometry
from keepsight.frontend.intake.read_sound import check_sound_length
from keepsight.frontend.intake.take_film import take_film
from keepsight.frontend.intake.take_picture import freeze_picture, take_picture
from keepsight.frontend.intake.take_sound import take_sound
from keepsight.frontend.pixels.make_pixels import (
    BorrowedJob,
    FilmJob,
    FilmLook,
    MakingJob,
    PictureJob,
    RunLook,
    SoundJob,
    SoundLook,
    look_here,
)
from keepsight.frontend.prompt.read_messages import DocumentPart, PicturePart
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import (
    DEFAULT_MAX_PIXELS,
    ENCODED,
    TOKENS_PER_STRIP,
    CropBox,
    Geometry,
    Kind,
    KnownContent,
    MediaItem,
    Modality,
    Moment,
    Part,
    PictureLayout,
    TokenSpan,
)
from keepsight.processor_config import ProcessorConfig
from keepsight.requests import Pixels
from keepsight.shown_sizes import check_can_show
from keepsight.sound_config import SoundConfig


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, film or sound that was looked at but not decoded."""

    # None if only its uuid was sent.
    source: Source | None
    field: str
    geometry: Geometry
    layout: PictureLayout
    # As settled for its geometry.
    config: PartConfig
    uuid: str | None = None
    # The name that stands for its content, if any.
    given_name: str | None = None
    modality: Modality = "image"
    # The name of its content, if known already.
    content_name: str | None = None
    # Only of a film.
    moments: tuple[Moment, ...] = ()
    # Its uuid was not known before this request, and is forgotten if the request fails before its pixels are made.
    introduced_uuid: bool = False


@dataclass(frozen=True, slots=True)
class NamedPicture:
    picture: Picture
    # One per part: the whole, then its crops; or the moments of a film, some of which may be the same; or the sound.
    names: tuple[str, ...]
    # By media hash.
    parts: Mapping[str, Part]
    _hasher: MediaHasher
    _known: KnownMedia
    _max_pixels: int

    def items(self, spans: Iterator[TokenSpan]) -> Iterator[MediaItem]:
        """Yield an item for each part, at the next of the spans."""
        modality, layout = self.picture.modality, self.picture.layout
        for index, media_hash in enumerate(self.names):
            geometry = _geometry_of(self.parts[media_hash], self.picture.geometry)
            later = layout.places[index] if layout.places and index else None
            yield MediaItem(media_hash, next(spans), geometry, modality, index > 0, layout.columns, later)

    def job(self, media_hashes: Sequence[str]) -> MakingJob:
        """Return the job that makes the pixels of these parts; raise UnknownMediaError if only the uuid was sent."""
        source, field, config = self.picture.source, self.picture.field, self.picture.config
        if source is None:
            raise ask_for_picture(field, self.picture.uuid)
        source, page = (source.document, source.number) if isinstance(source, PageSource) else (source, None)
        parts: dict[str, Any] = {media_hash: self.parts[media_hash] for media_hash in media_hashes}
        if isinstance(config, SoundConfig):
            return SoundJob(source, field, parts, config.sampling_rate, self.picture.geometry.num_samples)
        if isinstance(config, BorrowedProcessor):
            return BorrowedJob(source, field, parts, config, self.picture.layout, self._max_pixels, page)
        if self.picture.moments:
            return FilmJob(source, field, parts, config, self._max_pixels)
        return PictureJob(source, field, parts, config, self._max_pixels, page)

    def forget(self) -> None:
        forget_name(self.picture, self._known)

    def current_names(self) -> Iterator[str]:
        """Yield the current names of its parts: its pixels may since have proved equal to those of other content."""
        return map(self._known.canonical_name, self.parts)

    def learn(self, media_hash: str, pixels: Pixels) -> None:
        """Record the pixels of a part. Other content with the same pixels goes by the same name from then on.

        A uuid stays bound from then on, whatever becomes of the request that brought it.
        """
        if self.picture.uuid is not None and self.picture.given_name is not None:
            self._known.prove_geometry(self.picture.given_name, self.picture.geometry)
        if self.picture.given_name is None and self.picture.modality in ENCODED:
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
        run_look: RunLook = look_here,
        layouts: BorrowedLayouts | None = None,
    ) -> None:
        """`embeds_shape`: tokens of every picture (0 if they depend on its size or there are none), and hidden size.

        `layouts`: for a borrowed model that takes pictures.
        """
        self._run_look = run_look
        self._model_id, self._algorithm, self._max_pixels = model_id, algorithm, max_pixels
        self._trusts_exif_image_id, self._embeds_shape = trusts_exif_image_id, embeds_shape
        self._known = KnownMedia(common=common)
        self._looks = SingleFlight(self._known.recall_content, self._known.learn_content)
        self._layouts = layouts
        # Yields the pages of a PDF, each as a picture.
        self.pages_of = DocumentIdentifier(algorithm, run_look).pages_of

    def recognize(self, parts: Sequence[PicturePart], cache_salt: str | None) -> tuple[PicturePart, ...] | None:
        """Return the parts with their bytes and what is known of these, or None if one was not looked at before.

        This spares reading headers, which may take as long as the author of the file likes.
        """
        recognized = []
        for part in parts:
            if (known := self._recognize(part, cache_salt)) is None:
                return None
            recognized.append(known)
        return tuple(recognized)

    def look_at(self, part: PicturePart, config: ProcessorConfig, cache_salt: str | None) -> Picture:
        given_name = self._name_given_by_caller(part, cache_salt)
        if part.modality == "image_embeds":
            return self._look_at_embeds(part, config.image, given_name)
        if part.known is not None:
            assert isinstance(part.source, bytes), part
            return self._show(part, part.source, part.known.geometry, config, content_name=part.known.name)
        if part.source is None:
            return self._show(part, None, self._recall(part, given_name), config, given_name)
        if isinstance(part.source, PageSource):
            check_size(part.source.geometry, part.field, self._max_pixels)
            return self._show(part, part.source, part.source.geometry, config)
        if part.kind == "video":
            return self._look_at_film(part, config, given_name, cache_salt)
        if part.kind == "audio":
            return self._look_at_sound(part, config, given_name, cache_salt)
        sent = take_picture(part.source, part.field)
        if isinstance(sent, bytes):
            check_is_picture(sent, part.field, config)
        geometry = read_geometry(sent, part.field, self._max_pixels)
        # May refuse the picture, so it comes before the uuid is remembered.
        shown = self._show(part, freeze_picture(sent, part.field), geometry, config, given_name)
        if given_name is None:
            return replace(shown, given_name=self._name_given_by_exif(sent, part.field))
        return self._remember(shown)

    def guess_kind(self, content: bytes, field: str, config: ProcessorConfig) -> Kind:
        """Return the kind of media sent by itself, without a stated kind."""
        return guess_kind(content, field, config, self._max_pixels)

    def prefer_held(self, is_held: Callable[[str], bool]) -> None:
        """Let content go by the name of other content only while something is held under that name."""
        self._known.is_held = is_held

    def forget(self, pictures: Iterable[Picture]) -> None:
        """Forget the uuids that were new with a request that was refused."""
        for picture in pictures:
            forget_name(picture, self._known)

    def cut_prompt(self, source: object, field: str, config: ImageProcessorConfig) -> list[Picture]:
        """Cut a prompt's embeddings into strips, named like pictures: prompts that begin alike share strips."""
        tokens, hidden = self._embeds_shape
        if not hidden:
            raise PictureEmbedsError(field, "are not supported by this model: its config.json has no hidden_size")
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
            NamedPicture(picture, tuple(name for name, _ in own), dict(own), hasher, self._known, self._max_pixels)
            for (picture, hasher), own in zip(named, parts, strict=True)
        )

    def _show(
        self,
        part: PicturePart,
        source: Source | None,
        geometry: Geometry,
        config: ProcessorConfig,
        given_name: str | None = None,
        content_name: str | None = None,
    ) -> Picture:
        layout, settled, moments = self._lay_out(part, geometry, config)
        return Picture(
            source=source,
            field=part.field,
            geometry=geometry,
            layout=layout,
            config=settled,
            uuid=part.uuid,
            given_name=given_name,
            modality=part.modality,
            content_name=content_name,
            moments=moments,
        )

    def _lay_out(
        self, part: PicturePart, geometry: Geometry, config: ProcessorConfig
    ) -> tuple[PictureLayout, PartConfig, tuple[Moment, ...]]:
        """Return the layout of this geometry in the prompt, the options that make its pixels, and a film's moments."""
        image = config.image
        if config.borrowed is not None:
            assert self._layouts is not None, "a borrowed model of which nobody knows how pictures lie"
            return self._layouts.of(geometry, part.field), config.borrowed, ()
        if part.kind == "video":
            assert config.film is not None, "a film for a model that takes none"
            plan = config.film.plan(geometry, part.field)
            return plan.layout, plan.config, plan.moments
        if part.kind == "audio":
            assert config.sound is not None, "a sound for a model that takes none"
            check_sound_length(geometry.num_samples, config.sound, part.field)
            return PictureLayout(config.sound.num_tokens(geometry.num_samples), kind="audio"), config.sound, ()
        if image.sizes is None:
            return PictureLayout(self._embeds_shape[0], count_crops(geometry, image)), image, ()
        check_can_show(geometry, part.field)
        rows, columns = image.sizes.grid_of(geometry)
        return PictureLayout(rows * columns, columns=columns), image.settled_for(geometry), ()

    def _look_at_film(
        self, part: PicturePart, config: ProcessorConfig, given_name: str | None, cache_salt: str | None
    ) -> Picture:
        source, timeline = take_film(part.source, part.field)
        # Hashing is faster than opening.
        name = hash_content(source, self._algorithm)
        if isinstance(source, bytes):
            geometry = self._look_once(part, name, cache_salt, FilmLook(source, part.field, self._max_pixels))
        else:
            geometry = read_film(source, part.field, self._max_pixels, timeline)
        return self._remember(self._show(part, source, geometry, config, given_name, name))

    def _look_at_sound(
        self, part: PicturePart, config: ProcessorConfig, given_name: str | None, cache_salt: str | None
    ) -> Picture:
        assert config.sound is not None, "a sound for a model that takes none"
        rate = config.sound.sampling_rate
        source = take_sound(part.source, part.field, rate)
        name = hash_content(source, self._algorithm)
        geometry = self._look_once(part, name, cache_salt, SoundLook(source, part.field, rate))
        return self._remember(self._show(part, source, geometry, config, given_name, name))

    def _look_once(self, part: PicturePart, name: str, cache_salt: str | None, look: FilmLook | SoundLook) -> Geometry:
        """Return the geometry of content of this name, which its tenant may have sent before."""
        shown_as = hash_content_for_tenant(name, part.modality, cache_salt, self._algorithm)
        return self._looks.get_or_compute(shown_as, part.field, partial(self._run_look, look))

    def _look_at_embeds(self, part: PicturePart, config: ImageProcessorConfig, given_name: str | None) -> Picture:
        """Treat embeddings as a picture of the tower's size: whatever its own size, they are those of the whole."""
        source = None if part.source is None else read_embeds(part.source, part.field, self._embeds_shape)
        geometry = Geometry(config.width, config.height) if part.source is not None else self._recall(part, given_name)
        shown = Picture(
            source=source,
            field=part.field,
            geometry=geometry,
            layout=PictureLayout(self._embeds_shape[0]),
            config=config,
            uuid=part.uuid,
            given_name=given_name,
            modality=part.modality,
        )
        return self._remember(shown)

    def _name_parts(self, picture: Picture, hasher: MediaHasher, cache_salt: str | None) -> list[tuple[str, Part]]:
        parts = _parts_of(picture)
        if picture.given_name is not None:
            names: Iterable[str] = hasher.hash_parts(picture.given_name, picture.geometry, parts)
        else:
            assert picture.source is not None
            content = picture.content_name or self._name_content(picture.source, picture.geometry, cache_salt)
            names = map(self._known.canonical_name, hasher.hash_parts(content, picture.geometry, parts))
        return list(zip(names, parts, strict=True))

    def _name_content(self, source: Source, geometry: Geometry, cache_salt: str | None) -> str:
        name = hash_content(source, self._algorithm)
        if isinstance(source, bytes):
            self._known.learn_content(hash_content_for_tenant(name, "image", cache_salt, self._algorithm), geometry)
        return name

    def _recognize(self, part: PicturePart, cache_salt: str | None) -> PicturePart | None:
        if part.source is None:
            # Its size is known but, for a borrowed model, perhaps not its layout in a prompt.
            return part if self._layouts is None else None
        # What has a given name is not recognized by its content: a file with a trusted ImageID was never learned.
        is_named_so = part.modality in ENCODED and part.uuid is None and not isinstance(part, DocumentPart)
        if not is_named_so or not isinstance(part.source, str) or scheme_of(part.source) != "data":
            return None
        try:
            content = read_data_url(part.source, part.field)
        except UnreadablePictureError:
            return None
        name = hash_content(content, self._algorithm)
        shown_as = hash_content_for_tenant(name, part.modality, cache_salt, self._algorithm)
        geometry = self._known.recall_content(shown_as)
        if geometry is None or (self._layouts is not None and not self._layouts.knows(geometry)):
            return None
        return replace(part, source=content, known=KnownContent(name, geometry))

    def _name_given_by_exif(self, source: PictureSource, field: str) -> str | None:
        image_id = read_image_id(source, field) if self._trusts_exif_image_id else None
        return None if image_id is None else hash_exif_image_id(image_id, self._algorithm)

    def _name_given_by_caller(self, part: PicturePart, cache_salt: str | None) -> str | None:
        return None if part.uuid is None else hash_client_uuid(part.uuid, part.modality, cache_salt, self._algorithm)

    def _recall(self, part: PicturePart, given_name: str | None) -> Geometry:
        geometry = None if given_name is None else self._known.geometry_of(given_name)
        if geometry is None:
            raise ask_for_picture(part.field, part.uuid)
        return geometry

    def _remember(self, picture: Picture) -> Picture:
        """Remember its geometry by its uuid, if any; raise MediaConflictError if the uuid names another geometry."""
        geometry, given_name = picture.geometry, picture.given_name
        if picture.source is None or given_name is None:
            return picture
        known = self._known.remember_geometry(given_name, geometry)
        if known != geometry:
            message = (
                f"has {_describe(geometry)}, but the uuid {picture.uuid!r} already names one with {_describe(known)}; "
                "different media need different uuids"
            )
            raise MediaConflictError(picture.field, message)
        return replace(picture, introduced_uuid=known is geometry)


def _parts_of(picture: Picture) -> tuple[Part, ...]:
    if picture.moments:
        return picture.moments
    if picture.layout.num_crops and isinstance(picture.config, ImageProcessorConfig):
        return (None, *plan_crops(picture.geometry, picture.config))
    return (None,)


def _geometry_of(part: Part, whole: Geometry) -> Geometry:
    if isinstance(part, CropBox):
        return Geometry(part.width, part.height)
    return replace(whole, timeline=None)


def _describe(geometry: Geometry) -> str:
    if geometry.num_samples:
        return f"{geometry.num_samples} samples"
    size, timeline = f"{geometry.width} x {geometry.height} pixels", geometry.timeline
    if timeline is None:
        return size
    whole = f" from a film of {timeline.num_frames_of_whole}" if timeline.excerpt else ""
    return f"{timeline.num_frames} frames{whole} of {size}, {timeline.frames_per_second:g} a second"


def _as_strip(values: Values, field: str, config: ImageProcessorConfig) -> Picture:
    length, hidden = values.shape
    geometry, layout = Geometry(hidden, length), PictureLayout(length)
    return Picture(Embeds(values), field, geometry, layout, config, modality="prompt_embeds")


def forget_name(picture: Picture, known: KnownMedia) -> None:
    if picture.introduced_uuid:
        assert picture.given_name is not None
        known.forget_geometry(picture.given_name)


def ask_for_picture(field: str, uuid: str | None) -> UnknownMediaError:
    return UnknownMediaError(
        field, f"what the uuid {uuid!r} names is not cached here (any more): send it with its uuid"
    )

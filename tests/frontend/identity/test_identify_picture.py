"""A picture has one name in any form, different pictures have different names; client-given names stay separate."""

import itertools
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from keepsight.config import Config
from keepsight.errors import (
    InvalidArgumentError,
    MediaConflictError,
    PictureCountError,
    UnknownMediaError,
    UnreadablePictureError,
    UnsupportedPictureError,
)
from keepsight.film_processors import Qwen3VLFilmConfig
from keepsight.film_sizes import SizesOfAllFrames
from keepsight.frontend.identity import identify_picture
from keepsight.frontend.identity.identify_picture import NamedPicture, PictureIdentifier
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.read_messages import PicturePart, read_messages
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.processor_config import ProcessorConfig
from keepsight.sampling_params import SamplingParams
from keepsight.shown_sizes import ShownSizes
from tests.drawn import ask, by_object, by_url, draw, to_data_url, to_png
from tests.frontend.sample_pictures import CROPPING, encode

CONFIG = ImageProcessorConfig(height=16, width=16)
PARAMS = SamplingParams()
CROPPED = {"do_pan_and_scan": True}
MARKER = "<start_of_image>"


def in_many_forms(picture: Image.Image) -> list[PictureSource]:
    """Return the same pixels as four sources of different content."""
    return [encode(picture, "PNG"), encode(picture, "WEBP", lossless=True), picture, np.asarray(picture)]


def identify(
    identifier: PictureIdentifier,
    source: object,
    config: ImageProcessorConfig = CONFIG,
    salt: str | None = None,
    client_uuid: str | None = None,
) -> NamedPicture:
    picture = identifier.look_at(PicturePart(source, "picture", client_uuid), ProcessorConfig(config), salt)
    [named] = identifier.name([picture], salt)
    return named


def learn(named: NamedPicture) -> dict[str, bytes]:
    """Make the pixels and learn their names as the media pool does; return the bytes by name."""
    made = named.job(list(named.parts)).run().pixels
    for media_hash, pixels in made.items():
        named.learn(media_hash, pixels)
    return {media_hash: pixels.tobytes() for media_hash, pixels in made.items()}


def whole(named: NamedPicture) -> str:
    return next(iter(named.parts))


# Aliases ---------------------------------------------------------------------------------------------------------


def test_new_content_with_known_pixels_gets_the_known_name() -> None:
    identifier = PictureIdentifier("model", "blake3")
    sources = in_many_forms(draw(1).picture)
    first = [whole(identify(identifier, source)) for source in sources]
    assert len(set(first)) == len(sources)
    for source in sources:
        learn(identify(identifier, source))
    assert {whole(identify(identifier, source)) for source in sources} == {first[0]}
    assert whole(identify(identifier, draw(2).picture)) not in first


# Recognized pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [None, CROPPED])
def test_a_recognized_picture_gives_the_same_request_as_a_decoded_one(
    preparer: RequestPreparer, overrides: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rotated by its metadata, so that the header's size differs from the decoded frame's.
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    content = encode(draw(41).picture.resize((640, 300)), "JPEG", exif=turned)
    conversation = read_messages(ask(by_url_of(content), "What?"))
    sent = preparer.prepare_chat(conversation, PARAMS, overrides, "a salt")

    def refuse(*_: object) -> object:
        raise AssertionError("read")

    monkeypatch.setattr(identify_picture, "read_geometry", refuse)
    recognized = preparer.recognize(conversation, "a salt")
    assert recognized is not None
    again = preparer.prepare_chat(recognized, PARAMS, overrides, "a salt")
    assert again.engine_request.media == sent.engine_request.media
    assert again.engine_request.token_ids == sent.engine_request.token_ids
    assert make_all(again) == make_all(sent)
    assert preparer.recognize(conversation, "another") is None, "or time would tell what others have shown"


def test_a_picture_that_comes_with_a_uuid_is_looked_at_anew(preparer: RequestPreparer) -> None:
    content = by_url(draw(42).picture)
    preparer.prepare_chat(read_messages(ask(content)), PARAMS)
    assert preparer.recognize(read_messages(ask(content)), None) is not None
    assert preparer.recognize(read_messages(ask(content | {"uuid": "mine"})), None) is None


def test_where_exif_ids_are_trusted_a_picture_is_recognized_only_if_it_has_none() -> None:
    preparer = RequestPreparer.from_config(Config(trust_exif_image_id=True))
    for content in (encode(draw(1).picture, "PNG"), with_image_id(draw(1).picture)):
        conversation = read_messages(ask(by_url_of(content)))
        sent = preparer.prepare_chat(conversation, PARAMS)
        recognized = preparer.recognize(conversation, None)
        assert (recognized is None) == (b"eXIf" in content)
        again = preparer.prepare_chat(recognized or conversation, PARAMS)
        assert hashes_of(again) == hashes_of(sent)


def test_what_was_refused_is_never_recognized(preparer: RequestPreparer) -> None:
    conversation = read_messages(ask(by_url_of(b"no picture"), "What?"))
    with pytest.raises(UnreadablePictureError):
        preparer.prepare_chat(conversation, PARAMS)
    assert preparer.recognize(conversation, None) is None


COLOURS = [(255, 0, 0), (0, 0, 255)]
SIZES = [(16, 16), (32, 32), (64, 16), (16, 64), (16, 16)]
CONFIGS = [
    CONFIG,
    CONFIG.with_overrides(**CROPPING | {"pan_and_scan_min_crop_size": 8}),
    CONFIG.with_overrides(width=8),
]
pictures = st.tuples(st.sampled_from(SIZES), st.sampled_from(COLOURS), st.integers(0, 3))
requests = st.tuples(pictures, st.sampled_from(CONFIGS), st.sampled_from([None, "a", "b"]))


@settings(max_examples=60)
@given(st.lists(requests, min_size=2, max_size=6))
def test_two_items_have_one_name_exactly_if_everything_that_reaches_the_model_is_equal(asked: list[Any]) -> None:
    """Uses plain areas of color: those of different sizes become equal once they are resized."""
    identifier = PictureIdentifier("model", "blake3")

    def items() -> Any:
        for (size, colour, form), config, salt in asked:
            named = identify(identifier, in_many_forms(Image.new("RGB", size, colour))[form], config, salt)
            pixels = learn(named)
            for media_hash, crop in named.parts.items():
                shown = (pixels[media_hash], named.picture.geometry, crop)
                yield media_hash, (shown, config.width, salt)

    list(items())
    for (left, is_left), (right, is_right) in itertools.combinations(items(), 2):
        assert (left == right) == (is_left == is_right)


@pytest.mark.parametrize("gives", [{"client_uuid": "cat"}, {}])
def test_a_client_given_name_is_never_merged_with_a_content_s_name(gives: dict[str, Any]) -> None:
    """Otherwise a client could put other pixels under the name of content that it never sent."""
    identifier = PictureIdentifier("model", "blake3", trusts_exif_image_id=not gives)
    by_content, by_given_name = encode(draw(1).picture, "PNG"), with_image_id(draw(1).picture)
    names = set()
    for _ in range(2):
        for source, options in ((by_given_name, gives), (by_content, {})):
            named = identify(identifier, source, **options)
            learn(named)
            names.add((source, whole(named)))
    assert len(names) == len({name for _, name in names}) == 2
    webp = encode(draw(1).picture, "WEBP", lossless=True)
    learn(identify(identifier, webp))
    assert whole(identify(identifier, webp)) == whole(identify(identifier, by_content))


def test_no_alias_crosses_from_one_tenant_or_model_to_another() -> None:
    identifier = PictureIdentifier("model", "blake3")
    png, webp, *_ = in_many_forms(draw(1).picture)
    learn(identify(identifier, png, salt="a"))
    learn(identify(identifier, webp, salt="b"))
    assert whole(identify(identifier, webp, salt="b")) != whole(identify(identifier, png, salt="a"))


def hashes_of(prepared: PreparedRequest) -> list[str]:
    return [item.media_hash for item in prepared.engine_request.media]


def make_all(prepared: PreparedRequest) -> dict[str, bytes]:
    made = prepared.pixels_of(prepared.makeable_media)
    prepared.learn(made)
    return {media_hash: pixels.tobytes() for media_hash, pixels in made.items()}


def test_two_forms_of_one_picture_in_one_request_are_one_item_shown_twice(preparer: RequestPreparer) -> None:
    picture = draw(31).picture.resize((640, 300))
    forms = [encode(picture, "PNG"), encode(picture, "WEBP", lossless=True)]

    def prepare() -> PreparedRequest:
        return preparer.prepare_text(MARKER * 2, {"image": forms}, PARAMS, CROPPED)

    before = prepare()
    assert len(set(hashes_of(before))) == 6
    apart = make_all(before)
    together = prepare()
    assert hashes_of(together) == hashes_of(before)[:3] * 2
    assert together.makeable_media == tuple(hashes_of(before)[:3])
    assert together.group_by_picture(set(hashes_of(together))) == [tuple(hashes_of(before)[:3])]
    assert make_all(together) == {name: apart[name] for name in hashes_of(before)[:3]}
    spans = [(item.span, item.geometry) for item in together.engine_request.media]
    assert spans == [(item.span, item.geometry) for item in before.engine_request.media]


def test_a_picture_known_whole_but_not_in_crops_gets_each_part_from_its_source(preparer: RequestPreparer) -> None:
    picture = draw(32).picture.resize((640, 300))
    png, webp = encode(picture, "PNG"), encode(picture, "WEBP", lossless=True)
    for content in (png, webp):
        make_all(preparer.prepare_text(MARKER, {"image": [content]}, PARAMS))
    both = preparer.prepare_text(MARKER * 2, {"image": [webp, png]}, PARAMS, CROPPED)
    names = hashes_of(both)
    assert names[0] == names[3]
    assert len(set(names)) == 5
    assert both.group_by_picture(set(names)) == [tuple(names[:3]), tuple(names[4:])]
    pixels = make_all(both)
    assert [pixels[name] for name in names[:3]] == [pixels[name] for name in names[3:]]


# Clients' uuids --------------------------------------------------------------------------------------------------


def test_a_uuid_stands_for_content_that_is_never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr(identify_picture, "hash_content", refuse)
    identifier = PictureIdentifier("model", "blake3")
    sources = [source for seed in (1, 2) for source in in_many_forms(draw(seed).picture)]
    assert len({whole(identify(identifier, source, client_uuid="cat")) for source in sources}) == 1


def test_a_uuid_gets_different_names_in_different_namespaces() -> None:
    identifier, other_model = PictureIdentifier("model", "blake3"), PictureIdentifier("other", "blake3")
    png = encode(draw(1).picture, "PNG")
    content = whole(identify(identifier, png))
    names = [
        content,
        *(whole(identify(identifier, png, client_uuid=each)) for each in ("cat", "dog", content, "None")),
        *(whole(identify(identifier, png, salt=salt, client_uuid="cat")) for salt in ("a", "b", "None")),
        whole(identify(identifier, with_image_id(draw(1).picture), client_uuid=str(IMAGE_ID))),
        whole(identify(PictureIdentifier("model", "blake3", True), with_image_id(draw(1).picture))),
        whole(identify(other_model, png, client_uuid="cat")),
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("overrides", [None, CROPPED])
def test_a_uuid_that_is_known_needs_no_picture(preparer: RequestPreparer, overrides: dict[str, Any] | None) -> None:
    name, part = f"wide {overrides}", by_url(draw(1).picture.resize((640, 300)))
    sent = preparer.prepare_chat(ask(part | {"uuid": name}, "What?"), PARAMS, overrides)
    for left_out in ({"type": "image_url", "uuid": name}, {"type": "image_pil", "image_pil": None, "uuid": name}):
        alone = preparer.prepare_chat(ask(left_out, "What?"), PARAMS, overrides)
        assert alone.engine_request.token_ids == sent.engine_request.token_ids
        assert alone.engine_request.media == sent.engine_request.media
        assert alone.makeable_media == ()
        assert alone.engine_request.unsent_media == tuple(hashes_of(alone))
        assert sent.engine_request.unsent_media == ()
        assert sent.find_unknown(hashes_of(sent)) is None
        refusal = alone.find_unknown(hashes_of(alone))
        assert (refusal and refusal.field) == alone_field(left_out)


def alone_field(part: dict[str, Any]) -> str:
    return f"messages[0].content[0].{part['type']}"


def test_an_unknown_uuid_asks_for_its_picture(preparer: RequestPreparer) -> None:
    with pytest.raises(UnknownMediaError, match=r"uuid 'never seen' .* send it") as caught:
        preparer.prepare_chat(ask({"type": "image_url", "image_url": None, "uuid": "never seen"}), PARAMS)
    error = caught.value
    assert (error.field, error.code, error.status) == (alone_field({"type": "image_url"}), "media_not_cached", 400)
    make_all(
        preparer.prepare_text(
            MARKER, {"image": [draw(1).picture]}, PARAMS, uuids={"image": ["never seen"]}, cache_salt="another"
        )
    )
    with pytest.raises(UnknownMediaError):
        preparer.prepare_text(MARKER, {"image": [None]}, PARAMS, uuids={"image": ["never seen"]})


def test_a_uuid_whose_pixels_are_wanted_and_gone_asks_for_its_picture(preparer: RequestPreparer) -> None:
    preparer.prepare_text(MARKER, {"image": [draw(1).picture]}, PARAMS, uuids={"image": ["gone"]})
    alone = preparer.prepare_text(MARKER, {"image": [None]}, PARAMS, uuids={"image": ["gone"]})
    with pytest.raises(UnknownMediaError, match="uuid 'gone'") as caught:
        alone.pixels_of(hashes_of(alone))
    assert caught.value.field == "multi_modal_data.image[0]"
    as_own = preparer.prepare_text(
        MARKER * 2, {"image": [draw(2).picture, None]}, PARAMS, uuids={"image": [None, "gone"]}
    ).as_own(caught.value, hashes_of(alone)[0])
    assert isinstance(as_own, UnknownMediaError)
    assert as_own.field == "multi_modal_data.image[1]"


@pytest.mark.parametrize("sent_first", [True, False])
def test_a_picture_that_comes_once_serves_all_its_uuid_s_places(preparer: RequestPreparer, sent_first: bool) -> None:
    name, picture = f"twice {sent_first}", draw(5).picture
    preparer.prepare_text(MARKER, {"image": [picture]}, PARAMS, uuids={"image": [name]})
    pictures = [picture, None] if sent_first else [None, picture]
    prepared = preparer.prepare_text(MARKER * 2, {"image": pictures}, PARAMS, uuids={"image": [name] * 2})
    [media_hash] = set(hashes_of(prepared))
    assert prepared.find_unknown([media_hash]) is None
    assert prepared.pixels_of([media_hash]).keys() == {media_hash} == set(prepared.makeable_media)
    assert prepared.engine_request.unsent_media == ()


def test_a_uuid_never_names_two_pictures_of_different_sizes(preparer: RequestPreparer) -> None:
    preparer.prepare_text(MARKER, {"image": [Image.new("RGB", (40, 30))]}, PARAMS, uuids={"image": ["size"]})
    with pytest.raises(MediaConflictError, match=r"30 x 40 .* 'size' already .* 40 x 30") as caught:
        preparer.prepare_text(MARKER, {"image": [Image.new("RGB", (30, 40))]}, PARAMS, uuids={"image": ["size"]})
    error = caught.value
    assert (error.field, error.code, error.status) == ("multi_modal_data.image[0]", "media_uuid_conflict", 400)
    preparer.prepare_text(
        MARKER, {"image": [Image.new("RGB", (30, 40))]}, PARAMS, uuids={"image": ["size"]}, cache_salt="another"
    )
    # Nor if the frontend forgot the first and the engine still holds its embeddings.
    names = {
        whole(identify(PictureIdentifier("model", "blake3"), Image.new("RGB", size), client_uuid="size"))
        for size in ((40, 30), (30, 40))
    }
    assert len(names) == 2


def test_a_request_that_is_refused_or_whose_picture_cannot_be_made_binds_no_uuid(preparer: RequestPreparer) -> None:
    wide, high = Image.new("RGB", (40, 30)), Image.new("RGB", (30, 40))
    with pytest.raises(PictureCountError):
        preparer.prepare_text("no marker", {"image": [wide]}, PARAMS, uuids={"image": ["free"]})
    preparer.prepare_text(MARKER, {"image": [high]}, PARAMS, uuids={"image": ["free"]}).forget_names()
    preparer.prepare_text(MARKER, {"image": [wide]}, PARAMS, uuids={"image": ["free"]})
    # Once the uuid is bound, the failure of another request does not unbind it.
    with pytest.raises(PictureCountError):
        preparer.prepare_text("no marker", {"image": [wide]}, PARAMS, uuids={"image": ["free"]})
    preparer.prepare_text(MARKER, {"image": [wide]}, PARAMS, uuids={"image": ["free"]}).forget_names()
    preparer.prepare_text(MARKER, {"image": [None]}, PARAMS, uuids={"image": ["free"]})


def test_a_request_that_fails_leaves_a_uuid_bound_that_was_made_for_others_meanwhile(preparer: RequestPreparer) -> None:
    png = to_png(draw(3).picture)
    failing = preparer.prepare_text(
        MARKER * 2, {"image": [png, to_png(draw(4).picture)[:-400]]}, PARAMS, uuids={"image": ["used", None]}
    )
    make_all(preparer.prepare_text(MARKER, {"image": [png]}, PARAMS, uuids={"image": ["used"]}))
    with pytest.raises(UnreadablePictureError):
        make_all(failing)
    failing.forget_names()
    assert preparer.prepare_text(MARKER, {"image": [None]}, PARAMS, uuids={"image": ["used"]}).engine_request.media


def test_a_film_of_another_rate_needs_another_uuid_and_is_told_why() -> None:
    sizes = SizesOfAllFrames(ShownSizes(16, 2, 4096, 25_165_824), False, 768)
    config = ProcessorConfig(CONFIG, film=Qwen3VLFilmConfig(sizes, CONFIG))
    identifier, frames = PictureIdentifier("model", "blake3"), np.zeros((4, 64, 64, 3), np.uint8)

    def look(**metadata: object) -> None:
        identifier.look_at(PicturePart((frames, metadata), "film", "u", modality="video"), config, None)

    look(fps=24)
    message = r"has 4 frames of 64 x 64 pixels, 2\.5 a second, but .* one with 4 frames of 64 x 64 pixels, 24 a second"
    with pytest.raises(MediaConflictError, match=message):
        look(fps=2.5)
    with pytest.raises(MediaConflictError, match="has 4 frames from a film of 9 of 64 x 64 pixels, 24 a second"):
        look(fps=24, total_num_frames=9, frames_indices=[0, 2, 4, 6])


def test_a_film_that_is_sent_as_a_picture_is_told_from_a_broken_one(preparer: RequestPreparer) -> None:
    with pytest.raises(UnsupportedPictureError, match="is a film, not a picture; send its frames"):
        preparer.prepare_text(MARKER, {"image": [b"\0\0\0\x18ftypisom"]}, PARAMS)


def test_a_broken_picture_is_not_excused_by_its_uuid(preparer: RequestPreparer) -> None:
    png = to_png(draw(7).picture)
    with pytest.raises(UnreadablePictureError):
        preparer.prepare_text(MARKER, {"image": [b"no picture"]}, PARAMS, uuids={"image": ["broken"]})
    cut = preparer.prepare_text(MARKER, {"image": [png[: len(png) // 2]]}, PARAMS, uuids={"image": ["broken"]})
    with pytest.raises(UnreadablePictureError):
        cut.pixels_of(hashes_of(cut))
    assert make_all(preparer.prepare_text(MARKER, {"image": [png]}, PARAMS, uuids={"image": ["broken"]})).keys() == set(
        hashes_of(cut)
    )


def test_changing_a_picture_after_sending_it_with_a_uuid_has_no_effect(preparer: RequestPreparer) -> None:
    picture = draw(3).picture.copy()
    expected = make_all(
        preparer.prepare_text(MARKER, {"image": [picture.copy()]}, PARAMS, uuids={"image": ["changed"]})
    )
    prepared = preparer.prepare_text(MARKER, {"image": [picture]}, PARAMS, uuids={"image": ["changed"]})
    picture.paste((0, 0, 0), (0, 0, *picture.size))
    assert make_all(prepared) == expected


@pytest.mark.parametrize("uuids", [[], ["a"], ["a", "b", "c"]])
def test_there_are_as_many_uuids_as_pictures(preparer: RequestPreparer, uuids: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"holds {len(uuids)} for 2 of multi_modal_data") as caught:
        preparer.prepare_text(MARKER * 2, {"image": [draw(1).picture] * 2}, PARAMS, uuids={"image": uuids})
    assert caught.value.field == "multi_modal_uuids.image"


def test_each_uuid_is_checked_under_its_place(preparer: RequestPreparer) -> None:
    with pytest.raises(InvalidArgumentError, match="printable") as caught:
        preparer.prepare_text(MARKER * 2, {"image": [draw(1).picture] * 2}, PARAMS, uuids={"image": [None, "\n"]})
    assert caught.value.field == "multi_modal_uuids.image[1]"
    with pytest.raises(InvalidArgumentError) as caught:
        preparer.prepare_text(MARKER, {"image": [None]}, PARAMS, uuids={"image": [None]})
    assert caught.value.field == "multi_modal_data.image[0]"


# EXIF's ImageID --------------------------------------------------------------------------------------------------

IMAGE_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")


def with_image_id(picture: Image.Image, image_id: uuid.UUID = IMAGE_ID) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.ImageID] = str(image_id)
    return encode(picture, "PNG", exif=exif)


def names_under(*, trust: bool) -> list[str]:
    preparer = RequestPreparer.from_config(Config(trust_exif_image_id=trust))
    contents = [with_image_id(draw(seed).picture) for seed in (1, 2)]
    contents += [with_image_id(draw(1).picture.resize((50, 60))), with_image_id(draw(1).picture, uuid.UUID(int=1))]
    return [
        hashes_of(preparer.prepare_chat(ask(by_url_of(content)), PARAMS, cache_salt=salt))[0]
        for content in contents
        for salt in (None, "a")
    ]


def by_url_of(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_data_url(content)}}


def test_two_pictures_with_one_exif_id_stay_two_unless_it_is_trusted() -> None:
    assert len(set(names_under(trust=False))) == 8


def test_a_trusted_exif_id_stands_for_the_content_of_one_size_within_one_tenant() -> None:
    names = names_under(trust=True)
    assert names[:2] == names[2:4]
    assert len(set(names)) == 6


def test_a_picture_without_an_exif_id_is_named_by_its_content_whether_or_not_they_are_trusted() -> None:
    picture = by_object(draw(1).picture)
    names = [
        hashes_of(RequestPreparer.from_config(Config(trust_exif_image_id=trust)).prepare_chat(ask(picture), PARAMS))
        for trust in (True, False)
    ]
    assert names[0] == names[1]

"""Different values have different hashes, and so do pictures whose embeddings could differ."""

import dataclasses
import hashlib
import io
import uuid
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from keepsight.config import HASHER_ALGORITHMS
from keepsight.frontend.identity import hash_media
from keepsight.frontend.identity.hash_media import (
    MediaHasher,
    hash_client_uuid,
    hash_content,
    hash_exif_image_id,
    hash_values,
)
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.intake.picture_array import try_freeze_array
from keepsight.frontend.intake.read_header import MODES
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox, Geometry, Modality, Moment
from keepsight.requests import Pixels
from tests.drawn import draw, to_png

CONFIG = ImageProcessorConfig()
GEOMETRY = Geometry(5, 7)


def name_values(**parts: object) -> str:
    return hash_values("blake3", **parts)


def name_content(source: PictureSource) -> str:
    return hash_content(source, "blake3")


# Values ---------------------------------------------------------------------------------------------------------

keys = st.text(max_size=2) | st.binary(max_size=2) | st.integers(-2, 2) | st.booleans()
# A small domain, so that two drawn values are often equal.
scalars = (
    st.sampled_from([None, True, False, 0, 1, -1, 255, 256, 0.0, -0.0, 1.0, "", "a", "ab", b"", b"a", b"ab"])
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def canonical(value: Any) -> str:
    """Return a text that is equal for two values exactly if they are the same: kind and content of all their parts."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        pairs = sorted((canonical(key), canonical(inner)) for key, inner in value.items())
        return f"{{{','.join(f'{key}:{inner}' for key, inner in pairs)}}}"
    return repr(value)


def reshaped(value: Any) -> Any:
    """Return the same value with lists for tuples and every dict in reverse order."""
    if isinstance(value, list | tuple):
        return [reshaped(each) for each in value]
    if isinstance(value, dict):
        return {key: reshaped(inner) for key, inner in reversed(value.items())}
    return value


@given(values, values)
def test_two_values_have_one_hash_exactly_if_they_are_the_same(left: Any, right: Any) -> None:
    assert (name_values(value=left) == name_values(value=right)) == (canonical(left) == canonical(right))


@given(values)
def test_the_order_of_dicts_and_the_kind_of_sequence_do_not_matter_at_any_depth(value: Any) -> None:
    assert name_values(value=value) == name_values(value=reshaped(value))


@given(st.lists(values, min_size=2, max_size=6))
def test_where_a_value_ends_and_the_next_begins_matters(parts: list[Any]) -> None:
    split_early, split_late = [parts[:1], parts[1:]], [parts[:-1], parts[-1:]]
    assert (name_values(value=split_early) == name_values(value=split_late)) == (len(parts) == 2)


def test_values_that_look_alike_have_hashes_of_their_own() -> None:
    alike: list[Any] = [
        *("abc", b"abc", ["abc"], ["a", "bc"], ["ab", "c"], {"abc": None}, {"a": "bc"}, {b"a": "bc"}, "\ud800"),
        *(0, False, 0.0, -0.0, None, "", b"", [], {}, "0", "None", [None], [[]], [0], [{}]),
        *(1, True, 1.0, "1", 1.5, float("inf"), float("nan"), -1, 255, 256, -256, 2**16),
        *(2**63, -(2**63), 2**64, 2**64 + 1, 2**640, -(2**640)),
        *({"a": {"b": 1, "c": 2}}, {"a": {"b": 2, "c": 1}}, {"a": {"b": 1}, "c": 2}),
    ]
    assert len({name_values(value=each) for each in alike}) == len(alike)


def test_the_name_of_a_value_is_a_part_of_it_and_the_order_of_names_is_not() -> None:
    assert name_values(a=1, b=2) == name_values(b=2, a=1) != name_values(a=2, b=1)
    assert name_values() != name_values(a=None)


NUMPY_SCALARS = [np.int64(1), np.uint8(1), np.bool_(True), np.float64(1), np.float32(1), np.str_("1"), np.bytes_(b"1")]


@pytest.mark.parametrize("value", [object(), {1}, np.zeros(2), 1j, bytearray(b"1"), *NUMPY_SCALARS])
def test_what_has_no_framing_of_its_own_is_never_hashed_by_chance(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        name_values(value=[value])


def test_bytes_are_the_same_however_they_are_lent() -> None:
    lent = [b"abcd", memoryview(b"abcd"), memoryview(bytearray(b"abcd")), memoryview(b"abcd").cast("B", (2, 2))]
    assert len({name_values(value=[each, b"e"]) for each in lent}) == 1


def test_a_hash_is_blake3_in_hex_and_the_same_in_every_process() -> None:
    assert name_values(a=[1, "x", None]) == "4ae7721ae7e5f15426ec83c620743e42f3addfa00bc5cd473d91fdd5be92f511"


@pytest.mark.parametrize(
    ("algorithm", "digest"),
    [
        ("sha256", "2ee0e50a48a5c8eb0b4ad85e3126f4375b26658f812fece86dc3bcda561f65c7"),
        (
            "sha512",
            "7e03bd3ada898edbd165a81543a242865330b1553482a92d7b0814207367f0b028715ca202b25da5af1fa261b72254cf7c0dbff396f96207c2fa11778faff996",
        ),
    ],
)
def test_other_algorithms_are_the_standard_ones_and_whole(algorithm: str, digest: str) -> None:
    assert hash_values(algorithm, a=[1, "x", None]) == digest


# Content --------------------------------------------------------------------------------------------------------


def test_bytes_are_named_by_every_one_of_them() -> None:
    png = to_png(draw(1).picture)
    others = [png[:-1], png + b"\0", png[:50] + bytes([png[50] ^ 1]) + png[51:], b""]
    assert len({name_content(each) for each in (png, *others)}) == 5
    assert name_content(png) == name_content(bytes(bytearray(png)))


def test_a_pil_image_is_named_by_what_it_shows_wherever_it_comes_from() -> None:
    picture = draw(1).picture
    opened = Image.open(io.BytesIO(to_png(picture)))
    opened.info["comment"] = "of no consequence"
    assert name_content(opened) == name_content(picture) == name_content(picture.copy())
    changed = picture.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    assert name_content(changed) != name_content(picture)


def test_the_same_pixels_of_another_mode_or_size_are_another_picture() -> None:
    pixels = bytes(range(240)) * 2
    shapes = [
        *(("RGB", size) for size in [(16, 10), (10, 16), (160, 1)]),
        *((mode, (12, 10)) for mode in ("RGBA", "CMYK", "RGBX", "RGBa")),
        *((mode, (24, 20)) for mode in ("L", "P")),
        *((mode, (16, 10)) for mode in ("YCbCr", "LAB", "HSV")),
        *((mode, (24, 10)) for mode in ("LA", "La", "PA")),
    ]
    names = {name_content(Image.frombytes(mode, size, pixels)) for mode, size in shapes}
    assert len(names) == len(shapes)


def test_every_mode_that_is_served_has_a_name() -> None:
    assert len({name_content(Image.new(mode, (3, 5))) for mode in MODES}) == len(MODES)


def palette_picture() -> Image.Image:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette(bytes(range(30)))
    return picture


def test_a_palette_and_its_transparency_are_a_part_of_a_picture() -> None:
    variants = [palette_picture() for _ in range(6)]
    variants[1].putpalette(bytes(reversed(range(30))))
    variants[2].putpalette(bytes(range(40)), "RGBA")
    variants[3].info["transparency"] = 1
    variants[4].info["transparency"] = 2
    variants[5].info["transparency"] = bytes([255, 7])
    assert len({name_content(each) for each in variants}) == 6
    assert name_content(palette_picture()) == name_content(variants[0])


def test_a_transparent_colour_that_changes_the_pixels_changes_the_name() -> None:
    plain, transparent = Image.new("RGB", (2, 2), (9, 8, 7)), Image.new("RGB", (2, 2), (9, 8, 7))
    transparent.info["transparency"] = (9, 8, 7)
    assert not np.array_equal(decode_picture(plain), decode_picture(transparent))
    assert name_content(plain) != name_content(transparent)


def frozen(source: object) -> PictureSource:
    array = try_freeze_array(source, "picture")
    assert array is not None
    return array


def test_an_array_is_named_by_its_shape_and_data_and_not_by_how_it_lies_in_memory() -> None:
    array = np.arange(10 * 12 * 3, dtype=np.uint8).reshape(10, 12, 3)
    tensor = torch.from_numpy(array)
    same = [
        array.copy(order="F"),
        np.repeat(array, 2, axis=1)[:, ::2],
        array[::-1].copy()[::-1],
        tensor,
        tensor.permute(1, 0, 2).contiguous().permute(1, 0, 2),
        torch.nn.functional.pad(tensor, (1, 1, 2, 2))[:, 2:-2, 1:-1],
    ]
    assert {name_content(frozen(each)) for each in same} == {name_content(frozen(array))}
    shapes = [(10, 12, 3), (12, 10, 3), (3, 10, 12), (3, 12, 10), (10, 36), (1, 10, 36), (10, 36, 1)]
    others = [frozen(array.reshape(shape)) for shape in shapes] + [frozen(array ^ 1), array.tobytes()]
    others.append(Image.fromarray(array))
    assert len({name_content(each) for each in others}) == len(others)


# Items ----------------------------------------------------------------------------------------------------------


def name_of(
    *,
    model: str = "a",
    config: ImageProcessorConfig = CONFIG,
    salt: str | None = None,
    crop: CropBox | None = None,
    algorithm: str = "blake3",
    content: str = "content",
    geometry: Geometry = GEOMETRY,
    modality: Modality = "image",
) -> str:
    [name] = MediaHasher(model, config, salt, algorithm, modality).hash_parts(content, geometry, [crop])
    return name


def test_every_option_of_the_processor_but_those_that_choose_the_crops_is_a_part_of_the_name() -> None:
    changes: dict[str, Any] = {
        "height": 225,
        "width": 225,
        "resample": 3,
        "image_mean": (0.4, 0.5, 0.5),
        "image_std": (0.4, 0.5, 0.5),
        "rescale_factor": 0.5,
        "backend": "pil",
    }
    names = {name: name_of(config=CONFIG.with_overrides(**{name: value})) for name, value in changes.items()}
    assert len({*names.values(), name_of()}) == len(changes) + 1
    choosing = {each.name for each in dataclasses.fields(CONFIG)} - changes.keys()
    assert all("pan_and_scan" in name or name == "sizes" for name in choosing)
    assert name_of(config=CONFIG.with_overrides(do_pan_and_scan=True)) == name_of()


def test_the_model_the_salt_the_modality_and_the_crop_are_a_part_of_the_name() -> None:
    names = [
        name_of(),
        name_of(model="b"),
        name_of(modality="image_embeds"),
        name_of(modality="prompt_embeds"),
        *(name_of(salt=salt) for salt in ("a", "b", "None", "\ud800")),
        *(name_of(crop=CropBox(*box)) for box in [(0, 0, 2, 3), (0, 0, 3, 2), (2, 0, 2, 3), (0, 2, 2, 3)]),
    ]
    assert len(set(names)) == len(names)


def test_a_long_salt_is_a_part_of_the_name_too_but_is_not_kept() -> None:
    num_kept = hash_media._hash_terms.cache_info().currsize
    long = "x" * hash_media.MAX_KEPT_SALT
    assert name_of(salt=long + "a") != name_of(salt=long + "b")
    assert hash_media._hash_terms.cache_info().currsize == num_kept


def test_a_name_that_is_kept_is_the_one_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [name_of(salt="a"), name_of(salt="a")]
    monkeypatch.setattr(hash_media, "MAX_KEPT_SALT", 0)
    assert {*twice, name_of(salt="a")} == {twice[0]}


def test_what_two_pictures_of_one_given_name_differ_in_without_being_looked_at_is_a_part_of_the_name() -> None:
    assert len({name_of(), name_of(geometry=Geometry(7, 5)), name_of(content="another")}) == 3


def test_what_stands_for_content_is_in_a_namespace_of_its_own() -> None:
    image_id = uuid.UUID(int=5)
    texts = [str(image_id), image_id.hex, "5", ""]
    names = [
        *(name_content(each) for each in (image_id.bytes, *(text.encode() for text in texts))),
        *(
            hash_client_uuid(text, modality, salt, "blake3")
            for text in texts
            for modality in get_args(Modality)
            for salt in (None, "", "5")
        ),
        *(hash_exif_image_id(each, "blake3") for each in (image_id, uuid.UUID(int=6))),
    ]
    assert len(set(names)) == len(names)


def test_pixels_are_named_by_all_that_reaches_the_model_and_by_nothing_else() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)

    def name(
        pixels: Pixels = pixels,
        geometry: Geometry = GEOMETRY,
        crop: CropBox | None = None,
        config: ImageProcessorConfig = CONFIG,
        salt: str | None = None,
    ) -> str:
        return MediaHasher("a", config, salt, "blake3").hash_pixels(pixels, geometry, crop)

    same = [pixels.copy(), np.asfortranarray(pixels), np.repeat(pixels, 2, axis=1)[:, ::2]]
    assert {name(each) for each in same} == {name()}
    assert name(config=CONFIG.with_overrides(do_pan_and_scan=True)) == name()
    others = [
        *(name(each) for each in (pixels ^ np.uint8(1), pixels.reshape(6, 4, 3), pixels[:2])),
        name(geometry=Geometry(7, 5)),
        name(crop=CropBox(0, 0, 5, 7)),
        name(config=CONFIG.with_overrides(image_mean=(0.4, 0.5, 0.5))),
        name(salt="a"),
    ]
    assert len({name(), *others}) == len(others) + 1


def test_the_parts_of_a_picture_are_named_in_their_order() -> None:
    crops = [None, CropBox(0, 0, 2, 3), CropBox(2, 0, 2, 3)]
    assert list(MediaHasher("a", CONFIG, None, "blake3").hash_parts("content", GEOMETRY, crops)) == [
        name_of(crop=crop) for crop in crops
    ]


def test_the_moments_of_a_film_are_named_by_it_and_by_the_numbers_of_their_frames() -> None:
    moments = [Moment(0, 1), Moment(1, 0), Moment(0, 0), Moment(2, 3)]
    films = [("a", None, GEOMETRY), ("b", None, GEOMETRY), ("a", "tenant", GEOMETRY), ("a", None, Geometry(7, 5))]
    names = {
        name
        for content, salt, geometry in films
        for name in MediaHasher("model", CONFIG, salt, "blake3", "video").hash_parts(content, geometry, moments)
    }
    assert len(names) == len(films) * len(moments)


def test_an_algorithm_s_names_are_its_whole_digests() -> None:
    assert [len(name_of(algorithm=each)) for each in HASHER_ALGORITHMS] == [64, 64, 128]


def test_the_algorithm_is_a_part_of_what_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in HASHER_ALGORITHMS:
        monkeypatch.setitem(hash_media._HASHERS, each, hashlib.sha256)
    # Bypass the cache, so that hashes made with the wrong algorithm do not reach other tests.
    monkeypatch.setattr(hash_media, "_hash_terms", hash_media._hash_terms.__wrapped__)
    assert len({name_of(algorithm=each) for each in HASHER_ALGORITHMS}) == len(HASHER_ALGORITHMS)

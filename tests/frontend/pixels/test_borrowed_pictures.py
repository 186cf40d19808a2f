"""The output of a checkpoint's own processor is used only if it does not depend on the text and other pictures."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.borrowed import BorrowedProcessor
from keepsight.errors import CheckpointConfigError, UnsupportedPictureError
from keepsight.frontend.pixels.borrowed_pictures import BorrowedPictures, load_pictures
from keepsight.frontend.pixels.make_pixels import BorrowedJob
from keepsight.frontend.pixels.render_page import render_page
from keepsight.media import Geometry
from keepsight.pixels import carried_arrays
from keepsight.requests import Pixels
from tests.frontend.borrowed_like import FAMILIES, IDEFICS3, LLAVA, Family, load_reference, write_borrowed_checkpoint
from tests.frontend.sample_documents import Page, write_pdf

BLANK = np.zeros((2, 3, 3), np.uint8)


class Tokenizer:
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*text.encode()]}


class Processor:
    """Writes one `*` per pixel of a picture's width, between brackets."""

    tokenizer = Tokenizer()
    joined: tuple[str, str] = ("", "")

    def __call__(self, text: Sequence[str], images: Sequence[Pixels], **_: Any) -> Mapping[str, Any]:
        written = iter("[" + "*" * each.shape[1] + "]" for each in images)
        expanded = re.sub(r"\*", lambda _: next(written), text[0]).replace(*self.joined)
        pixel_values = np.stack([each[:1, :1].astype(np.float64) / 255 for each in images])
        return {"input_ids": np.array([[*expanded.encode()]]), "pixel_values": pixel_values, "attention_mask": None}


def test_a_picture_is_laid_out_by_its_size_and_made_into_its_arrays_in_single_precision() -> None:
    pictures = BorrowedPictures(Processor(), "*")
    pictures.check_texts()
    layout, made = pictures.lay_out(Geometry(3, 2), "picture"), pictures.prepare(BLANK + 51, "picture")
    assert bytes(layout.token_ids) == b"[***]"
    assert (layout.num_tokens, layout.num_bytes) == (5, made.nbytes)
    arrays = carried_arrays(made)
    assert arrays.pop("token_ids").tolist() == [*b"[***]"]
    [(name, array)] = arrays.items()
    assert (name, str(array.dtype), array.shape) == ("pixel_values", "float32", (1, 1, 1, 3))
    assert array.ravel().tolist() == [np.float32(0.2)] * 3


@pytest.mark.parametrize("joined", [("][", "|"), ("\n[", "_"), ("a[", "a_"), ("] c", "]c")])
def test_a_processor_that_writes_a_picture_otherwise_in_some_text_is_refused(joined: tuple[str, str]) -> None:
    processor = Processor()
    processor.joined = joined
    with pytest.raises(ValueError, match="what it writes for a picture depends on the text around it:"):
        BorrowedPictures(processor, "*").check_texts()


def test_what_a_processor_does_not_take_is_refused_in_its_words() -> None:
    class Narrow(Processor):
        def __call__(self, text: Sequence[str], images: Sequence[Pixels], **_: Any) -> Mapping[str, Any]:
            raise ValueError("absolute aspect ratio must be\n smaller than 200")

    message = r"this model's own processor takes no picture of 3 x 2 pixels: .* must be smaller than 200"
    with pytest.raises(UnsupportedPictureError, match=message) as caught:
        BorrowedPictures(Narrow(), "*").lay_out(Geometry(3, 2), "messages[0]")
    assert caught.value.field == "messages[0]"


@pytest.mark.parametrize("made", [[[1], [2, 3]], None, np.array([None])], ids=["ragged", "nothing", "objects"])
def test_what_it_makes_and_cannot_be_carried_is_refused_as_well(made: object) -> None:
    class Odd(Processor):
        def __call__(self, text: Sequence[str], images: Sequence[Pixels], **_: Any) -> Mapping[str, Any]:
            return {**super().__call__(text, images), "sizes": made}

    with pytest.raises(UnsupportedPictureError, match="this model's own processor takes no picture of 3 x 2 pixels"):
        BorrowedPictures(Odd(), "*").lay_out(Geometry(3, 2), "picture")


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        (LLAVA, {"processor_config": {"processor_class": "NobodysProcessor"}}, "no processor named 'NobodysProces"),
        (LLAVA, {"preprocessor_config": {"image_processor_type": "NobodysImageProcessor"}}, "Nobodys|Unrecognized"),
        (IDEFICS3, {"processor_config": {"image_seq_len": "many"}}, "cannot be used"),
    ],
)
def test_a_checkpoint_whose_processor_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, family: Family, changed: dict[str, Any], message: str
) -> None:
    write_borrowed_checkpoint(tmp_path / "checkpoint", family, **changed)
    with pytest.raises(CheckpointConfigError, match=message):
        load_pictures(BorrowedProcessor.from_checkpoint(tmp_path / "checkpoint"))


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    remote_code = {"auto_map": {"AutoProcessor": "evil.Evil", "AutoImageProcessor": "evil.Evil"}}
    write_borrowed_checkpoint(
        tmp_path / "a", LLAVA, processor_config=remote_code, preprocessor_config=remote_code, config=remote_code
    )
    (tmp_path / "a" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass")
    load_pictures(BorrowedProcessor.from_checkpoint(tmp_path / "a"))
    assert not (tmp_path / "ran").exists()


def test_a_picture_that_is_laid_out_otherwise_than_by_its_size_is_not_shown(tmp_path: Path) -> None:
    write_borrowed_checkpoint(tmp_path / "a", LLAVA)
    processor = BorrowedProcessor.from_checkpoint(tmp_path / "a")
    layout = load_pictures(processor).lay_out(Geometry(3, 2), "picture")
    BorrowedJob(BLANK, "picture", {"": None}, processor, layout).run()
    other = load_pictures(processor).lay_out(Geometry(3, 2), "picture")
    object.__setattr__(other, "token_ids", other.token_ids[1:])
    with pytest.raises(ValueError, match="differently from a blank one of its size"):
        BorrowedJob(BLANK, "picture", {"": None}, processor, other).run()


def test_a_page_of_a_pdf_is_prepared_as_its_drawing_is(tmp_path: Path) -> None:
    write_borrowed_checkpoint(tmp_path / "a", LLAVA)
    processor, pdf = BorrowedProcessor.from_checkpoint(tmp_path / "a"), write_pdf(Page(), Page(["A report"]))
    drawn = render_page(pdf, 1, "file")
    layout = load_pictures(processor).lay_out(Geometry(drawn.shape[1], drawn.shape[0]), "file")
    of_page = BorrowedJob(pdf, "file", {"": None}, processor, layout, page=1).run()
    of_drawing = BorrowedJob(drawn, "file", {"": None}, processor, layout).run()
    np.testing.assert_array_equal(of_page.pixels[""], of_drawing.pixels[""])


def test_a_file_by_which_older_checkpoints_name_tokens_makes_it_another_processor(tmp_path: Path) -> None:
    write_borrowed_checkpoint(tmp_path / "a", LLAVA)
    path = tmp_path / "a" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["added_tokens_decoder"]  # Otherwise the other file is not read.
    path.write_text(json.dumps(config))
    before = BorrowedProcessor.from_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "special_tokens_map.json").write_text(json.dumps({"cls_token": "<image>"}))
    after = BorrowedProcessor.from_checkpoint(tmp_path / "a")
    assert load_pictures(after)._processor.tokenizer.cls_token == "<image>"
    assert before.digest != after.digest


LONG = [(1, 1), (3000, 40), (40, 3000), (1, 700), (700, 1)]
sizes = st.tuples(st.integers(1, 400), st.integers(1, 400)) | st.sampled_from(LONG)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_any_size_is_laid_out_as_by_the_reference(family: Family, tmp_path: Path) -> None:
    write_borrowed_checkpoint(tmp_path / "a", family)
    pictures = load_pictures(BorrowedProcessor.from_checkpoint(tmp_path / "a"))
    reference = load_reference(tmp_path / "a", family)

    @settings(max_examples=20)
    @given(sizes)
    def check(size: tuple[int, int]) -> None:
        width, height = size
        picture = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
        asked = {"text": [family.image_token], "images": [picture], "input_data_format": "channels_last"}
        try:
            expected = reference(**asked, add_special_tokens=False, return_tensors="np")
        except ValueError:  # Pixtral's: the picture would be resized to nothing.
            with pytest.raises(UnsupportedPictureError, match=f"takes no picture of {width} x {height} pixels"):
                pictures.lay_out(Geometry(width, height), "picture")
            return
        layout = pictures.lay_out(Geometry(width, height), "picture")
        assert layout.token_ids == tuple(expected["input_ids"][0].tolist())
        assert pictures.prepare(picture, "picture").nbytes == layout.num_bytes

    check()

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from keepsight.errors import CheckpointConfigError, PictureCountError, ReservedTokenError
from keepsight.frontend.prompt.expand_prompt import MediaPromptFormat, PromptExpander, WrittenForm
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.media import PictureLayout
from tests.frontend.gemma_like import DEMO, gemma_like_checkpoint, load_processor
from tests.frontend.qwen_like import IMAGE, SPECIAL, VIDEO, build_qwen_like_checkpoint

CHECKPOINTS = [pytest.param(DEMO, id="demo"), pytest.param(gemma_like_checkpoint(), id="gemma-like")]
MARKER = "<start_of_image>"
NEWLINES = st.integers(0, 6).map(lambda count: "\n" * count)
TEXTS = st.one_of(
    st.sampled_from(["", " ", "  ", "a", "Here is", "\t", " \n ", "é", "東京", "😀", "<table>", "<", "e\u0301", "▁"]),
    st.sampled_from(
        ["<end_of_turn>\n", "<start_of_turn>user\n", "<eos>", "<bos>", "<mask>", "start_of_image>", "\r\n"]
    ),
    st.text(max_size=6),
)
PIECES = st.tuples(NEWLINES, TEXTS, NEWLINES).map("".join)
# A prompt is text, then pairs of (number of crops, text after the picture). Pictures may be first, last or adjacent.
PROMPTS = st.tuples(PIECES, st.lists(st.tuples(st.sampled_from([0, 0, 1, 2, 4]), PIECES), max_size=4))


def laid_out(num_crops: list[int]) -> list[PictureLayout]:
    """Return the layouts of pictures, which are the same for both checkpoints."""
    return [PictureLayout(16, crops) for crops in num_crops]


def make_expander(directory: Path, **options: Any) -> PromptExpander:
    tokenizer = Tokenizer.from_checkpoint(directory)
    return PromptExpander(tokenizer, MediaPromptFormat.from_checkpoint(directory, tokenizer), **options)


def expand_by_transformers(directory: Path, text: str, num_crops: list[int], add_bos: bool) -> list[int]:
    """Run only the text half of Gemma3Processor, without the cost of its picture half."""
    processor = load_processor(directory)
    replacements = [processor.replace_image_token({"num_crops": num_crops}, index) for index in range(len(num_crops))]
    (expanded,), _ = processor.get_text_with_replacements([text], replacements)
    token_ids: list[int] = processor.tokenizer(expanded, add_special_tokens=add_bos)["input_ids"]
    return token_ids


@pytest.mark.parametrize("directory", CHECKPOINTS)
def test_token_ids_and_spans_are_those_of_transformers_for_any_text(directory: Path) -> None:
    expander = make_expander(directory)
    soft_token_id = load_processor(directory).tokenizer.image_token_id

    @settings(max_examples=200)
    @given(PROMPTS, st.booleans())
    def check(prompt: tuple[str, list[tuple[int, str]]], add_bos: bool) -> None:
        text = prompt[0] + "".join(MARKER + after for _, after in prompt[1])
        num_crops = [crops for crops, _ in prompt[1]]
        expanded = expander.expand(text, laid_out(num_crops), add_bos=add_bos)
        assert list(expanded.token_ids) == expand_by_transformers(directory, text, num_crops, add_bos)
        assert len(expanded.spans) == sum(1 + crops for crops in num_crops)
        soft_places = [index for index, token_id in enumerate(expanded.token_ids) if token_id == soft_token_id]
        assert soft_places == [index for span in expanded.spans for index in range(span.start, span.end)]
        assert expander.expand(text, laid_out(num_crops), add_bos=add_bos) == expanded  # Now from the cache.

    check()
    expander._cache.check_invariants()


@pytest.mark.parametrize("directory", CHECKPOINTS)
@pytest.mark.parametrize("left", range(7))
def test_newlines_beside_a_marker_merge_as_in_transformers(directory: Path, left: int) -> None:
    expander = make_expander(directory)
    for right in range(7):
        for text in (
            f"a{chr(10) * left}{MARKER}{chr(10) * right}b",
            f"{MARKER}{chr(10) * left}{MARKER}{chr(10) * right}",
        ):
            num_crops = [0] * text.count(MARKER)
            expected = expand_by_transformers(directory, text, num_crops, add_bos=False)
            assert list(expander.expand(text, laid_out(num_crops)).token_ids) == expected


@pytest.mark.parametrize("directory", CHECKPOINTS)
def test_the_whole_processor_agrees_with_crops_and_without(directory: Path) -> None:
    expander, processor = make_expander(directory), load_processor(directory)
    pictures = [Image.fromarray(np.zeros((30, width, 3), np.uint8)) for width in (30, 120)]
    text = f"Look: {MARKER}\n{MARKER} what?"
    for pan_and_scan, num_crops in ((False, [0, 0]), (True, [0, 4])):
        output = processor(
            text=text, images=pictures, do_pan_and_scan=pan_and_scan, pan_and_scan_min_crop_size=8, return_tensors="np"
        )
        assert (
            list(expander.expand(text, laid_out(num_crops), add_bos=True).token_ids) == output["input_ids"][0].tolist()
        )
        assert output["pixel_values"].shape[0] == sum(1 + crops for crops in num_crops)


@pytest.mark.parametrize(("text", "num_pictures"), [("no picture", 1), (MARKER, 0), (MARKER * 3, 2)])
def test_more_or_fewer_markers_than_pictures_are_refused_with_both_numbers(text: str, num_pictures: int) -> None:
    with pytest.raises(PictureCountError, match=rf"{text.count(MARKER)} {MARKER} markers for {num_pictures} pictures"):
        make_expander(DEMO).expand(text, laid_out([0] * num_pictures))


@pytest.mark.parametrize("token", ["<image_soft_token>", "<end_of_image>"])
def test_a_text_that_forges_a_picture_is_refused_every_time(token: str) -> None:
    expander = make_expander(DEMO)
    for _ in range(2):
        with pytest.raises(ReservedTokenError, match=f"messages: the text must not contain {token}"):
            expander.expand(f"{MARKER} look {token}", laid_out([0]))


def test_a_text_only_model_takes_no_pictures_and_knows_no_markers() -> None:
    expander = PromptExpander(Tokenizer.from_checkpoint(DEMO), None)
    assert expander.expand(f"a {MARKER}").spans == ()
    with pytest.raises(PictureCountError, match="text only"):
        expander.expand("a", laid_out([0]))


def test_known_text_is_not_encoded_again_when_a_conversation_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO)
    expander = PromptExpander(tokenizer, MediaPromptFormat.from_checkpoint(DEMO, tokenizer))
    encoded = note_encoded(monkeypatch, tokenizer)
    turn = f"<bos><start_of_turn>user\nwhat is {MARKER} this<end_of_turn>\n<start_of_turn>model\na cat<end_of_turn>"
    expander.expand(turn, laid_out([0]))
    encoded.clear()
    expander.expand(turn + "\n<start_of_turn>user\nsure?<end_of_turn>\n<start_of_turn>model\n", laid_out([0]))
    assert encoded == ["\n<start_of_turn>user\nsure?", "\n<start_of_turn>model\n"]


def test_a_text_is_known_to_those_alone_who_share_a_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO)
    expander = PromptExpander(tokenizer, None)
    encoded = note_encoded(monkeypatch, tokenizer)
    expanded = {expander.expand("a cat", cache_salt=salt) for salt in ("one", None, "another", "one", "another", None)}
    assert len(expanded) == 1
    assert encoded == ["a cat"] * 3


def test_the_cache_of_texts_keeps_to_its_bytes_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO)
    expander = PromptExpander(tokenizer, None, text_cache_max_bytes=1500)
    nothing_kept = PromptExpander(tokenizer, None, text_cache_max_bytes=0)
    encoded = note_encoded(monkeypatch, tokenizer)
    for text in "abcdef":
        expander.expand(text)
        expander.expand("a")
        expander._cache.check_invariants()
    assert encoded == list("abcdef")
    for text in ("a", "f", "b", "large " * 100, "large " * 100):
        expander.expand(text)
    assert encoded[6:] == ["b", "large " * 100, "large " * 100]
    encoded.clear()
    for _ in range(2):
        assert nothing_kept.expand("a") == expander.expand("a")
    assert encoded == ["a", "a"]


def note_encoded(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> list[str]:
    encode, encoded = tokenizer.encode, list[str]()

    def note_and_encode(text: str, **options: Any) -> tuple[int, ...]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", note_and_encode)
    return encoded


def make_checkpoint(directory: Path, name: str, **changes: Any) -> Tokenizer:
    shutil.copytree(DEMO, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Tokenizer.from_checkpoint(directory)


def test_the_format_of_the_checkpoints() -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO)
    assert MediaPromptFormat.from_checkpoint(DEMO, tokenizer) == MediaPromptFormat(
        {"image": WrittenForm("<start_of_image>", 909, (7,), (8,), "\n\n")},
        {7: "<start_of_image>", 909: "<image_soft_token>", 8: "<end_of_image>"},
        16,
    )


def make_nameless_checkpoint(directory: Path) -> Tokenizer:
    """Write a checkpoint whose tokenizer does not name its picture tokens."""
    make_checkpoint(
        directory, "tokenizer_config.json", extra_special_tokens={}, boi_token=None, eoi_token=None, image_token=None
    )
    (directory / "special_tokens_map.json").unlink()
    return Tokenizer.from_checkpoint(directory)


def test_the_format_is_found_by_ids_alone(tmp_path: Path) -> None:
    tokenizer = make_nameless_checkpoint(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    assert "boi_token" not in tokenizer.special_tokens
    assert MediaPromptFormat.from_checkpoint(tmp_path, tokenizer) == MediaPromptFormat.from_checkpoint(DEMO, tokenizer)


def test_a_token_that_text_becomes_cannot_be_a_picture_s(tmp_path: Path) -> None:
    tokenizer = make_nameless_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token_index": tokenizer.token_id("a")}))
    with pytest.raises(CheckpointConfigError, match="image_token_index: a is not a plain special token"):
        MediaPromptFormat.from_checkpoint(tmp_path, tokenizer)


def test_a_checkpoint_without_a_vision_tower_has_no_format(tmp_path: Path) -> None:
    tokenizer = make_checkpoint(tmp_path, "config.json", vision_config=None)
    assert MediaPromptFormat.from_checkpoint(tmp_path, tokenizer) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_tokens_per_image": 17}, "is 17, but image_seq_length of processor_config.json is 16"),
        ({"mm_tokens_per_image": None}, "is 256, but image_seq_length of processor_config.json is 16"),
        ({"mm_tokens_per_image": "x"}, "mm_tokens_per_image"),
        ({"mm_tokens_per_image": True}, "mm_tokens_per_image"),
        ({"boi_token_index": 8}, "boi_token_index: is 8, but <start_of_image> of the tokenizer is 7"),
        ({"image_token_index": 5000}, "image_token_index: names no token"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tokenizer = make_checkpoint(tmp_path, "config.json", **changes)
    with pytest.raises(CheckpointConfigError, match=message):
        MediaPromptFormat.from_checkpoint(tmp_path, tokenizer)


# Qwen's ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen-like")
    build_qwen_like_checkpoint(directory)
    return directory


def expand_as_qwen_does(tokenizer: Any, text: str, grids: list[tuple[int, int]]) -> list[int]:
    """Expand by Qwen3VLProcessor's own method; the whole processor needs torchvision."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    processor: Any = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token=IMAGE)
    inputs = {"image_grid_thw": np.array([(1, 2 * rows, 2 * columns) for rows, columns in grids])}
    first, *others = text.split(IMAGE)
    for index, after in enumerate(others):
        first += Qwen3VLProcessor.replace_image_token(processor, inputs, index) + after
    token_ids: list[int] = tokenizer(first, add_special_tokens=False)["input_ids"]
    return token_ids


def test_a_marker_becomes_as_many_as_its_picture_has_tokens_as_in_transformers(qwen_like: Path) -> None:
    import transformers

    expander = make_expander(qwen_like)
    reference: Any = transformers.PreTrainedTokenizerFast.from_pretrained(qwen_like)
    image_id = reference.vocab[IMAGE]
    pictures = st.tuples(st.integers(1, 5), st.integers(1, 40))
    texts = st.one_of(PIECES, st.sampled_from([each for each in SPECIAL if each not in (IMAGE, VIDEO)]))

    @settings(max_examples=200)
    @given(texts, st.lists(st.tuples(pictures, texts), max_size=4))
    def check(before: str, prompt: list[tuple[tuple[int, int], str]]) -> None:
        text = before + "".join(IMAGE + after for _, after in prompt)
        grids = [grid for grid, _ in prompt]
        layouts = [PictureLayout(rows * columns, columns=columns) for rows, columns in grids]
        expanded = expander.expand(text, layouts)
        assert list(expanded.token_ids) == expand_as_qwen_does(reference, text, grids)
        places = [place for place, token_id in enumerate(expanded.token_ids) if token_id == image_id]
        assert places == [place for span in expanded.spans for place in range(span.start, span.end)]
        assert [span.length for span in expanded.spans] == [rows * columns for rows, columns in grids]

    check()


def write_film_as_qwen_does(numbers: list[int], rate: float, rows: int, columns: int) -> str:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor: Any = SimpleNamespace(video_processor=sizes, video_token=VIDEO, _calculate_timestamps=None)
    processor.vision_start_token, processor.vision_end_token = SPECIAL[2:4]
    processor._calculate_timestamps = partial(Qwen3VLProcessor._calculate_timestamps, processor)
    metadata = SimpleNamespace(fps=rate, frames_indices=numbers)
    grid = np.array([[(len(numbers) + 1) // 2, 2 * rows, 2 * columns]])
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    written: str = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    return written


def test_a_film_becomes_its_moments_each_behind_its_time_as_in_transformers(qwen_like: Path) -> None:
    import transformers

    expander = make_expander(qwen_like)
    reference: Any = transformers.PreTrainedTokenizerFast.from_pretrained(qwen_like)

    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 9000), min_size=2, max_size=9), st.sampled_from([24.0, 29.97, 1.0]), PIECES)
    def check(numbers: list[int], rate: float, between: str) -> None:
        paired = [*numbers, *numbers[-1:] * (len(numbers) % 2)]
        times = tuple((first / rate + last / rate) / 2 for first, last in zip(paired[::2], paired[1::2], strict=True))
        film, picture = PictureLayout(6, columns=3, times=times, kind="video"), PictureLayout(4, columns=2)
        expanded = expander.expand(f"Look: {VIDEO}{between}{IMAGE}", [film, picture])
        text = f"Look: {write_film_as_qwen_does(list(numbers), rate, 2, 3)}{between}{IMAGE * 4}"
        assert list(expanded.token_ids) == reference(text, add_special_tokens=False)["input_ids"]
        assert [span.length for span in expanded.spans] == [6] * len(times) + [4]
        soft = [expanded.token_ids[span.start : span.end] for span in expanded.spans]
        assert [set(each) for each in soft] == [{reference.vocab[VIDEO]}] * len(times) + [{reference.vocab[IMAGE]}]

    check()


@pytest.mark.parametrize("num_moments", [1, 4])
def test_moments_whose_times_no_text_tells_lie_one_behind_the_other_as_in_transformers(
    qwen_like: Path, num_moments: int
) -> None:
    import transformers
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    reference: Any = transformers.PreTrainedTokenizerFast.from_pretrained(qwen_like)
    processor: Any = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), video_token=VIDEO)
    inputs = {"video_grid_thw": np.array([[num_moments, 4, 6]])}
    written = Qwen2_5_VLProcessor.replace_video_token(processor, inputs, 0)
    film = PictureLayout(6, columns=3, places=tuple(range(num_moments)), kind="video")
    text = f"Look: <|vision_start|>{VIDEO}<|vision_end|>!"
    expanded = make_expander(qwen_like).expand(text, [film])
    assert list(expanded.token_ids) == reference(text.replace(VIDEO, written), add_special_tokens=False)["input_ids"]
    first = expanded.token_ids.index(reference.vocab[VIDEO])
    assert [span.start for span in expanded.spans] == [first + 6 * number for number in range(num_moments)]


def test_films_and_pictures_are_told_apart_by_their_markers(qwen_like: Path) -> None:
    expander = make_expander(qwen_like)
    film, picture = PictureLayout(4, columns=2, times=(0.5,), kind="video"), PictureLayout(4, columns=2)
    with pytest.raises(PictureCountError, match=r"0 <\|video_pad\|> markers for 1 videos"):
        expander.expand(IMAGE, [picture, film])
    with pytest.raises(PictureCountError, match="in another order than they were sent in"):
        expander.expand(f"{IMAGE}{VIDEO}", [film, picture])


def test_a_text_must_not_hold_what_stands_for_a_picture_or_for_frames(qwen_like: Path) -> None:
    expander = make_expander(qwen_like)
    with pytest.raises(PictureCountError, match=r"1 <\|video_pad\|> markers for 0 videos"):
        expander.expand(f"{IMAGE} {VIDEO}", [PictureLayout(4, columns=2)])
    with pytest.raises(PictureCountError, match=r"2 <\|image_pad\|> markers for 1 pictures"):
        expander.expand(f"{IMAGE}{IMAGE}", [PictureLayout(4, columns=2)])


def test_the_beginning_of_a_prompt_counts_the_tokens_of_its_own_pictures(qwen_like: Path) -> None:
    expander = make_expander(qwen_like)
    layouts = [PictureLayout(6, columns=3), PictureLayout(4, columns=2)]
    text = f"<|vision_start|>{IMAGE}<|vision_end|><|vision_start|>{IMAGE}<|vision_end|>"
    expanded = expander.expand(text, layouts)
    assert expander.count_tokens_of(text[: len(text) // 2], expanded, layouts) == 8


def test_a_checkpoint_without_a_token_for_pictures_is_refused(tmp_path: Path) -> None:
    build_qwen_like_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token_id": None}))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    with pytest.raises(CheckpointConfigError, match="image_token_id: names no token"):
        MediaPromptFormat.from_checkpoint(tmp_path, tokenizer)

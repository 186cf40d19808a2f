"""Any fault of a checkpoint or a picture raises one typed error that names the file, the field and the number."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from keepsight import LLM, SamplingParams
from keepsight.demo import checkpoint_path
from keepsight.errors import (
    CheckpointConfigError,
    CheckpointError,
    InvalidArgumentError,
    KeepsightError,
    MediaRefusedError,
    PictureCountError,
    PictureError,
    PictureTooLargeError,
    PromptTooLongError,
    ReservedTokenError,
    TensorMismatchError,
    UnknownArchitectureError,
    UnreadablePictureError,
    UnreadableTensorsError,
    UnsupportedFieldError,
    UnsupportedPictureError,
)
from tests.drawn import ask, by_object, draw, to_data_url, to_png
from tests.frontend.sample_pictures import encode, random_picture
from tests.place import placed
from tests.random_checkpoint import make_text_only_checkpoint

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


# Checkpoints --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint_path(), tmp_path / "checkpoint")


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(checkpoint: Path) -> None:
    change_json(checkpoint / "config.json", architectures=["NobodysForCausalLM"])
    with pytest.raises(UnknownArchitectureError, match=r"NobodysForCausalLM.*known are Gemma3For") as caught:
        LLM(checkpoint)
    assert caught.value.path == checkpoint / "config.json"


def test_unsupported_quantized_weights_are_refused_by_their_config_field(checkpoint: Path) -> None:
    change_json(checkpoint / "config.json", quantization_config={"quant_method": "compressed-tensors", "bits": 4})

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("q_proj.weight")]:
            tensors[f"{name}_packed"] = tensors.pop(name).to(torch.int8)
            tensors[f"{name}_scale"] = torch.ones(1)

    change_tensors(checkpoint, quantize)
    with pytest.raises(CheckpointConfigError, match=r"config\.json: quantization_config\.format: is missing"):
        LLM(checkpoint)


def test_all_mismatched_tensors_are_named_at_once(checkpoint: Path) -> None:
    names: list[str] = []

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        names[:] = sorted(name for name in tensors if name.endswith("q_proj.weight"))[:3]
        first, second, third = names
        tensors[f"{first}_of_another"] = tensors.pop(first)
        del tensors[second]
        tensors[third] = tensors[third][:-1].clone()

    change_tensors(checkpoint, spoil)
    with pytest.raises(TensorMismatchError) as caught:
        LLM(checkpoint)
    error = caught.value
    assert (len(error.missing), error.surplus) == (2, (f"{names[0]}_of_another",))
    [misshapen] = error.misshapen
    assert misshapen.startswith(f"{names[2]} (is [")
    assert str(error).startswith(f"{checkpoint}: ")


@pytest.mark.parametrize("num_bytes", [0, 5, 1000, -1, -100_000])
def test_a_truncated_safetensors_file_is_named(checkpoint: Path, num_bytes: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(UnreadableTensorsError, match="truncated") as caught:
        LLM(checkpoint)
    assert caught.value.path == path


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        LLM(checkpoint)
    assert caught.value.path == checkpoint / name


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "chat_template.json"],
)
@pytest.mark.parametrize("content", [b"\xff\xfe", b"{% if %}[1]"])
def test_a_broken_file_is_named(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointConfigError) as caught:
        LLM(checkpoint)
    assert caught.value.path == checkpoint / name


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{% if %}[1]"])
def test_a_broken_chat_template_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "chat_template.json").unlink()  # would otherwise be read instead
    (checkpoint / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointConfigError) as caught:
        LLM(checkpoint)
    assert caught.value.path == checkpoint / "chat_template.jinja"


@pytest.mark.parametrize(
    ("section", "fields", "named"),
    [
        ("text_config", {"num_hidden_layers": "six"}, r"text_config\.num_hidden_layers.*'six'"),
        ("text_config", {"hidden_size": -1}, r"text_config\.hidden_size.*-1"),
        ("vision_config", {"patch_size": 0}, r"vision_config\.patch_size.*0"),
        ("text_config", {"hidden_activation": "tanh"}, r"text_config\.hidden_activation.*'tanh'"),
    ],
)
def test_an_invalid_value_is_named_with_its_field(
    checkpoint: Path, section: str, fields: dict[str, Any], named: str
) -> None:
    path = checkpoint / "config.json"
    change_json(path, **{section: json.loads(path.read_text())[section] | fields})
    with pytest.raises(CheckpointConfigError, match=named) as caught:
        LLM(checkpoint)
    assert caught.value.path == path


def test_contradicting_picture_sizes_are_refused_at_load_time(checkpoint: Path) -> None:
    """Otherwise every picture would fail later, during its request."""
    change_json(checkpoint / "preprocessor_config.json", size={"height": 224, "width": 224})
    with pytest.raises(CheckpointConfigError, match=r"vision_config.image_size: is 112, but .* 224 x 224"):
        LLM(checkpoint)


def test_a_vision_model_without_a_preprocessor_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointConfigError, match="is missing") as caught:
        LLM(checkpoint)
    assert caught.value.path == checkpoint / "preprocessor_config.json"


# Pictures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**placed())


def animated_gif() -> bytes:
    frames = [random_picture("P", (20, 20), seed) for seed in range(3)]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:])


BAD_PICTURES: dict[str, tuple[object, type[PictureError], str]] = {
    "no bytes": (b"", UnreadablePictureError, "0 bytes"),
    "no picture": (b"hello, I am text", UnreadablePictureError, "16 bytes that are none of JPEG, PNG"),
    "a page": (b"<html><body>Not found</body></html>", UnreadablePictureError, "35 bytes that are none"),
    "cut": (to_png(draw(1).picture)[:300], UnreadablePictureError, "300 bytes"),
    "cut in its header": (to_png(draw(1).picture)[:20], UnreadablePictureError, "20 bytes"),
    "empty": (Image.new("RGB", (0, 5)), UnreadablePictureError, "0 x 5 pixels"),
    "animated": (animated_gif(), UnsupportedPictureError, "GIF of more than 1 frame"),
    "16-bit PNG": (encode(Image.new("I;16", (4, 4)), "PNG"), UnsupportedPictureError, "mode I;16"),
    "16-bit": (Image.new("I;16", (4, 4)), UnsupportedPictureError, "mode I;16"),
    "float": (Image.new("F", (4, 4)), UnsupportedPictureError, "mode F"),
    "array of floats": (np.zeros((4, 4, 3), np.float32), UnsupportedPictureError, r"float32 .* allowed are uint8"),
    "tensor of floats": (torch.zeros(3, 4, 4), UnsupportedPictureError, r"float32 .* allowed are uint8"),
    "large array": (
        np.broadcast_to(np.uint8(0), (10_000, 7_000)), PictureTooLargeError, "7000 x 10000 pixels are 70000000"
    ),
    "too large": (
        encode(Image.new("1", (10_000, 10_000)), "PNG"), PictureTooLargeError, "10000 x 10000 pixels are 100000000"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_bad_picture_gives_the_same_error_however_it_is_sent(llm: LLM, name: str) -> None:
    source, error, message = BAD_PICTURES[name]
    parts = [{"type": "image_pil", "image_pil": source}]
    fields = ["messages[0].content[0].image_pil"]
    if isinstance(source, bytes):
        parts.append({"type": "image_url", "image_url": {"url": to_data_url(source)}})
        fields.append("messages[0].content[0].image_url.url")
    for part, field in zip(parts, fields, strict=True):
        with pytest.raises(error, match=message) as caught:
            llm.chat(ask(part, "What?"), ONE_TOKEN)
        assert caught.value.field == field
    with pytest.raises(error, match=message) as caught:
        llm.generate({"prompt": "<start_of_image>", "multi_modal_data": {"image": [source]}}, ONE_TOKEN)
    assert caught.value.field == "multi_modal_data.image[0]"


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("http://127.0.0.1:8000/a.png", MediaRefusedError, "127.0.0.1 was not found on the public internet"),
        ("https://[::1]/a.png", MediaRefusedError, "::1 was not found on the public internet"),
        ("http://169.254.169.254/latest/meta-data/", MediaRefusedError, "not found on the public internet"),
        ("http://user:password@8.8.8.8/a.png", MediaRefusedError, "user name or password"),
        ("file:///etc/hostname", MediaRefusedError, "allowed_local_media_path"),
        ("ftp://example.org/a.png", UnsupportedFieldError, "ftp: URLs are not supported"),
    ],
)
def test_sources_that_are_not_allowed_are_refused(
    llm: LLM, url: str, error: type[InvalidArgumentError], message: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(error, match=message) as caught:
        llm.chat(ask(part), ONE_TOKEN)
    assert caught.value.field == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(("num_markers", "num_pictures"), [(0, 1), (1, 0), (2, 1), (1, 3)])
def test_the_numbers_of_markers_and_pictures_must_be_equal(llm: LLM, num_markers: int, num_pictures: int) -> None:
    pictures = [draw(1).picture] * num_pictures
    with pytest.raises(PictureCountError, match=f"{num_markers} .*markers for {num_pictures} pictures") as caught:
        llm.generate({"prompt": "<start_of_image>" * num_markers, "multi_modal_data": {"image": pictures}})
    assert caught.value.field == "prompt"
    text = "<start_of_image>"
    with pytest.raises(PictureCountError, match=r"2 .*markers for 1 pictures") as caught:
        llm.chat(ask(by_object(draw(1).picture), text))
    assert caught.value.field == "messages"


def test_more_pictures_than_the_context_holds_are_refused_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"1920 of them of 120 pictures.*2048"):
        llm.chat(ask(*[by_object(draw(1).picture)] * 120))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_unpaired_surrogates_are_refused(llm: LLM, text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        llm.chat(ask(text), ONE_TOKEN)
    with pytest.raises(InvalidArgumentError):
        llm.generate(text, ONE_TOKEN)


def test_a_text_only_model_refuses_pictures(tmp_path: Path) -> None:
    make_text_only_checkpoint(tmp_path)
    llm = LLM(tmp_path, **placed(dtype="float32", enable_mm_embeds=True))
    with pytest.raises(PictureCountError, match="reads text only"):
        llm.chat(ask({"type": "image_embeds", "image_embeds": np.zeros((16, 64), np.float32)}))
    with pytest.raises(PictureCountError, match="holds 1 pictures, but this model reads text only") as caught:
        llm.chat(ask(by_object(draw(1).picture), "What?"))
    assert caught.value.field == "messages"
    with pytest.raises(PictureCountError, match="reads text only"):
        llm.generate({"prompt": "<start_of_image>", "multi_modal_data": {"image": draw(1).picture}})
    # The tokenizer has this token, but the embedding table has no row for it.
    with pytest.raises(ReservedTokenError, match="the text contains <image_soft_token>") as reserved:
        llm.chat(ask("<image_soft_token>"))
    assert reserved.value.field == "messages"
    with pytest.raises(InvalidArgumentError, match="909 is not one of this model's 909 tokens"):
        llm.generate({"prompt_token_ids": [909]})
    [output] = llm.chat(ask("Hello"), SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


def test_every_error_derives_from_keepsight_error() -> None:
    assert issubclass(InvalidArgumentError, KeepsightError)
    assert issubclass(CheckpointError, KeepsightError)
    assert not issubclass(InvalidArgumentError, CheckpointError)

"""From what a caller sent to what the engine computes: the whole of the frontend's work on a request, in order.

Geometry alone lays out the prompt; pixels are made last.  Everything that can be refused is refused here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepsight.config import Config
from keepsight.errors import (
    CheckpointError,
    InvalidArgumentError,
    PictureCountError,
    PromptTooLongError,
    ReservedTokenError,
)
from keepsight.frontend.decode_picture import decode_picture
from keepsight.frontend.expand_prompt import ExpandedPrompt, ImagePromptFormat, PromptExpander
from keepsight.frontend.fetch_media import fetch_media
from keepsight.frontend.model_limits import ModelLimits, load_image_config
from keepsight.frontend.open_picture import PictureSource
from keepsight.frontend.pan_and_scan import plan_crops
from keepsight.frontend.preprocess_image import preprocess_image
from keepsight.frontend.read_header import read_header
from keepsight.frontend.read_messages import PicturePart
from keepsight.frontend.render_prompt import ChatTemplate
from keepsight.frontend.tokenizer import Tokenizer
from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox, Geometry, MediaItem
from keepsight.requests import EngineRequest, Pixels
from keepsight.sampling_params import SamplingParams

# What a request may change about its pictures; the rest of the processor belongs to the checkpoint.
REQUEST_OVERRIDES = frozenset(
    {
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    }
)


@dataclass(frozen=True, slots=True)
class _Picture:
    """A picture that was looked at, but not decoded."""

    source: PictureSource
    field: str
    geometry: Geometry
    crops: tuple[CropBox, ...]


class RequestPreparer:
    """Shared by all requests; may be used from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        image_format: ImagePromptFormat | None,
        image_config: ImageProcessorConfig | None,
        limits: ModelLimits,
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.expander = PromptExpander(tokenizer, image_format)
        self.image_config, self.max_model_len = image_config, limits.max_model_len
        self._image_token_ids = frozenset() if image_format is None else image_format.token_ids
        self._vocab_size = min(tokenizer.vocab_size, limits.vocab_size)
        self._request_numbers = itertools.count()

    @classmethod
    def from_config(cls, config: Config) -> "RequestPreparer":
        directory = config.directory
        if not directory.is_dir():
            raise CheckpointError(directory, "no such folder")
        tokenizer = Tokenizer.from_checkpoint(directory)
        image_format = ImagePromptFormat.from_checkpoint(directory, tokenizer)
        image_config = None
        if image_format is not None:
            _check_overrides(config.mm_processor_kwargs)
            image_config = load_image_config(directory, config.image_backend, config.mm_processor_kwargs)
        template = ChatTemplate.from_checkpoint(directory, tokenizer.special_tokens)
        limits = ModelLimits.from_checkpoint(directory, config.max_model_len)
        return cls(tokenizer, template, image_format, image_config, limits)

    def prepare_chat(
        self, messages: object, params: SamplingParams, mm_processor_kwargs: dict[str, Any] | None = None
    ) -> EngineRequest:
        rendered = self.template.render(messages)
        return self._prepare(rendered.text, rendered.pictures, params, mm_processor_kwargs, "messages", add_bos=False)

    def prepare_text(
        self,
        prompt: str,
        pictures: Sequence[object],
        params: SamplingParams,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> EngineRequest:
        """A prompt written by the caller, with the checkpoint's own marker where each picture belongs."""
        parts = [PicturePart(picture, f"multi_modal_data.image[{index}]") for index, picture in enumerate(pictures)]
        # A caller who rendered a chat template has a <bos> already.
        bos = self.tokenizer.special_tokens.get("bos_token")
        add_bos = bos is None or not prompt.startswith(bos)
        return self._prepare(prompt, parts, params, mm_processor_kwargs, "prompt", add_bos=add_bos)

    def prepare_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> EngineRequest:
        field = "prompt_token_ids"
        if not isinstance(token_ids, list | tuple):
            raise InvalidArgumentError(field, f"must be a list of token ids, not {type(token_ids).__name__}")
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidArgumentError(field, f"{token_id!r} is no token of this model's {self._vocab_size}")
            if token_id in self._image_token_ids:
                token = self.tokenizer.token(token_id)
                raise ReservedTokenError(field, f"must not hold {token_id}, {token}: its picture cannot be sent along")
        self._check_fits(ExpandedPrompt(tuple(token_ids), ()), field)
        return self._finish(tuple(token_ids), (), (), params)

    def _prepare(
        self,
        text: str,
        parts: Sequence[PicturePart],
        params: SamplingParams,
        overrides: dict[str, Any] | None,
        field: str,
        *,
        add_bos: bool,
    ) -> EngineRequest:
        config = self._image_config_for(parts, overrides, field)
        pictures = [_look_at(part, config) for part in parts if config is not None]
        expanded = self.expander.expand(text, [len(picture.crops) for picture in pictures], add_bos, field)
        # Refused before any picture is decoded.
        self._check_fits(expanded, field)
        media: list[MediaItem] = []
        pixels: list[Pixels] = []
        spans = iter(expanded.spans)
        for picture in pictures:
            assert config is not None
            geometries = (picture.geometry, *(Geometry(crop.width, crop.height) for crop in picture.crops))
            media += [MediaItem(next(spans), geometry) for geometry in geometries]
            pixels += preprocess_image(decode_picture(picture.source, picture.field), picture.crops, config)
        return self._finish(expanded.token_ids, media, pixels, params)

    def _image_config_for(
        self, parts: Sequence[PicturePart], overrides: dict[str, Any] | None, field: str
    ) -> ImageProcessorConfig | None:
        if overrides is not None:
            _check_overrides(overrides)
        if self.image_config is None:
            if parts:
                raise PictureCountError(field, f"holds {len(parts)} pictures, but this model reads text only")
            return None
        return self.image_config.with_overrides(**overrides) if overrides else self.image_config

    def _check_fits(self, expanded: ExpandedPrompt, field: str) -> None:
        if not expanded.token_ids:
            raise InvalidArgumentError(field, "is empty")
        num_tokens = len(expanded.token_ids)
        if num_tokens >= self.max_model_len:
            num_image_tokens = sum(span.length for span in expanded.spans)
            raise PromptTooLongError(
                field,
                f"has {num_tokens} tokens, {num_image_tokens} of them of {len(expanded.spans)} pictures; with at least "
                f"one token of answer this model holds {self.max_model_len}",
            )
        largest = max(expanded.token_ids)
        if largest >= self._vocab_size:
            token = self.tokenizer.token(largest)
            raise ReservedTokenError(field, f"the text holds {token}, which is no token of this model")

    def _finish(
        self,
        token_ids: tuple[int, ...],
        media: Sequence[MediaItem],
        pixels: Sequence[Pixels],
        params: SamplingParams,
    ) -> EngineRequest:
        request_id = str(next(self._request_numbers))
        return EngineRequest(request_id, token_ids, tuple(media), tuple(pixels), params)


def _look_at(part: PicturePart, config: ImageProcessorConfig) -> _Picture:
    source = fetch_media(part.source, part.field)
    geometry = read_header(source, part.field).geometry
    return _Picture(source, part.field, geometry, plan_crops(geometry, config))


def _check_overrides(overrides: dict[str, Any]) -> None:
    if not isinstance(overrides, dict):
        raise InvalidArgumentError("mm_processor_kwargs", f"must be a mapping of options, not {overrides!r}")
    for name in overrides:
        if name not in REQUEST_OVERRIDES:
            known = ", ".join(sorted(REQUEST_OVERRIDES))
            raise InvalidArgumentError(f"mm_processor_kwargs.{name}", f"cannot be changed; these can: {known}")

"""Small random models of each family, with prompts of pictures or sounds and their transformers references."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import Geometry, MediaItem, Modality, TokenSpan
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.models.qwen2_5_vl.model import Qwen25VL
from keepsight.models.qwen2_audio.model import Qwen2Audio
from keepsight.models.qwen3_5.model import Qwen35
from keepsight.models.qwen3_vl.model import Qwen3VL
from keepsight.models.registry import load_model
from keepsight.pixels import carried_samples, carry_samples
from keepsight.requests import Pixels
from keepsight.runner.encode_media import Normalizer
from keepsight.runner.mel_spectrogram import MelSpectrogram
from keepsight.runner.normalize_pixels import PixelNormalizer
from keepsight.sound_config import SAMPLES_PER_PLACE
from tests.models.borrowed.pictures import GEMMA4, GEMMA4_LARGE, IDEFICS3, MISTRAL3
from tests.models.gemma3 import reference as gemma3
from tests.models.qwen2_5_vl import reference as qwen2_5_vl
from tests.models.qwen2_audio import reference as qwen2_audio
from tests.models.qwen3_5 import reference as qwen3_5
from tests.models.qwen3_vl import mixture_reference
from tests.models.qwen3_vl import reference as qwen3_vl
from tests.runner.small_model import PLACE, SmallModel

# Rows and columns of tokens of pictures 0 to 3.
QWEN_GRIDS = ((2, 3), (4, 1), (1, 2), (3, 3))
# Lengths of sounds 0 to 3 in places. Two places make a token; an odd one left over makes none.
SOUND_PLACES = (13, 8, 4, 19)
MODALITIES: tuple[Modality, Modality] = ("image", "video")


class Family(Protocol):
    model: Model

    @property
    def normalizer(self) -> Normalizer: ...

    reference: Any
    # The largest number of tokens of any picture.
    most_tokens: int

    def pixels(self, picture: int) -> Pixels: ...

    def show(self, picture: int, start: int) -> tuple[list[int], list[MediaItem]]:
        """Return the picture's tokens in a prompt, from position `start` on, and its media items.

        Each item's hash is the number to pass to `pixels`.
        """
        ...

    def reference_inputs(self, token_ids: list[int], media: Sequence[MediaItem]) -> dict[str, Any]: ...

    def true_logits(self, logits: Tensor) -> Tensor:
        """Return the correct logits, given those of transformers."""
        ...


class SmallGemma3(SmallModel):
    def __init__(self, seed: int, directory: Path, place: Placement = PLACE) -> None:
        super().__init__(seed, directory, place)
        self.most_tokens = int(self.arguments["mm_tokens_per_image"])

    def show(self, picture: int, start: int) -> tuple[list[int], list[MediaItem]]:
        span = TokenSpan(start + 1, self.most_tokens)
        token_ids = [gemma3.BOI_TOKEN, *[gemma3.IMAGE_TOKEN] * span.length, gemma3.EOI_TOKEN]
        return token_ids, [MediaItem(str(picture), span, Geometry(self.size, self.size))]

    def reference_inputs(self, token_ids: list[int], media: Sequence[MediaItem]) -> dict[str, Any]:
        pixels = torch.zeros(0)
        if media:
            stacked = np.stack([self.pixels(int(item.media_hash)) for item in media])
            pixels = self.normalizer(torch.from_numpy(stacked)).permute(0, 3, 1, 2).cpu()
        return gemma3.reference_inputs(gemma3.Prompt(token_ids, [item.span for item in media], pixels))

    def true_logits(self, logits: Tensor) -> Tensor:
        # With pictures, transformers does not apply the softcap.
        cap = self.reference.config.text_config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits


class SmallQwen3VL:
    drawn: Any = qwen3_vl
    model_class: type[Qwen3VL] | type[Qwen25VL] | type[Qwen35] = Qwen3VL
    # The index of the picture that is a film, and the film's number of moments.
    film, num_moments = 1, 1
    # The duration of a moment, for models whose prompt text does not give it.
    seconds = 2.0

    def __init__(self, seed: int, directory: Path, place: Placement = PLACE) -> None:
        self.arguments = self.drawn.draw_config(seed)
        self.reference = self.drawn.make_reference(self.arguments, seed)
        self.model = self.model_class.from_checkpoint(qwen3_vl.save_checkpoint(self.reference, directory), place)
        self.token_side = self.arguments["vision_config"]["patch_size"] * qwen3_vl.MERGE_SIZE
        self.normalizer = PixelNormalizer(ImageProcessorConfig(), place.device, place.dtype)
        self.most_tokens = max(rows * columns for rows, columns in QWEN_GRIDS)

    def pixels(self, picture: int) -> Pixels:
        """Later moments of a film have the film's number plus a multiple of ten."""
        rows, columns = QWEN_GRIDS[picture % 10]
        shape = (rows * self.token_side * (1 + (picture % 10 == self.film)), columns * self.token_side, 3)
        return np.random.default_rng(picture).integers(0, 256, shape, np.uint8)

    def show(self, picture: int, start: int) -> tuple[list[int], list[MediaItem]]:
        (rows, columns), is_film = QWEN_GRIDS[picture], picture == self.film
        token = qwen3_vl.VIDEO_TOKEN if is_film else qwen3_vl.IMAGE_TOKEN
        geometry, modality = Geometry(columns * self.token_side, rows * self.token_side), MODALITIES[is_film]
        rate, media = self.arguments["vision_config"].get("tokens_per_second", 0), list[MediaItem]()
        for index in range(self.num_moments if is_film else 1):
            span = TokenSpan(start + 1 + index * rows * columns, rows * columns)
            later = int(index * rate * self.seconds) if index else None
            media.append(MediaItem(str(picture + 10 * index), span, geometry, modality, index > 0, columns, later))
        return [qwen3_vl.BEGIN_TOKEN, *[token] * (rows * columns * len(media)), qwen3_vl.END_TOKEN], media

    def reference_inputs(self, token_ids: list[int], media: Sequence[MediaItem]) -> dict[str, Any]:
        pixels = [self._normalized(item) for item in media]
        films = [item for item in media if item.modality == "video" and item.rotary_offset is None]
        seconds = [self.seconds] * len(films)
        prompt = qwen3_vl.Prompt(token_ids, list(media), pixels, seconds=seconds)
        return qwen3_vl.reference_inputs(prompt, self.arguments)

    def _normalized(self, item: MediaItem) -> Tensor:
        normalized: Tensor = self.normalizer(torch.from_numpy(self.pixels(int(item.media_hash)))[None])[0].cpu()
        return normalized.view(2, -1, *normalized.shape[1:]) if item.modality == "video" else normalized

    def true_logits(self, logits: Tensor) -> Tensor:
        return logits


class SmallMixture(SmallQwen3VL):
    drawn = mixture_reference


class SmallQwen35(SmallQwen3VL):
    drawn = qwen3_5
    model_class = Qwen35


class SmallQwen25VL(SmallQwen3VL):
    drawn = qwen2_5_vl
    model_class = Qwen25VL
    num_moments = 3


class SmallQwen2Audio:
    """A model whose "pictures" are sounds."""

    def __init__(self, seed: int, directory: Path, place: Placement = PLACE) -> None:
        self.arguments = qwen2_audio.draw_config(seed)
        self.reference = qwen2_audio.make_reference(self.arguments, seed)
        self.model = Qwen2Audio.from_checkpoint(qwen3_vl.save_checkpoint(self.reference, directory), place)
        self.config = qwen2_audio.sound_config(self.arguments)
        self.normalizer = MelSpectrogram(self.config, place.device, place.dtype)
        self.most_tokens = max(SOUND_PLACES) // 2

    def pixels(self, picture: int) -> Pixels:
        return carry_samples(qwen2_audio.draw_sound(SOUND_PLACES[picture] * SAMPLES_PER_PLACE, picture))

    def show(self, picture: int, start: int) -> tuple[list[int], list[MediaItem]]:
        token_ids, item = qwen2_audio.show_sound(
            self.config, str(picture), SOUND_PLACES[picture] * SAMPLES_PER_PLACE, start
        )
        return token_ids, [item]

    def reference_inputs(self, token_ids: list[int], media: Sequence[MediaItem]) -> dict[str, Any]:
        sounds = [carried_samples(self.pixels(int(item.media_hash))) for item in media]
        return qwen2_audio.reference_inputs(token_ids, sounds, self.config)

    def true_logits(self, logits: Tensor) -> Tensor:
        return logits


class SmallBorrowed:
    """A model that runs on transformers' own modules; the seed selects the family."""

    families = (IDEFICS3, MISTRAL3, GEMMA4, GEMMA4_LARGE)

    def __init__(self, seed: int, directory: Path, place: Placement = PLACE) -> None:
        self.family = self.families[seed]
        self.reference = self.family.make_checkpoint(directory)
        self.model = load_model(directory, place)
        self.most_tokens = len(self.family.token_ids)

    def normalizer(self, carried: Tensor) -> Tensor:
        return carried

    def pixels(self, picture: int) -> Pixels:
        return self.family.carry(picture)

    def show(self, picture: int, start: int) -> tuple[list[int], list[MediaItem]]:
        item = MediaItem(str(picture), TokenSpan(start, self.most_tokens), Geometry(32, 32))
        return list(self.family.token_ids), [item]

    def reference_inputs(self, token_ids: list[int], media: Sequence[MediaItem]) -> dict[str, Any]:
        arrays = self.family.join([int(item.media_hash) for item in media])
        prompt = torch.tensor(token_ids)
        return {"input_ids": prompt[None], **arrays, **self.family.tell(prompt)}

    def true_logits(self, logits: Tensor) -> Tensor:
        return logits


def write_prompt(family: Family, parts: Iterable[int | Sequence[int]]) -> tuple[list[int], list[MediaItem]]:
    """Build a prompt from `parts`, each a picture's number or the tokens of a text."""
    token_ids, media = [2], []
    for part in parts:
        if isinstance(part, int):
            shown, items = family.show(part, len(token_ids))
            token_ids += shown
            media += items
        else:
            token_ids += part
    return token_ids, media

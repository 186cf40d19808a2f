"""Qwen2-Audio's audio tower: encodes the spectrogram of a sound into the decoder's embeddings.

Two frames become one position (place) of the tower, and two places one token. All places of a sound see each other and
nothing else; padding, which the reference masks, is absent here. The work may be suspended at every `yield`.
"""

from collections.abc import Generator, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.layers import (
    LayerNorm,
    Linear,
    Placement,
    Row,
    WeightSlot,
    empty_parameter,
    slot,
    slots_of_convolution,
    under,
)
from keepsight.models.qwen2_audio.config import AudioConfig
from keepsight.models.vision_layer import VisionLayer, row_groups
from keepsight.sound_config import PLACES_PER_TOKEN

# Kernel size of the convolutions.
WIDTH = 3


class Convolution(nn.Module):
    """The reference's 1D convolution, as one matrix product over consecutive rows; includes its activation."""

    def __init__(self, place: Placement, name: str, channels: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride
        self.linear = Linear(place, WIDTH * channels, {name: outputs}, bias=True)

    def in_parts(self, rows: Tensor, results: Tensor) -> Iterator[None]:
        """[sounds, rows, channels] -> `results` [sounds, places, outputs]; each sees `WIDTH` rows from its own on."""
        sounds, num_rows, channels = rows.shape
        seen = rows.as_strided(
            (sounds, results.shape[1], WIDTH * channels), (num_rows * channels, self.stride * channels, 1)
        )
        for group in row_groups(results):
            results[group] = self.linear(seen[group], "gelu")
            yield

    def slots(self) -> Iterator[WeightSlot]:
        yield from slots_of_convolution(self.linear, self.channels, WIDTH)


class AudioTower(nn.Module):
    def __init__(self, config: AudioConfig, text_size: int, place: Placement) -> None:
        super().__init__()
        width = config.layer.hidden_size
        self.of_frames = Convolution(place, "conv1", config.num_mels, width, stride=1)
        self.of_pairs = Convolution(place, "conv2", width, width, stride=2)
        self.positions = empty_parameter(place, config.num_places, width)
        self.layers = Row[VisionLayer](VisionLayer(config.layer, place) for _ in range(config.num_layers))
        self.norm = LayerNorm(place, width, config.layer.norm_eps)
        self.projector = Linear(place, width, {"linear": text_size}, bias=True)

    def in_parts(self, spectrograms: Tensor) -> Generator[None, None, Tensor]:
        """[sounds, frames, mels] -> [sounds, tokens, hidden]"""
        hidden = yield from self._places(spectrograms)
        layers = list(self.layers)
        heads = layers[0].make_heads(hidden)
        for layer in layers:
            yield from layer(hidden, heads)
        sounds, num_places, width = hidden.shape
        whole = num_places - num_places % PLACES_PER_TOKEN
        pooled = hidden[:, :whole].reshape(sounds, -1, PLACES_PER_TOKEN, width).mean(dim=2)
        return self.projector(self.norm(pooled))  # type: ignore[no-any-return]

    def _places(self, spectrograms: Tensor) -> Generator[None, None, Tensor]:
        """Return [sounds, places, hidden]. Zeros pad the beginning, and the end of the longest sound; any other sound
        is given with one extra frame, an odd one, which its last place sees.
        """
        sounds, num_frames, _ = spectrograms.shape
        num_places, width = num_frames // 2, self.positions.shape[1]
        framed = spectrograms.new_zeros(sounds, 1 + 2 * num_places, width)
        yield from self.of_frames.in_parts(F.pad(spectrograms, (0, 0, 1, 1)), framed[:, 1:])
        hidden = spectrograms.new_empty(sounds, num_places, width)
        yield from self.of_pairs.in_parts(framed, hidden)
        return hidden.add_(self.positions[:num_places])

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.of_frames.slots()
        yield from self.of_pairs.slots()
        yield slot("embed_positions.weight", self.positions)
        yield from self.layers.slots("layers")
        yield from under("layer_norm.", self.norm.slots())
        yield from under("projector.", self.projector.slots())

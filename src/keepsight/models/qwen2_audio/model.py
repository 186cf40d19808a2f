"""Qwen2-Audio: encodes sounds with its tower; the rest is shared with other models."""

from pathlib import Path
from typing import Self

from keepsight.models.layers import Placement
from keepsight.models.qwen2_audio.audio_tower import AudioTower
from keepsight.models.qwen2_audio.config import Qwen2AudioConfig
from keepsight.models.qwen_model import QwenModel


class Qwen2Audio(QwenModel):
    def __init__(self, config: Qwen2AudioConfig, place: Placement) -> None:
        super().__init__(config.text, 0, config.text.hidden_size, place)
        self.config = config
        self.tower = AudioTower(config.audio, config.text.hidden_size, place)

    @classmethod
    def from_checkpoint(cls, directory: Path, place: Placement, room: int | None = None) -> Self:
        return cls(Qwen2AudioConfig.from_checkpoint(directory), place).load(directory, room)

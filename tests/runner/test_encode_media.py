"""Batching of encodings: items of one shape, as many as a device encodes at once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from keepsight.pixels import carry_arrays, carry_samples
from keepsight.requests import Adapter
from keepsight.runner.encode_media import MAX_PATCHES_TOGETHER, group_encodings
from keepsight.scheduling.step_plan import Encoding
from keepsight.sound_config import SAMPLES_PER_PLACE


def a_model(*, takes_arrays: bool = False) -> Any:
    shape = SimpleNamespace(patch_size=16, takes_arrays=takes_arrays)
    return SimpleNamespace(place=SimpleNamespace(device=torch.device("cpu")), shape=shape)


def test_sounds_of_one_length_are_encoded_together_as_far_as_their_places_allow() -> None:
    places = MAX_PATCHES_TOGETHER["cpu"] // 3
    lengths = {"a": places, "b": 2, "c": places, "d": places, "e": places, "f": 2}
    held = {name: carry_samples(np.zeros(count * SAMPLES_PER_PLACE, np.float32)) for name, count in lengths.items()}
    encodings = [Encoding(name, name, count // 2, "audio") for name, count in lengths.items()]
    groups = ["".join(each.media_hash for each in group) for group in group_encodings(encodings, held, a_model())]
    assert groups == ["acd", "e", "bf"]


def test_items_changed_by_an_adapter_are_encoded_only_with_others_of_it() -> None:
    one, two = (Adapter(name, "digest", changes_encoder=True) for name in ("one", "two"))
    held = {"picture": np.zeros((32, 32, 3), np.uint8)}
    adapters = (None, one, None, two, one)
    encodings = [Encoding(str(index), "picture", 4, adapter=its) for index, its in enumerate(adapters)]
    groups = ["".join(each.encoder_key for each in group) for group in group_encodings(encodings, held, a_model())]
    assert groups == ["02", "14", "3"]


def test_pictures_of_another_processor_are_encoded_alone() -> None:
    held = {name: carry_arrays({"pixel_values": np.zeros((1, 3, 4, 4), np.float32)}) for name in "ab"}
    encodings = [Encoding(name, name, 4) for name in held]
    groups = list(group_encodings(encodings, held, a_model(takes_arrays=True)))
    assert [len(group) for group in groups] == [1, 1]

"""Recurrent layers of transformers' modules: each sequence goes on from its own state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.block_table import BlockTable
from keepsight.models.borrowed.attention import UnsupportedDecoderError, attend_at_once, attending
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.borrowed.products import count_experts
from keepsight.models.borrowed.recurrence import RecurrentStep, StateName, StateProbe, wrap_recurrent
from keepsight.models.layers import Placement
from keepsight.models.model import StateShape
from keepsight.models.registry import load_model
from tests.models.borrowed import reference as ref

PLACE = Placement(torch.device("cpu"), torch.float32)


class Sum(nn.Module):
    """Adds up what it was given, and outputs the sums."""

    layer_idx = 3

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **_: Any) -> Tensor:
        before = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        sums = hidden_states.cumsum(dim=1)
        sums = sums if before is None else sums + before[:, None]
        if cache_params is not None:
            cache_params.update_recurrent_state(sums[:, -1], self.layer_idx)
        return sums


class Attending(nn.Module):
    layer_idx = 4

    def forward(self, hidden_states: Tensor, past_key_values: Any = None) -> Tensor:
        return hidden_states


class Layer(nn.Module):
    """Knows its number and takes a cache, as the modules in it do."""

    layer_idx = 3

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.attending = Sum(), Attending()

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **others: Any) -> Tensor:
        return self.recurrent(hidden_states, cache_params=past_key_values, **others)  # type: ignore[no-any-return]


def make_layer() -> Layer:
    layer = Layer()
    assert [each.module for each in wrap_recurrent(layer, {layer.attending})] == [layer.recurrent]
    return layer


def test_a_state_is_what_a_module_stores_of_two_tokens() -> None:
    layer, probe = make_layer(), StateProbe()
    with attending(attend_at_once, recur=probe.recur):
        layer(torch.ones(1, 2, 5))
    assert probe.shapes == {StateName(3, False, 0): StateShape((5,), torch.float32)}


def slice_of(start: int, length: int, state_slot: int, *kept_states: tuple[int, int]) -> RequestSlice:
    return RequestSlice(start, length, BlockTable(16, [0]), state_slot=state_slot, kept_states=kept_states)


def test_every_slice_goes_on_from_its_slot_and_leaves_its_state_there() -> None:
    layer, states = make_layer(), torch.zeros(6, 2)
    names = [StateName(3, False, 0)]

    def compute(*slices: RequestSlice) -> list[float]:
        batch = AttentionBatch(slices, "cpu")
        with attending(attend_at_once, recur=RecurrentStep(names, [states], batch).recur):
            return layer(torch.ones(1, batch.num_tokens, 2))[0, :, 0].tolist()  # type: ignore[no-any-return]

    assert compute(slice_of(0, 3, 5)) == [1, 2, 3]
    assert compute(slice_of(3, 1, 5), slice_of(0, 2, 1), slice_of(0, 1, 4)) == [4, 1, 2, 1]
    assert compute(slice_of(1, 1, 4), slice_of(4, 1, 5)) == [2, 5]
    assert compute(slice_of(2, 2, 1), slice_of(5, 1, 5)) == [3, 4, 6]
    assert states[:, 1].tolist() == [0, 4, 0, 0, 2, 6]


def test_a_slice_leaves_states_within_it_in_other_slots_too() -> None:
    layer, states = make_layer(), torch.zeros(9, 2)
    slices = [
        slice_of(4, 1, 0, (5, 1)),
        slice_of(0, 5, 2, (2, 3), (4, 4)),
        slice_of(2, 3, 5, (5, 6)),
        slice_of(7, 1, 7),
    ]
    batch = AttentionBatch(slices, "cpu")
    with attending(attend_at_once, recur=RecurrentStep([StateName(3, False, 0)], [states], batch).recur):
        outputs = layer(torch.ones(1, batch.num_tokens, 2))[0, :, 0].tolist()
    assert outputs == [1, 1, 2, 3, 4, 5, 1, 2, 3, 1]
    assert states[:, 0].tolist() == [1, 1, 5, 2, 4, 3, 3, 1, 0]


def test_outside_of_steps_a_module_computes_as_before() -> None:
    assert make_layer()(torch.ones(1, 3, 1)).flatten().tolist() == [1, 2, 3]


def test_an_argument_that_would_change_the_result_is_refused() -> None:
    layer, batch = make_layer(), AttentionBatch([slice_of(0, 2, 0)], "cpu")
    recur = RecurrentStep([StateName(3, False, 0)], [torch.zeros(1, 2)], batch).recur
    with attending(attend_at_once, recur=recur):
        layer(torch.ones(1, 2, 2), position_ids=torch.ones(1, 2), attention_mask=None)
        with pytest.raises(UnsupportedDecoderError, match="its recurrent layers are given attention_mask"):
            layer(torch.ones(1, 2, 2), attention_mask=torch.ones(1, 2))


def test_convolutions_are_not_taken_for_experts(tmp_path: Path) -> None:
    reference = ref.make_text_checkpoint(tmp_path, "Qwen3_5MoeForCausalLM")
    assert count_experts(reference) == {ref.SPARSE["num_experts"]}


def test_a_layer_of_both_kinds_attends_and_keeps_a_state(tmp_path: Path) -> None:
    ref.make_text_checkpoint(tmp_path, "FalconH1ForCausalLM")
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    assert len(model.shape.kv_heads) == ref.SMALL["num_hidden_layers"]
    assert len(model.shape.states) == 2 * ref.SMALL["num_hidden_layers"]


def test_modules_that_keep_no_state_are_left_alone(tmp_path: Path) -> None:
    """Nemotron-H's layers of any kind take a cache."""
    types = ["linear_attention", "mlp", "full_attention"]
    made = {"layer_types": types, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 16}
    ref.make_checkpoint(tmp_path, "NemotronHForCausalLM", {**ref.SMALL, "head_dim": 16, **made})
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    norms = set(model.norms)
    wrapped = [name for name, each in model._modules.named_modules() if "forward" in vars(each) and each not in norms]
    assert [name.split(".")[2] for name in wrapped] == ["0"]


def test_a_cache_of_an_earlier_transformers_is_refused_by_its_version() -> None:
    with pytest.raises(UnsupportedDecoderError, match=r"use has_previous_state of their cache: transformers 5\.21"):
        StateProbe().has_previous_state(0)

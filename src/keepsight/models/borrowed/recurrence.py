"""Recurrent layers of transformers' modules: they keep one state of fixed size, not keys and values of each position.

Such a module (a short convolution, a gated delta rule, a state space) reads and writes its states through transformers'
cache.  Here it is given one over the states of the step's sequences: each slice is computed by itself, single tokens
together.  Knows no model family: which modules are recurrent, and what their states are, is observed.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.borrowed import delta_net
from keepsight.models.borrowed.attention import (
    Recur,
    RecurrentModule,
    UnknownAttentionError,
    has_no_effect,
    recur_now,
)
from keepsight.models.cpu_delta_net import DeltaNetStates, Sequences
from keepsight.models.model import StateShape

# The names under which modules take their cache.
_CACHE_NAMES = ("cache_params", "past_key_values")


class StateName(NamedTuple):
    """One of a recurrent layer's states, of which it may have several of a kind."""

    layer: int
    is_convolution: bool
    number: int


# Finding them -------------------------------------------------------------------------------------------------


def wrap_recurrent(decoder: nn.Module, attentions: Set[nn.Module]) -> list[nn.Module]:
    """Make the recurrent modules ask the current step how to compute them.  Return them.

    They are the innermost that know their layer and take a cache, but do not attend.
    """
    taking = [module for module in decoder.modules() if _knows_layer(module) and _cache_name(module) is not None]
    outer = {each for each in taking if any(inner is not each and inner in taking for inner in each.modules())}
    found = [each for each in taking if each not in outer and each not in attentions]
    for module in found:
        _wrap(module)
    return found


def unwrap(module: Any) -> None:
    """Undo `wrap_recurrent` for a module that keeps no state."""
    del module.forward


def _knows_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int)


def _cache_name(module: nn.Module) -> str | None:
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), None)


def _wrap(module: Any) -> None:
    forward, cache_name = module.forward, _cache_name(module)
    assert cache_name is not None, module
    names = list(inspect.signature(forward).parameters)
    found = RecurrentModule(
        module.layer_idx, lambda hidden, cache: forward(hidden, **{cache_name: cache}), delta_net.by_kernel(module)
    )

    def wrapped(*positional: Any, **named: Any) -> Tensor:
        if (recur := recur_now()) is None:  # transformers computes a whole prompt
            return forward(*positional, **named)  # type: ignore[no-any-return]
        given = {**dict(zip(names, positional, strict=False)), **named}
        hidden = given.pop(names[0])
        for name, argument in given.items():
            if not has_no_effect(name, argument):
                raise UnknownAttentionError(f"its recurrent layers are given {name}")
        return recur(found, hidden)

    module.forward = wrapped


class StateProbe:
    """A cache without states, which notes those that modules would keep."""

    def __init__(self) -> None:
        self.shapes: dict[StateName, StateShape] = {}

    def __getattr__(self, name: str) -> Any:
        raise UnknownAttentionError(
            f"its recurrent layers use {name} of their cache: transformers 5.22 is needed, or later"
        )

    def recur(self, module: RecurrentModule, hidden: Tensor) -> Tensor:
        return module.compute(hidden, self)

    def is_recording_past(self, _layer: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        *channels, num_columns = conv_states.shape[1:]
        shape = (*channels, num_columns if conv_kernel_size is None else conv_kernel_size)
        self.shapes[StateName(layer_idx, True, state_idx)] = StateShape(shape, conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        shape = tuple(recurrent_states.shape[1:])
        self.shapes[StateName(layer_idx, False, state_idx)] = StateShape(shape, recurrent_states.dtype)
        return recurrent_states


# Computing them -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Slices of a step that are computed together: one, or all single tokens."""

    rows: slice | Tensor
    slots: Tensor


def recur_over(names: Sequence[StateName], states: Sequence[Tensor], batch: AttentionBatch) -> Recur:
    """Return how to compute the recurrent modules of a step.  `states`: [slots, ...] for each name."""
    by_name, slots = dict(zip(names, states, strict=True)), [_slot_of(piece) for piece in batch.slices]
    begun = [slot for piece, slot in zip(batch.slices, slots, strict=True) if piece.start == 0]
    for state in states if begun else ():
        state[begun] = 0
    all_slots = torch.tensor(slots, device=batch.device)
    ends = list(itertools.accumulate((piece.length for piece in batch.slices), initial=0))
    sequences, parts = Sequences(torch.tensor(ends), all_slots), list(_cut(batch, all_slots, ends))

    def recur(module: RecurrentModule, hidden: Tensor) -> Tensor:
        if module.kernel is not None:
            own = (by_name[StateName(module.layer, is_convolution, 0)] for is_convolution in (True, False))
            return module.kernel(hidden, DeltaNetStates(*own), sequences)
        return _compute_parts(module, hidden, parts, by_name)

    return recur


def _slot_of(piece: RequestSlice) -> int:
    assert piece.state_slot is not None, "its model has recurrent layers"
    return piece.state_slot


def _cut(batch: AttentionBatch, slots: Tensor, ends: Sequence[int]) -> Iterator[Part]:
    """Yield each longer slice, and single tokens together."""
    are_single = [piece.length == 1 for piece in batch.slices]
    if all(are_single):
        yield Part(slice(None), slots)
        return
    for index, is_single in enumerate(are_single):
        if not is_single:
            yield Part(slice(ends[index], ends[index + 1]), slots[index : index + 1])
    if any(are_single):
        _, rows = batch.singles
        yield Part(torch.tensor(rows, device=batch.device), slots[are_single])


def _compute_parts(
    module: RecurrentModule, hidden: Tensor, parts: Sequence[Part], states: Mapping[StateName, Tensor]
) -> Tensor:
    outputs = hidden
    for number, (rows, slots) in enumerate(parts):
        cache = StateCache(states, slots)
        output = module.compute(hidden[0, rows].view(len(slots), -1, hidden.shape[-1]), cache).flatten(0, 1)
        cache.write_back()
        if not number:
            outputs = hidden.new_empty(1, hidden.shape[1], output.shape[-1])
        outputs[0, rows] = output
    return outputs


class StateCache:
    """The part of transformers' cache that recurrent modules use, over the states of a part of a step."""

    def __init__(self, states: Mapping[StateName, Tensor], slots: Tensor) -> None:
        """`states`: [slots, ...] each; `slots`: of each row of the module's input."""
        self._states, self._slots = states, slots
        # Copies of the states of the slots, to be written back.
        self._copied: dict[StateName, Tensor] = {}

    def is_recording_past(self, _layer: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._rows(StateName(layer_idx, True, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._rows(StateName(layer_idx, False, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Append columns [rows, channels, tokens].  Return them behind those that were held."""
        held = self._rows(StateName(layer_idx, True, state_idx))
        columns = torch.cat((held, conv_states), dim=-1)
        held.copy_(columns[..., -held.shape[-1] :])
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._rows(StateName(layer_idx, False, state_idx)).copy_(recurrent_states)

    def _rows(self, name: StateName) -> Tensor:
        """Return the states [rows, ...], to be read and overwritten."""
        if name not in self._copied:
            self._copied[name] = self._states[name].index_select(0, self._slots)
        return self._copied[name]

    def write_back(self) -> None:
        for name, rows in self._copied.items():
            self._states[name].index_copy_(0, self._slots, rows)

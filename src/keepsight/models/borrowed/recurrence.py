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

from keepsight.models.attention import AttentionBatch
from keepsight.models.borrowed import delta_net
from keepsight.models.borrowed.attention import ComputeModule, Recur, UnknownAttentionError, has_no_effect, recur_now
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


def _knows_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int)


def _cache_name(module: nn.Module) -> str | None:
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), None)


def _wrap(module: nn.Module) -> None:
    forward, cache_name, kernel = module.forward, _cache_name(module), delta_net.by_kernel(module)
    assert cache_name is not None, module
    names = list(inspect.signature(forward).parameters)

    def compute(hidden: Tensor, cache: Any) -> Tensor:
        if kernel is not None and isinstance(cache, StateCache):
            return kernel(hidden, cache)
        return forward(hidden, **{cache_name: cache})  # type: ignore[no-any-return]

    def wrapped(*positional: Any, **named: Any) -> Tensor:
        if (recur := recur_now()) is None:  # transformers computes a whole prompt
            return forward(*positional, **named)  # type: ignore[no-any-return]
        given = {**dict(zip(names, positional, strict=False)), **named}
        hidden = given.pop(names[0])
        for name, argument in given.items():
            if not has_no_effect(name, argument):
                raise UnknownAttentionError(f"its recurrent layers are given {name}")
        return recur(compute, hidden)

    module.forward = wrapped


class StateProbe:
    """A cache without states, which notes those that modules would keep."""

    def __init__(self) -> None:
        self.shapes: dict[StateName, StateShape] = {}

    def recur(self, compute: ComputeModule, hidden: Tensor) -> Tensor:
        return compute(hidden, self)

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
    # That of the one slice; or [tokens].
    slots: int | Tensor


def recur_over(names: Sequence[StateName], states: Sequence[Tensor], batch: AttentionBatch) -> Recur:
    """Return how to compute the recurrent modules of a step.  `states`: [slots, ...] for each name."""
    begun = [_slot_of(piece.state_slot) for piece in batch.slices if piece.start == 0]
    for state in states if begun else ():
        state[begun] = 0
    parts, by_name = list(_cut(batch)), dict(zip(names, states, strict=True))

    def recur(compute: ComputeModule, hidden: Tensor) -> Tensor:
        outputs = hidden
        for number, (rows, slots) in enumerate(parts):
            cache, num_slices = StateCache(by_name, slots), 1 if isinstance(slots, int) else len(slots)
            output = compute(hidden[0, rows].view(num_slices, -1, hidden.shape[-1]), cache).flatten(0, 1)
            cache.write_back()
            if not number:
                outputs = hidden.new_empty(1, hidden.shape[1], output.shape[-1])
            outputs[0, rows] = output
        return outputs

    return recur


def _cut(batch: AttentionBatch) -> Iterator[Part]:
    pieces, rows = batch.singles
    ends = itertools.accumulate(piece.length for piece in batch.slices)
    for piece, end in zip(batch.slices, ends, strict=True):
        if piece.length > 1 or len(pieces) == 1:
            yield Part(slice(end - piece.length, end), _slot_of(piece.state_slot))
    if len(pieces) > 1:
        slots = torch.tensor([_slot_of(piece.state_slot) for piece in pieces], device=batch.device)
        are_all = len(pieces) == len(batch.slices)
        yield Part(slice(None) if are_all else torch.tensor(rows, device=batch.device), slots)


def _slot_of(state_slot: int | None) -> int:
    assert state_slot is not None, "its model has recurrent layers"
    return state_slot


class StateCache:
    """The part of transformers' cache that recurrent modules use, over the states of a part of a step."""

    def __init__(self, states: Mapping[StateName, Tensor], slots: int | Tensor) -> None:
        """`states`: [slots, ...] each; `slots`: of each row of the module's input."""
        self._states, self._slots = states, slots
        # The rows in use: views of one slot's states, or copies of several slots', to be written back.
        self._used: dict[StateName, Tensor] = {}

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
        if name not in self._used:
            state, slots = self._states[name], self._slots
            self._used[name] = state[slots][None] if isinstance(slots, int) else state.index_select(0, slots)
        return self._used[name]

    def write_back(self) -> None:
        if not isinstance(self._slots, int):
            for name, rows in self._used.items():
                self._states[name].index_copy_(0, self._slots, rows)

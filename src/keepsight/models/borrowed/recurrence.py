"""Recurrent layers of transformers' modules: they keep one state of fixed size, not keys and values of each position.

Such a module (a short convolution, a gated delta rule, a state space) reads and writes its states through transformers'
cache. Here it is given one over the states of the step's sequences: each slice is computed by itself, in parts if its
state is kept on the way, and single tokens together. Knows no model family: which modules are recurrent, and what
their states are, is observed.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keepsight.made_once import made_once
from keepsight.models.attention import AttentionBatch, RequestSlice
from keepsight.models.borrowed.adapted_products import taking_rows
from keepsight.models.borrowed.attention import RecurrentModule, UnsupportedDecoderError, has_no_effect, recur_now
from keepsight.models.borrowed.delta_net import DeltaNet
from keepsight.models.delta_net import DeltaNetStates
from keepsight.models.model import StateShape

# The names under which modules take their cache.
_CACHE_NAMES = ("cache_params", "past_key_values")


class StateName(NamedTuple):
    """One of a recurrent layer's states, of which it may have several of a kind."""

    layer: int
    is_convolution: bool
    number: int


# Finding them -------------------------------------------------------------------------------------------------


def wrap_recurrent(decoder: nn.Module, attentions: Set[nn.Module]) -> list[RecurrentModule]:
    """Make the recurrent modules ask the current step how to compute them.

    They are the innermost that know their layer and take a cache, but do not attend.
    """
    taking = [module for module in decoder.modules() if _knows_layer(module) and _cache_name(module) is not None]
    outer = {each for each in taking if any(inner is not each and inner in taking for inner in each.modules())}
    return [_wrap(each) for each in taking if each not in outer and each not in attentions]


def unwrap(wrapped: RecurrentModule) -> None:
    """Undo `wrap_recurrent` for a module that keeps no state."""
    del wrapped.module.forward


def _knows_layer(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int)


def _cache_name(module: nn.Module) -> str | None:
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), None)


def _wrap(module: Any) -> RecurrentModule:
    forward, cache_name = module.forward, _cache_name(module)
    assert cache_name is not None, module
    names = list(inspect.signature(forward).parameters)

    def compute(hidden: Tensor, cache: Any) -> Tensor:
        return forward(hidden, **{cache_name: cache})  # type: ignore[no-any-return]

    found = RecurrentModule(module, module.layer_idx, compute, DeltaNet.of(module))

    def wrapped(*positional: Any, **named: Any) -> Tensor:
        if (recur := recur_now()) is None:  # transformers computes a whole prompt
            return forward(*positional, **named)  # type: ignore[no-any-return]
        given = {**dict(zip(names, positional, strict=False)), **named}
        hidden = given.pop(names[0])
        for name, argument in given.items():
            if not has_no_effect(name, argument):
                raise UnsupportedDecoderError(f"its recurrent layers are given {name}")
        return recur(found, hidden)

    module.forward = wrapped
    return found


class StateProbe:
    """A cache without states, which notes those that modules would keep."""

    def __init__(self) -> None:
        self.shapes: dict[StateName, StateShape] = {}

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedDecoderError(
            f"its recurrent layers use {name} of their cache: transformers 5.21 or later is needed"
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
    """Tokens of a step that are computed together: of one slice up to where its state is kept, or all single ones."""

    rows: slice | Tensor
    # The same rows, on the host.
    numbers: Sequence[int]
    slots: Tensor
    # For each state that is kept afterwards, which of these it is, and the slot to which it is written as well.
    kept: Sequence[tuple[int, int]]


class RecurrentStep:
    """Computes the recurrent modules of a step."""

    def __init__(self, names: Sequence[StateName], states: Sequence[Tensor], batch: AttentionBatch) -> None:
        """`states`: [slots, ...] for each name."""
        self._states, self._batch = dict(zip(names, states, strict=True)), batch

    def recur(self, module: RecurrentModule, hidden: Tensor) -> Tensor:
        kernel = None if module.delta_net is None else module.delta_net.find_kernel()
        if kernel is None:
            return self._compute_parts(module, hidden)
        columns, state = (self._states[StateName(module.layer, is_convolution, 0)] for is_convolution in (True, False))
        return kernel(hidden, DeltaNetStates(columns, state), self._batch.sequences)

    def _compute_parts(self, module: RecurrentModule, hidden: Tensor) -> Tensor:
        outputs = hidden
        for number, (rows, numbers, slots, kept) in enumerate(self._parts):
            cache = StateCache(self._states, slots)
            with taking_rows(numbers):
                output = module.compute(hidden[0, rows].view(len(slots), -1, hidden.shape[-1]), cache).flatten(0, 1)
            cache.write_back(kept)
            if not number:
                outputs = hidden.new_empty(1, hidden.shape[1], output.shape[-1])
            outputs[0, rows] = output
        return outputs

    @made_once
    def _parts(self) -> Sequence[Part]:
        """Longer slices, cut where their states are kept, and single tokens together."""
        slices, slots = self._batch.slices, self._batch.sequences.slots
        parts = [
            Part(
                slice(first + begin, first + end),
                range(first + begin, first + end),
                slots[index : index + 1],
                [] if slot is None else [(0, slot)],
            )
            for index, (piece, first) in enumerate(zip(slices, self._batch.slice_starts, strict=True))
            if piece.length > 1
            for begin, end, slot in _cut(piece)
        ]
        are_single = [piece.length == 1 for piece in slices]
        if any(are_single):
            singles, rows = self._batch.singles
            kept = [(index, slot) for index, piece in enumerate(singles) for _, slot in piece.kept_states]
            if not parts:
                return [Part(slice(None), rows, slots, kept)]
            parts.append(Part(torch.tensor(rows, device=self._batch.device), rows, slots[are_single], kept))
        return parts


def _cut(piece: RequestSlice) -> Iterator[tuple[int, int, int | None]]:
    """Yield a slice's parts: its rows from one to another, and the slot, if any, where the state after them is kept."""
    begin = 0
    for end, slot in piece.kept_states:
        yield begin, end - piece.start, slot
        begin = end - piece.start
    if begin < piece.length:
        yield begin, piece.length, None


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
        """Append columns [rows, channels, tokens]. Return them behind those that were held."""
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

    def write_back(self, kept: Sequence[tuple[int, int]]) -> None:
        """Write the states to their slots, and some (by row) to others as well."""
        for name, rows in self._copied.items():
            self._states[name].index_copy_(0, self._slots, rows)
            for row, slot in kept:
                self._states[name][slot] = rows[row]

"""Weights published in 4 or 8 bits, several to a word: the tensors of each, and how to unpack them.

A value is (number - zero of its group) * scale of its group; a group is some inputs of one output. Outputs come before
inputs here, as in unpacked weights. Knows nothing of files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WORDS, INDEXES, SCALES = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32")
_BITS_OF_WORD = 32
# Outputs that are unpacked at once; they fill whole words.
_OUTPUTS_AT_ONCE = 256


class Names(NamedTuple):
    """The names of one weight's tensors, each instead of `weight`; empty if there is no such tensor."""

    numbers: str
    scales: str
    # Packed like numbers, along outputs. Without them all zeros are the middle of the range.
    zeros: str = ""
    # The group of each input.
    groups: str = ""
    shape: str = ""


class Part(NamedTuple):
    """The required shape and dtypes of a tensor in files."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class Packing:
    names: Names
    num_bits: int
    # None: all inputs are one group.
    group_size: int | None
    # Whether the group of each input must be stored; if it is not, consecutive inputs form groups.
    needs_groups: bool = False
    inputs_come_first: bool = False
    # Whether a word packs numbers of consecutive outputs; otherwise of consecutive inputs.
    packs_outputs: bool = False
    # Index of the number at each place of a word, from its lowest bits; None: in order.
    order: tuple[int, ...] | None = None
    # Stored zeros are less than the real ones by this.
    zeros_less: int = 0

    @property
    def _shifts(self) -> tuple[int, ...]:
        """The bit offset of each number in a word."""
        count = _BITS_OF_WORD // self.num_bits
        order = self.order or range(count)
        return tuple(self.num_bits * order.index(each) for each in range(count))

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """Return the tensors of a weight [outputs, inputs], by name."""
        num_groups = self.count_groups(inputs)
        numbers = (self._count_words(outputs), inputs) if self.packs_outputs else (outputs, self._count_words(inputs))
        matrices = {
            self.names.numbers: Part(numbers, WORDS),
            self.names.scales: Part((outputs, num_groups), SCALES),
            self.names.zeros: Part((self._count_words(outputs), num_groups), WORDS),
        }
        if self.inputs_come_first:
            matrices = {name: part._replace(shape=part.shape[::-1]) for name, part in matrices.items()}
        vectors = {
            self.names.groups: Part((inputs,), INDEXES, self.needs_groups),
            self.names.shape: Part((2,), INDEXES),
        }
        return {name: part for name, part in (matrices | vectors).items() if name}

    def count_groups(self, inputs: int) -> int:
        return -(-inputs // (self.group_size or inputs))

    def _count_words(self, numbers: int) -> int:
        return -(-numbers * self.num_bits // _BITS_OF_WORD)

    def make_whole(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """Return the weight [outputs, inputs] as float32, from its tensors by name."""
        numbers = self._outputs_first(tensors[self.names.numbers])
        scales = self._outputs_first(tensors[self.names.scales]).float()
        zeros = self._zeros(tensors.get(self.names.zeros), scales)
        groups = tensors.get(self.names.groups)
        if groups is None:
            groups = torch.arange(inputs) // (self.group_size or inputs)
        whole = torch.empty(outputs, inputs)
        words_at_once = self._count_words(_OUTPUTS_AT_ONCE) if self.packs_outputs else _OUTPUTS_AT_ONCE
        pieces = zip(
            torch.split(numbers, words_at_once),
            *(torch.split(each, _OUTPUTS_AT_ONCE) for each in (zeros, scales, whole)),
            strict=True,
        )
        for words, its_zeros, its_scales, rows in pieces:
            its_numbers = self._unpack(words, 0 if self.packs_outputs else 1)[: len(rows), :inputs]
            torch.sub(its_numbers, its_zeros[:, groups], out=rows)
            rows.mul_(its_scales[:, groups])
        return whole

    def _zeros(self, words: Tensor | None, scales: Tensor) -> Tensor:
        """Return the zeros, [outputs, groups]."""
        if words is None:
            return torch.full_like(scales, 2 ** (self.num_bits - 1))
        # Added to whole words, as it was subtracted from whole words: a zero of 0 borrowed from the next number.
        missing = sum(self.zeros_less << shift for shift in self._shifts)
        return self._unpack(self._outputs_first(words) + missing, 0)[: len(scales)]

    def _outputs_first(self, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous() if self.inputs_come_first else matrix

    def _unpack(self, words: Tensor, dim: int) -> Tensor:
        """Unpack words [rows, columns]; `dim` grows by the count of numbers per word."""
        shifts = torch.tensor(self._shifts, dtype=words.dtype)
        apart = words.unsqueeze(dim + 1) >> (shifts if dim else shifts[:, None])
        return apart.bitwise_and_(2**self.num_bits - 1).flatten(dim, dim + 1)


def awq(group_size: int | None) -> Packing:
    names = Names("qweight", "scales", "qzeros")
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return Packing(names, 4, group_size, inputs_come_first=True, packs_outputs=True, order=order)


def gptq(num_bits: int, group_size: int | None, *, needs_groups: bool, zeros_less: int) -> Packing:
    names = Names("qweight", "scales", "qzeros", "g_idx")
    return Packing(names, num_bits, group_size, needs_groups, inputs_come_first=True, zeros_less=zeros_less)


def compressed(num_bits: int, group_size: int | None, *, needs_groups: bool, has_zeros: bool) -> Packing:
    """The compressed-tensors packing: numbers and zeros are stored with the same offset, so that both are >= 0."""
    zeros = "weight_zero_point" if has_zeros else ""
    names = Names("weight_packed", "weight_scale", zeros, "weight_g_idx", "weight_shape")
    return Packing(names, num_bits, group_size, needs_groups)

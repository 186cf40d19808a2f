"""Weights that were published in 4 or 8 bits, several to a word: the tensors of each, and what they stand for.

A number less its group's zero, times its group's scale; a group is some inputs of one output.  Outputs come before
inputs here, as in weights that are whole.  Knows nothing of files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WORDS, INDEXES, SCALES = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32")
_BITS_OF_WORD = 32
# As many are widened at once; whole words of outputs.
_OUTPUTS_AT_ONCE = 256


class Names(NamedTuple):
    """Of the tensors of one weight, each in the place of `weight`; empty where there is none."""

    numbers: str
    scales: str
    # Packed as numbers are, by outputs.  Without them all are in the middle.
    zeros: str = ""
    # Each input's.
    groups: str = ""
    shape: str = ""


class Part(NamedTuple):
    """What a tensor must be in files."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class Packing:
    names: Names
    num_bits: int
    # None: all inputs are one.
    group_size: int | None
    # Whether each input must say of which group it is: where none does, neighbours are of one.
    needs_groups: bool = False
    inputs_come_first: bool = False
    # Whether a word has numbers of some outputs, or else of some inputs.
    packs_outputs: bool = False
    # Which of them is at each place of a word, from its lowest bits; None: one behind the other.
    order: tuple[int, ...] | None = None
    # How much smaller than it is a zero is kept.
    zeros_less: int = 0

    @property
    def _shifts(self) -> tuple[int, ...]:
        """By which each number of a word is moved."""
        count = _BITS_OF_WORD // self.num_bits
        order = self.order or range(count)
        return tuple(self.num_bits * order.index(each) for each in range(count))

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """By their names, of a weight of [outputs, inputs]."""
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
        """[outputs, inputs], as float32, of its tensors by their names."""
        numbers, scales = self._turn(tensors[self.names.numbers]), self._turn(tensors[self.names.scales]).float()
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
        """[outputs, groups]"""
        if words is None:
            return torch.full_like(scales, 2 ** (self.num_bits - 1))
        # Given back to a whole word, as it was taken away: what was 0 borrowed of the next.
        missing = sum(self.zeros_less << shift for shift in self._shifts)
        return self._unpack(self._turn(words) + missing, 0)[: len(scales)]

    def _turn(self, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous() if self.inputs_come_first else matrix

    def _unpack(self, words: Tensor, dim: int) -> Tensor:
        """[rows, columns], and as many more in `dim` as a word has numbers."""
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
    """Numbers and zeros are kept as much larger as makes them no less than 0, both of them."""
    zeros = "weight_zero_point" if has_zeros else ""
    names = Names("weight_packed", "weight_scale", zeros, "weight_g_idx", "weight_shape")
    return Packing(names, num_bits, group_size, needs_groups)

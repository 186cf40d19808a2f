"""Quantizes weights to integers from -127 to 127, with a scale for each row.

A row's largest number becomes 127 or -127; the others are rounded to the nearest integer, ties to even.
"""

from torch import Tensor

LARGEST = 127
# Numbers converted to float32 at once: a float32 copy of a whole embedding table takes several GiB.
_NUMBERS_AT_ONCE = 2**22


def quantize_rows(quantized: Tensor, scales: Tensor, rows: Tensor) -> None:
    """Quantize `rows` [..., rows, numbers] into `quantized` and `scales` [..., rows].

    A scale is NaN or infinite if one of its row's numbers is.
    """
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, rows[:1].numel()))
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        numbers = rows[some].float()
        scales[some] = numbers.abs().amax(dim=-1) / LARGEST
        # The scale of a row of zeros is 0.
        divisors = scales[some].masked_fill(scales[some] == 0, 1.0)[..., None]
        quantized[some] = (numbers / divisors).round_().clamp_(-LARGEST, LARGEST)

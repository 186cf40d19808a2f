"""From a weight's numbers to whole ones from -127 to 127, with a scale for each row.

A row's largest number becomes 127 or -127, the others the nearest whole ones, of two as near the even one.
"""

from torch import Tensor

LARGEST = 127
# As many are widened at once: of an embedding table a copy in float32 is several GiB.
_NUMBERS_AT_ONCE = 2**22


def quantize_rows(quantized: Tensor, scales: Tensor, rows: Tensor) -> None:
    """[..., rows, numbers] to the first, and [..., rows] to the second: NaN or infinite where one of its numbers is."""
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, rows[:1].numel()))
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        numbers = rows[some].float()
        scales[some] = numbers.abs().amax(dim=-1) / LARGEST
        # Of a row of zeros it is 0.
        divisors = scales[some].masked_fill(scales[some] == 0, 1.0)[..., None]
        quantized[some] = (numbers / divisors).round_().clamp_(-LARGEST, LARGEST)

"""The measure by which computations of the same rows are compared before a model serves."""

from torch import Tensor

LEAST_NORM = 1e-6


def row_differences(found: Tensor, expected: Tensor) -> Tensor:
    """Return how much each row differs, relative to the expected row: [rows, ...] -> [rows]"""
    found, expected = found.float(), expected.float()
    # A token with a zero embedding, as padding tokens may have, is zero through all layers.
    differences: Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=LEAST_NORM)
    return differences

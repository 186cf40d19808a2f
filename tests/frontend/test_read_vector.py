"""A vector is normalized to length 1 however large or small its numbers are."""

import numpy as np
import pytest

from keepsight.frontend.read_vector import read_vector
from keepsight.requests import TokenOutput


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_a_vector_of_any_magnitude_is_normalized(size: float) -> None:
    output = TokenOutput("1", 0, 1, vector=np.array([size, -size, 0, size], "<f4").tobytes())
    np.testing.assert_allclose(read_vector(output), np.array([1, -1, 0, 1]) / 3**0.5, rtol=1e-6)


def test_a_vector_of_zeros_stays_zero() -> None:
    assert read_vector(TokenOutput("1", 0, 1, vector=bytes(8))).tolist() == [0, 0]

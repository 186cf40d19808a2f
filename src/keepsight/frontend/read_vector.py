"""What a model made of a prompt, as callers are told it: the hidden state after its last token, of length 1."""

import numpy as np
import numpy.typing as npt

from keepsight.errors import InvalidArgumentError
from keepsight.requests import TokenOutput
from keepsight.sampling_params import SamplingParams

Vector = npt.NDArray[np.float32]
# One token is drawn, and told to nobody.
PARAMS_OF_VECTORS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    if dimensions is not None and dimensions > hidden_size:
        told = f"must be at most {hidden_size}, the numbers that this model's vectors have"
        raise InvalidArgumentError("dimensions", f"{told}, not {dimensions}")


def read_vector(told: TokenOutput, dimensions: int | None = None, *, is_normalized: bool = True) -> Vector:
    """`dimensions`: so many of its first numbers; None: all."""
    assert told.vector is not None, "a vector that was not asked for"
    vector = np.frombuffer(told.vector, "<f4")[:dimensions]
    # Of numbers that float32 holds its own squares may be too large, or too small.
    wide = vector.astype(np.float64)
    length = np.linalg.norm(wide)
    return (wide / length).astype("<f4") if is_normalized and length > 0 else vector

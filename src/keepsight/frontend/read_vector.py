"""Reads the vector of a prompt as clients get it: the hidden state after its last token, scaled to length 1."""

import numpy as np
import numpy.typing as npt

from keepsight.errors import InvalidArgumentError
from keepsight.requests import TokenOutput
from keepsight.sampling_params import SamplingParams

Vector = npt.NDArray[np.float32]
# One token is sampled, and not returned.
PARAMS_OF_VECTORS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    if dimensions is not None and dimensions > hidden_size:
        reason = f"must be at most {hidden_size}, the size of this model's vectors"
        raise InvalidArgumentError("dimensions", f"{reason}, not {dimensions}")


def read_vector(output: TokenOutput, dimensions: int | None = None, *, is_normalized: bool = True) -> Vector:
    """Return the vector of a prompt's first token output. `dimensions`: how many of its first numbers; None: all."""
    assert output.vector is not None, "a vector that was not asked for"
    vector = np.frombuffer(output.vector, "<f4")[:dimensions]
    # The squares of float32 numbers may overflow or underflow in float32.
    wide = vector.astype(np.float64)
    length = np.linalg.norm(wide)
    return (wide / length).astype("<f4") if is_normalized and length > 0 else vector

"""Pictures that are numpy arrays or torch tensors of this process: which are accepted, and how their axes are read.

Tensors are recognized by their methods, so that torch is not imported. The arrays that `try_freeze_array` returns are
private copies and never change, so their names stay valid.
"""

from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from keepsight.errors import UnsupportedPictureError
from keepsight.requests import Pixels

PictureArray = npt.NDArray[np.uint8]  # in the caller's shape

ALLOWED = "uint8 [height, width, 3], [3, height, width] or, for grey, [height, width] or 1 channel instead of 3"
# The reference takes a first axis of one of these lengths to be the channels, whatever the last axis is.
_CHANNEL_COUNTS = (1, 3, 4)


def try_freeze_array(source: object, field: str) -> PictureArray | None:
    """Return a contiguous, read-only copy, or None if the source is neither an array nor a tensor."""
    if not is_array(source):
        return None
    _check_kind(str(source.dtype).removeprefix("torch."), tuple(source.shape), field)
    frozen = np.array(to_numpy(source, field), order="C")
    frozen.flags.writeable = False
    return frozen


def view_as_rgb(array: PictureArray) -> Pixels:
    """Return a view [height, width, 3]; nothing is copied."""
    rows = _with_channels_last(array)
    return np.broadcast_to(rows, (*rows.shape[:2], 3))


def _with_channels_last(array: PictureArray) -> PictureArray:
    if array.ndim == 2:
        return array[..., np.newaxis]
    return np.moveaxis(array, 0, -1) if array.shape[0] in _CHANNEL_COUNTS else array


def _check_kind(dtype: str, shape: tuple[int, ...], field: str) -> None:
    channels = 1
    if len(shape) == 3:
        channels = shape[0] if shape[0] in _CHANNEL_COUNTS else shape[2]
    if dtype != "uint8" or len(shape) not in (2, 3) or channels not in (1, 3):
        # vLLM accepts float arrays as embeddings where it accepts pictures.
        hint = "; embeddings are a separate content part, image_embeds of LLM.chat" if "float" in dtype else ""
        message = f"an array of {dtype} {list(shape)} is not supported; allowed are {ALLOWED}{hint}"
        raise UnsupportedPictureError(field, message)


def is_array(source: object) -> TypeGuard[Any]:
    """Return whether this is a numpy array or a torch tensor."""
    named = ("detach", "cpu", "numpy", "dtype", "shape")
    return isinstance(source, np.ndarray) or all(hasattr(source, name) for name in named)


def to_numpy(source: Any, field: str) -> npt.NDArray[Any]:
    """Return the data of a numpy array or a torch tensor; nothing is copied if it is in this machine's memory."""
    if isinstance(source, np.ndarray):
        return source
    try:
        array: npt.NDArray[Any] = source.detach().cpu().numpy()
    except (RuntimeError, TypeError) as error:  # sparse, or on the meta device
        raise UnsupportedPictureError(field, f"a tensor without dense data: {error}") from error
    return array

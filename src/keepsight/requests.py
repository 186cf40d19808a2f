"""What the frontend asks of an engine, and what comes back: plain values, no tensors of a device, no process.

`EngineRequest` is immutable.  Its pixels are uint8 `[height, width, 3]`, one array for each media item, in order.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from keepsight.media import MediaItem
from keepsight.sampling_params import SamplingParams

Pixels = npt.NDArray[np.uint8]  # [height, width, 3]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...]
    pixels: tuple[Pixels, ...]
    sampling_params: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token of one of a request's `n` choices."""

    choice: int
    token_id: int
    # The sampled token first, then the most likely ones, when logprobs were asked for.
    logprobs: tuple[TokenLogprob, ...] | None = None
    # "stop" when the token ends the answer by itself; stop strings are the frontend's business.
    finish_reason: FinishReason | None = None

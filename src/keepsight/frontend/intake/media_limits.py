"""Limits on the media of a request, each checked as soon as the number is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from keepsight.config import Config
from keepsight.errors import MediaTooLargeError, TooManyPicturesError
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.media import SEVERAL


@dataclass(frozen=True, slots=True)
class MediaLimits:
    # By kind: the number of pictures, films or sounds per request.
    max_number: Mapping[str, int]
    # The size of each as it is sent or fetched, and of all media of one request.
    max_bytes: int
    max_request_bytes: int
    # For all downloads of one request.
    fetch_seconds: float

    @classmethod
    def from_config(cls, config: Config) -> Self:
        return cls(
            config.limit_mm_per_prompt,
            config.max_media_bytes,
            config.max_request_media_bytes,
            config.media_fetch_timeout,
        )

    def check_count(self, parts: Sequence[PicturePart]) -> None:
        """Check the number of each kind. Media of earlier turns count, crops do not."""
        for kind, what in SEVERAL.items():
            own = [part for part in parts if part.kind == kind]
            most = self.max_number.get(kind, len(own))
            if len(own) > most:
                fault = f"is one of {len(own)} {what}, at most {most} may be sent (limit_mm_per_prompt)"
                raise TooManyPicturesError(own[most].field, fault)

    def check_size(self, num_bytes: int, field: str) -> None:
        if num_bytes > self.max_bytes:
            message = f"has {num_bytes} bytes, one may have at most {self.max_bytes}"
            raise MediaTooLargeError(field, message)

    def count_bytes(self) -> "RequestBytes":
        return RequestBytes(self.max_request_bytes)


class RequestBytes:
    """Counts the media bytes of one request so far."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0

    def add(self, num_bytes: int, field: str) -> None:
        self.check_room(num_bytes, field)
        self._num_bytes += num_bytes

    def check_room(self, num_bytes: int, field: str) -> None:
        """Refuse so many bytes if they could not be added. For what is about to be read."""
        if self._num_bytes + num_bytes > self._max_bytes:
            message = f"brings the request's media to more than the {self._max_bytes} bytes that all may have"
            raise MediaTooLargeError(field, message)

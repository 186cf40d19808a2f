"""All exceptions that Keepsight raises on purpose.

Errors reported to callers are `AnsweredError`s: an invalid request (`InvalidArgumentError`, which names the field) or a
request that was given up (`RequestFailedError`). All others stay internal, or end a command with one line, such as a
checkpoint that cannot be served (`CheckpointError`, which names the file). `assert` is only for our own bugs.
`renaming_fields` gives the fields of invalid requests the names that callers know.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal


class KeepsightError(Exception):
    """The base class: catching it catches all errors below and nothing else."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle and copy: rebuild without calling the constructor, whose parameters are not `args`."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class AnsweredError(KeepsightError):
    """An error reported to the caller, over HTTP with this status and code. For status 500, nothing else is sent."""

    status = 500
    code: str | None = None


class InvalidArgumentError(AnsweredError):
    """A caller asked for something that cannot be done; `field` is the name they used for it."""

    status = 400
    code = "invalid_argument"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        # The index of the prompt that it is about, if `LLM` was given several.
        self.item: int | None = None


@contextmanager
def renaming_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Report faults under the caller's names. `rename`: maps the name of a field where a fault is found to that."""
    try:
        yield
    except InvalidArgumentError as error:
        raise type(error)(rename(error.field), error.message) from error


class UnsupportedFieldError(InvalidArgumentError):
    """A known field that this server does not implement, or an unknown name."""

    code = "unsupported_field"


class BodyTooLargeError(InvalidArgumentError):
    status = 413
    code = "body_too_large"


class BodyTimeoutError(InvalidArgumentError):
    """The rest of the body did not arrive in time."""

    status = 408
    code = "body_timeout"


class UnsupportedBodyError(InvalidArgumentError):
    """The body's format is not supported."""

    status = 415
    code = "unsupported_body"


class ModelNotFoundError(InvalidArgumentError):
    status = 404
    code = "model_not_found"


class PromptTooLongError(InvalidArgumentError):
    code = "context_length_exceeded"


class ReservedTokenError(InvalidArgumentError):
    """A text contains a token that is reserved for pictures."""

    code = "reserved_token"


class ChatTemplateError(InvalidArgumentError):
    """The checkpoint's chat template refused the messages."""

    code = "chat_template"


class PictureError(InvalidArgumentError):
    """Any fault of a picture that a caller sent."""

    code = "picture"


class UnreadablePictureError(PictureError):
    """The bytes are not a picture, or end before it does."""

    code = "picture_unreadable"


class UnsupportedPictureError(PictureError):
    """A picture, but of a kind that has no faithful 8-bit RGB form: animated, 16-bit, float."""

    code = "picture_unsupported"


class PictureTooLargeError(PictureError):
    status = 413
    code = "picture_too_large"


class MediaTooLargeError(PictureError):
    """One picture, or all media of a request, has too many bytes."""

    status = 413
    code = "media_too_large"


class MediaRefusedError(PictureError):
    """A source that pictures must not come from: an address, a host, a file, a scheme."""

    code = "media_refused"


class MediaFetchError(PictureError):
    """The source is allowed, but did not deliver the picture."""

    code = "media_not_fetched"


class MediaTimeoutError(MediaFetchError):
    code = "media_timeout"


class MediaBusyError(MediaFetchError):
    """Too much is being downloaded already: worth trying again."""

    status = 429
    code = "media_busy"


class PictureEmbedsError(PictureError):
    """Precomputed embeddings that are damaged, in an unsupported format, or do not fit the model."""

    code = "image_embeds_refused"


class PromptEmbedsError(InvalidArgumentError):
    """The same for the embeddings of a prompt."""

    code = "prompt_embeds_refused"


class TooManyPicturesError(PictureError):
    code = "too_many_pictures"


class PictureCountError(PictureError):
    """Picture markers in the prompt and pictures in the request do not match."""

    code = "picture_count"


class UnknownMediaError(PictureError):
    """A uuid came without its picture, and what is needed of it is not cached (any more)."""

    code = "media_not_cached"


class MediaConflictError(PictureError):
    """A uuid came with a different picture than before."""

    code = "media_uuid_conflict"


class UnknownHandleError(PictureError):
    """The handle was never issued, has expired, or belongs to another tenant."""

    status = 404
    code = "media_not_found"


class MediaQuotaError(PictureError):
    """An upload would exceed the tenant's quota."""

    status = 413
    code = "media_quota_exceeded"


class MediaStoreError(PictureError):
    """The store of uploads is full or unavailable: worth trying again."""

    status = 507
    code = "media_store_unavailable"


class UnknownResponseError(InvalidArgumentError):
    """The response was not stored, was evicted, or belongs to another tenant."""

    status = 404
    code = "response_not_found"


class ResponseStoreError(AnsweredError):
    """The store of responses is unavailable: worth trying again."""

    status = 507
    code = "response_store_unavailable"


class RequestFailedError(AnsweredError):
    """The engine refused a request that can never run, or lost one that could: it gets no (more) tokens."""

    def __init__(self, message: str, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.is_refusal = is_refusal
        if is_refusal:
            self.status, self.code = 400, "cannot_fit"


class EngineLostError(RequestFailedError):
    """The engine ended before it answered the request, or there is none: worth trying again."""

    status = 503
    code = "engine_lost"

    def __init__(self, message: str, *, had_begun: bool = False) -> None:
        """`had_begun`: an answer had begun. Otherwise it was lost with several engines, and may be why they ended."""
        super().__init__(message)
        self.had_begun = had_begun


class SlowReaderError(RequestFailedError):
    """The client read its stream so slowly that too much of the answer waited for it: the rest was dropped."""

    status = 408
    code = "slow_reader"


class MediaWorkersLostError(RequestFailedError):
    """No media worker can be started: worth trying again."""

    status = 503
    code = "media_workers_lost"


class AccessError(AnsweredError):
    """The API key is missing or wrong."""

    status = 401

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ForbiddenError(AccessError):
    """The caller is not permitted to do this."""

    status = 403


class NoSuchPathError(AccessError):
    status = 404


class ServerOverloadedError(AnsweredError):
    """No room for one more request: worth trying again, or elsewhere."""

    status = 503
    code = "server_overloaded"


class NoReplicaError(AnsweredError):
    """No server behind the router can take the request now: worth trying again."""

    status = 503
    code = "no_replica"


# What became of a server behind the router, as far as a failed connection tells:
# silent: nothing comes from its machine, which may be lost.
# gone: nobody listens at its address, so that what it held in memory is gone.
# closed: it closed a connection without a byte of an answer, as it may one that has not been used for a while.
# distrusted: its certificate is, which does not change by itself.
# failed: anything else.
Loss = Literal["failed", "silent", "gone", "closed", "distrusted"]


class ReplicaLostError(KeepsightError):
    """The connection to a server behind the router failed. The router asks another one, if it can."""

    def __init__(self, message: str, may_have_begun: bool, how: Loss = "failed") -> None:
        """`may_have_begun`: the server may have been working on the request, and may even have died of it."""
        super().__init__(message)
        self.may_have_begun, self.how = may_have_begun, how


class OtherProcessError(KeepsightError):
    """An `LLM` was used in a process forked from the one that created it."""

    def __init__(self, process: int) -> None:
        reason = "create one in each process, or start processes by spawn"
        super().__init__(f"this LLM belongs to process {process}, but this is {os.getpid()}: {reason}")


class WireError(KeepsightError):
    """A message between two processes that cannot be decoded as one of ours, or cannot be encoded."""


class HandshakeError(KeepsightError):
    """The handshake of frontend and engine was refused or timed out."""


class ServerStartError(KeepsightError):
    """One of the server's processes cannot start as configured; the message is that process's own."""


class NoAnswerError(KeepsightError):
    """A server that we called as a client refused, failed, or cannot be reached."""

    def __init__(self, message: str, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.is_unreachable = is_unreachable


class TierError(KeepsightError):
    """A tier cannot be used now: its entries count as absent until it can."""


class EverythingPinnedError(KeepsightError):
    """A cache has no room for an item that would fit: the entries to evict are pinned."""

    def __init__(self, num_bytes: int, max_bytes: int, num_pinned_bytes: int) -> None:
        super().__init__(f"no room for {num_bytes} bytes: {num_pinned_bytes} of the cache's {max_bytes} are pinned")


class CheckpointError(KeepsightError):
    """A model folder that cannot be served as it is."""

    def __init__(self, path: Path | str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = Path(path)
        self.message = message


class MissingCheckpointError(CheckpointError):
    """The folder does not exist. Nothing is downloaded: for a name on the Hub, the message says how to get a folder."""

    def __init__(self, path: Path) -> None:
        is_like_the_hubs = len(path.parts) == 2 and not path.is_absolute()
        hint = f"; if that is its name on the Hugging Face Hub: hf download {path} --local-dir FOLDER, then use FOLDER"
        super().__init__(path, "no such folder" + (hint if is_like_the_hubs else ""))


class UnknownArchitectureError(CheckpointError):
    pass


class CheckpointConfigError(CheckpointError):
    """A value in one of the checkpoint's JSON files is missing, malformed or not supported."""


class UnreadableTensorsError(CheckpointError):
    """A safetensors file is truncated or malformed."""


MAX_NAMED_TENSORS = 16


class TensorMismatchError(CheckpointError):
    """The checkpoint's tensors are not the model's. Carries the complete lists; the message names the first of each."""

    def __init__(
        self,
        path: Path | str,
        missing: Sequence[str] = (),
        surplus: Sequence[str] = (),
        misshapen: Sequence[str] = (),
        mistyped: Sequence[str] = (),
    ) -> None:
        kinds = {
            "missing": missing,
            "surplus": surplus,
            "of the wrong shape": misshapen,
            "of the wrong type": mistyped,
        }
        parts = [
            f"{len(names)} {kind}: {', '.join(names[:MAX_NAMED_TENSORS])}{', ...' if names[MAX_NAMED_TENSORS:] else ''}"
            for kind, names in kinds.items()
            if names
        ]
        super().__init__(path, "tensors do not fit the model; " + "; ".join(parts))
        self.missing = tuple(missing)
        self.surplus = tuple(surplus)
        self.misshapen = tuple(misshapen)
        self.mistyped = tuple(mistyped)


class NotFiniteError(CheckpointError):
    """A tensor holds NaN or infinity: no answer would have any meaning."""

    def __init__(self, path: Path | str, name: str, dtype: str) -> None:
        super().__init__(path, f"{name} holds NaN or infinity (as {dtype})")


class ModelTooLargeError(CheckpointError):
    """Raised before memory is written to: on a CPU the system would kill this process, or another."""

    def __init__(self, path: Path | str, num_bytes: int, room: int, dtype: str, hint: str | None = None) -> None:
        needed, left = num_bytes / 2**30, room / 2**30
        reason = f"the weights take {needed:.1f} GiB in {dtype}, and {left:.1f} GiB of memory are left"
        super().__init__(path, f"{reason}; {hint}" if hint else reason)


class PagesTooLargeError(KeepsightError):
    """There is no memory for the keys and values, as the system or a GPU reported."""

    def __init__(self, num_blocks: int, num_bytes: int, reason: str) -> None:
        request = f"{num_blocks} KV blocks take {num_bytes / 2**30:.1f} GiB, more than is available"
        hint = "--kv-cache-memory-bytes or --num-gpu-blocks-override can request fewer"
        super().__init__(f"{request} ({hint}): {reason}")


class UntiedTensorsError(CheckpointError):
    """Two tensors that the configuration ties together are different."""

    def __init__(self, path: Path | str, copy: str, original: str) -> None:
        message = f"{copy} differs from {original}, though config.json says or implies tie_word_embeddings: true"
        super().__init__(path, f"{message}; set it to false at the top level to use both")

"""Reads pictures of this machine by `file:` URL, only from below one folder, wherever links and dots lead."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from keepsight.errors import MediaFetchError, MediaRefusedError, MediaTooLargeError
from keepsight.frontend.intake.media_limits import RequestBytes

# Do not wait for the writer of a pipe; do not follow a link that has replaced the file since it was checked.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class LocalFiles:
    def __init__(self, folder: Path | str | None, max_bytes: int) -> None:
        """If `folder` is None, no file may be read."""
        self._folder = None if folder is None else Path(folder).resolve()
        # The folder as the operator may have told it to clients.
        self._spellings = () if folder is None else (_spell(folder), Path(folder).resolve())
        self._max_bytes = max_bytes

    def read(self, url: str, field: str, budget: RequestBytes) -> bytes:
        """Read a file that is not too large, by itself and beside what `budget` has counted; count nothing."""
        if self._folder is None:
            raise MediaRefusedError(field, "file: URLs are not allowed here: allowed_local_media_path is not set")
        try:
            path = self._find(_path_of(url, field), self._folder, field)
            with os.fdopen(os.open(path, _FLAGS), "rb") as file:
                opened = os.fstat(file.fileno())
                _check_opened(path, opened, field)
                self._check_size(opened.st_size, field)
                budget.check_room(opened.st_size, field)
                # It may have grown since.
                content = file.read(self._max_bytes + 1)
                self._check_size(len(content), field)
                return content
        except (OSError, RuntimeError, ValueError) as error:  # symlink loops; characters that no path may have
            raise MediaFetchError(field, f"the file could not be read: {_reason(error)}") from error

    def _find(self, path: str, folder: Path, field: str) -> Path:
        # Without looking: where a path through other folders leads would tell which links and processes there are.
        spelled = _spell(path)
        is_below = any(map(spelled.is_relative_to, self._spellings))
        if not is_below or not (found := spelled.resolve()).is_relative_to(folder):
            # The same message whether the file exists or not.
            raise MediaRefusedError(field, "the file is outside the folder that pictures may come from")
        return found

    def _check_size(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._max_bytes:
            message = f"the file has more than the {self._max_bytes} bytes that a picture may have"
            raise MediaTooLargeError(field, message)


def _path_of(url: str, field: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise MediaRefusedError(field, "a file: URL must be file:///path, or file://localhost/path")
    if parts.query or parts.fragment:
        raise MediaRefusedError(field, "in a file: URL '?' and '#' must be percent-encoded")
    return unquote(parts.path, errors="strict")


def _spell(path: Path | str) -> Path:
    """Return the absolute path without dots, links as they are. POSIX lets two slashes at its beginning mean more."""
    return Path("/" + os.path.normpath(Path(path).absolute()).lstrip("/"))


def _check_opened(path: Path, opened: os.stat_result, field: str) -> None:
    """Check that a regular file was opened, the one that `path` was found to be."""
    if not stat.S_ISREG(opened.st_mode):
        raise MediaRefusedError(field, "is not a regular file")
    # A folder on the path may have been replaced by a link after the check.
    if path.resolve() != path or not os.path.samestat(opened, path.stat()):
        raise MediaRefusedError(field, "the file was replaced while it was being opened")


def _reason(error: Exception) -> str:
    return error.strerror or "unknown" if isinstance(error, OSError) else "it has no path"

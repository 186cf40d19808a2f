"""Names of entries in tiers that outlive the process: digests of all that an entry depends on, which reveal none of it.

Invariant: an engine never reads entries written with other weights, configuration, precision or preprocessing.
"""

import json
import logging
import re
import tempfile
from pathlib import Path

from blake3 import blake3

from keepsight.errors import CheckpointError
from keepsight.tiers.cache_home import cache_home

logger = logging.getLogger(__name__)

# Version of how embeddings, keys and values are computed here: raise it when a change alters their bits.
_VERSION = 5
_KEY = re.compile(r"[0-9a-f]{64}")
_CONFIGURATION = ("config.json", "preprocessor_config.json", "processor_config.json", "model.safetensors.index.json")


def entry_key(key: str, model_digest: str, processor: str, dtype: str) -> str:
    """Return 64 hexadecimal digits. `key`, an encoder key or block hash, covers content, adapter and tenant's salt."""
    return blake3(json.dumps([_VERSION, key, model_digest, processor, dtype]).encode()).hexdigest()


def is_entry_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def model_content_digest(directory: Path, remembered: Path | None = None) -> str:
    """Digest all weights and configuration. Reads gigabytes once: digests of unchanged files are remembered."""
    try:
        return _digest_folder(directory, remembered or _default_place())
    except OSError as error:
        raise CheckpointError(error.filename or directory, f"cannot be read: {error.strerror}") from error


def _digest_folder(directory: Path, remembered: Path | None) -> str:
    paths = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors" or path.name in _CONFIGURATION)
    if not any(path.suffix == ".safetensors" for path in paths):
        raise CheckpointError(directory, "no safetensors files")
    known = {} if remembered is None else _recall(remembered)
    identities = {path: identity for path in paths if (identity := _identity(path)) is not None}
    digests = {path: known.get(identities.get(path, "")) or _digest_file(path) for path in paths}
    current = {identity: digests[path] for path, identity in identities.items()}
    if remembered is not None and not current.items() <= known.items():
        _remember(remembered, {**known, **current})
    named = [[path.name, digest] for path, digest in digests.items()]
    return blake3(json.dumps(named).encode()).hexdigest()


def _digest_file(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _identity(path: Path) -> str | None:
    """Identify a version of a file, above all by its ctime, which nobody can set where the kernel stamps it.

    Return None if the ctime is in whole seconds, as in file system images: then the next image may have the same.
    """
    about = path.stat()
    if about.st_ctime_ns % 1_000_000_000 == 0:
        return None
    return f"{path.resolve()}|{about.st_ino}|{about.st_size}|{about.st_mtime_ns}|{about.st_ctime_ns}"


def _default_place() -> Path | None:
    """Return the file of remembered digests; None for a user without a home."""
    try:
        return cache_home() / "model_digests.json"
    except RuntimeError:
        return None


def _recall(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
        return {str(identity): str(digest) for identity, digest in content.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _remember(path: Path, digests: dict[str, str]) -> None:
    """Save digests. Written aside, as several servers may start at once; if it fails, only time is lost."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            written = Path(aside) / path.name
            written.touch(mode=0o600)
            written.write_text(json.dumps(digests))
            written.replace(path)
    except OSError as error:
        logger.warning("digests of model files cannot be remembered: %s", error)

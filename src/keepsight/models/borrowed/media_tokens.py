"""Finds the tokens that stand for media in the configuration of transformers' model, whatever its fields are called."""

from typing import Any

_KINDS = ("image", "video", "audio")


def find_media_token(config: Any, kind: str) -> int | None:
    """Return the token that stands for each embedding of a medium of this kind, such as "image"."""
    named = (getattr(config, f"{kind}_token_{suffix}", None) for suffix in ("id", "index"))
    return next((each for each in named if isinstance(each, int)), None)


def find_media_tokens(config: Any) -> frozenset[int]:
    found = (find_media_token(config, kind) for kind in _KINDS)
    return frozenset(each for each in found if each is not None)

"""The demo: a language model of two million parameters that sees colored shapes, and the pictures it knows.

Nothing here imports torch. The checkpoint is package data; the training code is in `training/` of the repository.
"""

from pathlib import Path


def checkpoint_path() -> Path:
    """Return the directory of the demo checkpoint, in the layout that transformers reads."""
    return Path(__file__).parent / "checkpoint"

"""Loads the model of a checkpoint's folder: the one place that lists the architectures."""

from collections.abc import Callable
from pathlib import Path

from keepsight.borrowed import is_borrowed
from keepsight.checkpoint_folder import check_is_folder
from keepsight.errors import UnknownArchitectureError
from keepsight.json_fields import JsonFields
from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.model import Model
from keepsight.models.qwen2_5_vl.model import Qwen25VL
from keepsight.models.qwen2_audio.model import Qwen2Audio
from keepsight.models.qwen3_5.model import Qwen35
from keepsight.models.qwen3_vl.config import MIXTURE
from keepsight.models.qwen3_vl.model import Qwen3VL

Loader = Callable[[Path, Placement, int | None], Model]
_LOADERS: dict[str, Loader] = {
    "Gemma3ForConditionalGeneration": Gemma3.from_checkpoint,
    "Gemma3ForCausalLM": Gemma3.from_checkpoint,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL.from_checkpoint,
    "Qwen2AudioForConditionalGeneration": Qwen2Audio.from_checkpoint,
    "Qwen3VLForConditionalGeneration": Qwen3VL.from_checkpoint,
    MIXTURE: Qwen3VL.from_checkpoint,
    "Qwen3_5ForConditionalGeneration": Qwen35.from_checkpoint,
    "Qwen3_5MoeForConditionalGeneration": Qwen35.from_checkpoint,
}


def load_model(directory: Path, place: Placement, room: int | None = None, model_impl: str = "auto") -> Model:
    """Load the model of a checkpoint.

    `room`: bytes of memory that its weights may take; `model_impl`: whose modules to use, see `is_borrowed`.
    """
    check_is_folder(directory)
    if is_borrowed(directory, model_impl):
        return BorrowedModel.from_checkpoint(directory, place, room)
    fields = JsonFields.read(directory / "config.json")
    architectures = fields.strings("architectures")
    for name in architectures:
        if name in _LOADERS:
            return _LOADERS[name](directory, place, room)
    raise UnknownArchitectureError(
        fields.path, f"architectures: {list(architectures)}; known are {', '.join(_LOADERS)}"
    )

"""Writes the output of transformers' torchvision backend for all cases, and for films, to an npz file: `python -m ...
FOLDER OUTPUT`.

There is no torchvision for a CPU torch. The ordinary wheel works too, from its own FOLDER (`pip install --no-deps
--target FOLDER torchvision==0.28.0`, or the version that matches torch), once the operators are defined whose library
it cannot load. This needs its own process, because transformers behaves differently once torchvision is imported.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def import_torchvision(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # its operators are missing
        _import_without_library()


def _import_without_library() -> None:
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    register_fake: Callable[..., Any] = torch.library.register_fake

    def register_if_known(operator: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operator, str) and operator.startswith("torchvision::"):
            return lambda function: function
        return register_fake(operator, *args, **kwargs)

    torch.library.register_fake = register_if_known
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = register_fake
    # Kept alive, as its definitions last only as long as it does.
    globals()["_library"] = library


def main(folder: Path, output: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_torchvision(folder)
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    from tests.frontend.reference_processor import reference_film, reference_pixels
    from tests.frontend.sample_films import film_cases
    from tests.frontend.sample_pictures import all_cases

    classes = (Gemma3ImageProcessor, Qwen2VLImageProcessor)
    arrays: dict[str, Any] = {case.name: reference_pixels(case, *classes) for case in all_cases()}
    of_films = {each.__name__: each for each in (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor)}
    arrays |= {case.name: reference_film(case, of_films[case.processor]) for case in film_cases()}
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Lays out and prepares a borrowed model's pictures with its checkpoint's own processor: transformers', on Pillow.

The only module of the frontend that uses transformers; it is imported where media are made, and not before.
A processor gets one picture at a time, so that its result depends on no other; and before it is used, it is checked
that the tokens that it writes for a picture are the same in any text.
"""

import functools
import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from transformers.models.auto import processing_auto

from keepsight.borrowed import OWN_ARCHITECTURES, BorrowedProcessor, count_columns
from keepsight.errors import CheckpointConfigError, UnknownArchitectureError, UnsupportedPictureError
from keepsight.json_fields import JsonFields, read_optional_json_object
from keepsight.media import Geometry, PictureLayout
from keepsight.pixels import carry_arrays
from keepsight.requests import Pixels

# Arrays that a processor makes of the text, besides those of the picture.
TEXT_ARRAYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# Texts around two pictures of these sizes, for which a processor must write the same tokens as for each alone.
TEXTS = ("a{0}b{0} c", "\n{0}\n{0}\n", " {0}{0} ", "Picture: {0}\n\n{0}.")
SIZES = (Geometry(60, 40), Geometry(410, 50))

FROM_FILES = {"local_files_only": True, "trust_remote_code": False}

Arrays = dict[str, npt.NDArray[Any]]


class BorrowedPictures:
    def __init__(self, processor: Any, marker: str) -> None:
        """`marker` stands for a picture in a text before it is expanded."""
        self._processor, self._marker = processor, marker
        # Two threads cannot use one of transformers' tokenizers at once.
        self._lock = threading.Lock()

    def lay_out(self, geometry: Geometry, field: str) -> PictureLayout:
        """Find the layout by trying a blank picture, whose memory is never written."""
        carried, token_ids, columns = self._prepare(_blank(geometry), field)
        return PictureLayout(len(token_ids), columns=columns, token_ids=token_ids, num_bytes=carried.nbytes)

    def prepare(self, rgb: Pixels, field: str) -> Pixels:
        """Return what the processor makes of a picture. Raises UnsupportedPictureError if it refuses the picture."""
        return self._prepare(rgb, field)[0]

    def check_texts(self) -> None:
        """Raises ValueError if the tokens that the processor writes for a picture depend on the text."""
        blanks = [_blank(size) for size in SIZES]
        written = [_token_ids_of(self._process(self._marker, blank)) for blank in blanks]
        for text in TEXTS:
            first, *others = text.format("\0").split("\0")
            expected = self._encode(first)
            for token_ids, other in zip(written, others, strict=True):
                expected += (*token_ids, *self._encode(other))
            if _token_ids_of(self._process(text.format(self._marker), *blanks)) != expected:
                raise ValueError(
                    f"what it writes for a picture depends on the text around it: {text.format(self._marker)!r}"
                )

    def _prepare(self, rgb: Pixels, field: str) -> tuple[Pixels, tuple[int, ...], int]:
        """Return everything made of a picture, its tokens, and how many of them form a row."""
        try:
            with self._lock:
                made = self._process(self._marker, rgb)
            token_ids = _token_ids_of(made)
            arrays = {name: _as_carried(array) for name, array in made.items() if name not in TEXT_ARRAYS}
            carried = carry_arrays(arrays | {"token_ids": np.array(token_ids, np.int32)})
            return carried, token_ids, count_columns(arrays, len(token_ids))
        except MemoryError:
            raise
        except Exception as error:  # any error of the processor, or a result that cannot be carried
            height, width, _ = rgb.shape
            message = f"this model's own processor takes no picture of {width} x {height} pixels: {_describe(error)}"
            raise UnsupportedPictureError(field, message) from error

    def _process(self, text: str, *pictures: Pixels) -> Arrays:
        made: Arrays = self._processor(
            text=[text],
            images=list(pictures),
            # Otherwise the rows of a picture 3 pixels high would be taken for its channels.
            input_data_format="channels_last",
            add_special_tokens=False,
            return_tensors="np",
        )
        return made

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])


@functools.cache
def load_pictures(config: BorrowedProcessor) -> BorrowedPictures:
    """Load a checkpoint's processor. Raises CheckpointError if it cannot be used: the checkpoint is not served then."""
    directory = Path(config.directory)
    _check_is_known(directory / "config.json")
    try:
        processor = _load_processor(directory)
        marker = config.marker or processor.tokenizer.convert_ids_to_tokens(config.image_token_id)
        pictures = BorrowedPictures(processor, marker)
        pictures.check_texts()
    except Exception as error:  # transformers may raise anything
        raise CheckpointConfigError(directory, f"its own processor cannot be used: {_describe(error)}") from error
    return pictures


def _check_is_known(path: Path) -> None:
    architectures = JsonFields.read(path).strings("architectures")
    if not any(hasattr(transformers, name) for name in architectures):
        known = f"known are {', '.join(OWN_ARCHITECTURES)}, and those of transformers {transformers.__version__}"
        raise UnknownArchitectureError(path, f"architectures: {list(architectures)}; {known}")


def _load_processor(directory: Path) -> Any:
    """Load a processor without its part for films, which would need torchvision."""
    kind = _find_class(directory)
    image_processor: Any = transformers.AutoImageProcessor
    parts = {
        "image_processor": image_processor.from_pretrained(directory, backend="pil", **FROM_FILES),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(directory, **FROM_FILES),
    }

    class OfPictures(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def _get_arguments_from_pretrained(cls, *_: Any, **__: Any) -> list[Any]:
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return OfPictures.from_pretrained(directory, **FROM_FILES)


def _find_class(directory: Path) -> Any:
    """Find the processor's class as AutoProcessor does, but never in code that came with the checkpoint."""
    files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    named = [read_optional_json_object(directory / name).get("processor_class") for name in files]
    model_type = str(read_optional_json_object(directory / "config.json").get("model_type"))
    auto: Any = processing_auto
    name = next(filter(None, named), None) or auto.PROCESSOR_MAPPING_NAMES.get(model_type)
    if name == "PixtralProcessor" and importlib.util.find_spec("torchvision") is None:
        return _import_pixtral().PixtralProcessor
    found = auto.processor_class_from_name(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"transformers {transformers.__version__} knows no processor named {name!r}")
    return found


def _import_pixtral() -> Any:
    """Import Pixtral's processor. It uses one function of the torchvision module, which the Pillow module also has."""
    folder = "transformers.models.pixtral"
    wanted, same = f"{folder}.image_processing_pixtral", f"{folder}.image_processing_pil_pixtral"
    sys.modules[wanted] = importlib.import_module(same)
    try:
        return importlib.import_module(f"{folder}.processing_pixtral")
    finally:
        del sys.modules[wanted]


def _blank(geometry: Geometry) -> Pixels:
    return np.zeros((geometry.height, geometry.width, 3), np.uint8)


def _token_ids_of(made: Arrays) -> tuple[int, ...]:
    return tuple(np.asarray(made["input_ids"])[0].tolist())


def _as_carried(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, np.float32 if array.dtype == np.float64 else None)


def _describe(error: Exception) -> str:
    """Return the error in one line, cut off if it is long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]

"""What a user may configure: checked once, frozen, unknown names refused.

Only what was said is here.  What follows from it and from the machine (device, precision, context length) is derived
where it is used and logged there with its reason.
"""

import dataclasses
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from keepsight import demo
from keepsight.errors import InvalidArgumentError, UnsupportedFieldError

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
IMAGE_BACKENDS = ("torchvision", "pil")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    # A checkpoint's folder; None: the demo checkpoint that comes with the package.
    model: str | Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    # None: what the checkpoint was trained for.
    max_model_len: int | None = None
    # Which of the reference's two image processors the pixels equal.
    image_backend: str = "torchvision"
    # Defaults of the image processor, as a request may give them too.
    mm_processor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # An empty path would mean the folder that one happens to be in.
        if self.model is not None and (not isinstance(self.model, str | Path) or self.model == ""):
            raise InvalidArgumentError("model", f"must be a path, not {self.model!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("image_backend", self.image_backend, IMAGE_BACKENDS)
        if self.max_model_len is not None and (type(self.max_model_len) is not int or self.max_model_len < 1):
            raise InvalidArgumentError("max_model_len", f"must be an integer of at least 1, not {self.max_model_len!r}")
        if not isinstance(self.mm_processor_kwargs, dict):
            raise InvalidArgumentError("mm_processor_kwargs", f"must be a dict, not {self.mm_processor_kwargs!r}")

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
                raise UnsupportedFieldError(name, f"is no option; {hint}")
        return cls(**options)

    @property
    def directory(self) -> Path:
        return demo.checkpoint_path() if self.model is None else Path(self.model)

    @property
    def model_name(self) -> str:
        return "keepsight-demo" if self.model is None else str(self.model)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(name, f"must be one of {', '.join(choices)}, not {value!r}")

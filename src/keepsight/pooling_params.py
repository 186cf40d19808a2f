"""Parameters of the vectors that `LLM.embed` returns, in vLLM's shape."""

from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    # Number of leading dimensions to return; None: all.
    dimensions: int | None = None
    # Whether the vector is normalized to length 1; None: it is.
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidArgumentError("dimensions", f"must be an integer of at least 1, not {self.dimensions!r}")
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise InvalidArgumentError("use_activation", f"must be true or false, not {self.use_activation!r}")

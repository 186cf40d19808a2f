"""An adapter as `LLM` takes it, in vLLM's shape."""

from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    lora_name: str
    # As in vLLM; here adapters are identified by name and path.
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        check_adapter_name(self.lora_name, "lora_name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidArgumentError("lora_int_id", f"must be an integer of at least 1, not {self.lora_int_id!r}")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise InvalidArgumentError("lora_path", f"must be a path, not {self.lora_path!r}")


def check_adapter_name(name: object, field: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        reason = f"must be a string of 1 to {MAX_NAME_CHARACTERS} printable characters, not {name!r:.80}"
        raise InvalidArgumentError(field, reason)

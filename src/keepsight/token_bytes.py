"""What one token adds to a text, in bytes: some are one byte, which may be less than a character."""

import tokenizers


class TokenBytes:
    """Of one vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # The value of every token such as `<0xE2>`, by its id.
        spellings = [f"<0x{byte:02{case}}>" for byte in range(256) for case in "Xx"]
        ids = {spelling: backend.token_to_id(spelling) for spelling in spellings}
        self._values = {id_: int(spelling[3:5], 16) for spelling, id_ in ids.items() if id_ is not None}

    def is_byte(self, token_id: int) -> bool:
        return token_id in self._values

    def of(self, token_id: int) -> bytes:
        value = self._values.get(token_id)
        if value is not None:
            return bytes([value])
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

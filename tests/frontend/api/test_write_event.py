"""Events of a streamed answer, as clients read them."""

import json

import msgspec

from keepsight.frontend.api.write_event import write_event


class _Said(msgspec.Struct):
    text: str


def test_an_event_is_one_line_for_every_client_whatever_it_says() -> None:
    text = "".join(map(chr, [*range(0x100), 0x2027, 0x2028, 0x2029, 0x202A, 0x1F600]))
    name, data, empty = write_event(_Said(text), "said").decode().splitlines()
    assert (name, empty) == ("event: said", "")
    assert json.loads(data.removeprefix("data: ")) == {"text": text}

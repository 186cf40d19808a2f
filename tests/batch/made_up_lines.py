"""Lines of a batch, as its user writes them."""

import json
from typing import Any

URL = "/v1/chat/completions"


def to_line(custom_id: object = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m", "messages": []}}
    return json.dumps(fields | changes).encode() + b"\n"

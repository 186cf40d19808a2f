"""The channel itself; `test_drift` tests how frontends and engine cope with its disturbances."""

from typing import cast

import pytest

from keepsight.errors import WireError
from keepsight.requests import AbortRequest, ResetCaches, ToEngine
from tests.memory_channel import MemoryChannel
from tests.scheduling.drive import make_request


def test_messages_arrive_in_order() -> None:
    channel, received = MemoryChannel(), list[ToEngine]()
    sent: list[ToEngine] = [make_request("a", 3, "cat"), ResetCaches("reset", prefix=True), AbortRequest("a")]
    assert all(channel.send_to_engine(message) for message in sent)
    assert not channel.is_empty
    channel.deliver_to_engine(received.append)
    assert received == sent
    assert channel.is_empty


def test_a_message_may_be_lost_or_overtaken() -> None:
    fates: dict[str, int | None] = {"a": 2, "b": None, "c": 0}
    channel = MemoryChannel(lambda message: fates[cast(AbortRequest, message).request_id])
    for request_id in fates:
        channel.send_to_engine(AbortRequest(request_id))
    for expected in (["c"], [], ["a"], []):
        received = list[ToEngine]()
        channel.deliver_to_engine(received.append)
        assert received == [AbortRequest(request_id) for request_id in expected]


def test_a_message_that_cannot_be_encoded_is_not_sent() -> None:
    with pytest.raises(WireError):
        MemoryChannel().send_to_engine(AbortRequest("\ud800"))

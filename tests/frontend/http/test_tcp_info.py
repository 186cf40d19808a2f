import socket

from keepsight.frontend.http.tcp_info import count_acknowledged, count_unacknowledged, has_left


def test_what_a_client_has_yet_to_read_is_known() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as ours,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours.setblocking(False)
        num_sent = ours.send(bytes(10_000_000))
        assert count_acknowledged(ours) > 0
        assert 0 < count_unacknowledged(ours) < num_sent


def test_nothing_is_known_of_a_connection_that_is_lost() -> None:
    """Its transport has no socket any more, and may not have told its protocol yet."""
    assert (count_acknowledged(None), count_unacknowledged(None), has_left(None)) == (0, 0, False)

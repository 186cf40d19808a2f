"""Addresses of Redis servers: what each part of a URL says, and which URLs are refused."""

import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.tiers.redis_address import parse_address


def test_addresses() -> None:
    address = parse_address("rediss://u:p%40@redis.example:7000/2")
    assert (address.host, address.port, address.user, address.password) == ("redis.example", 7000, "u", "p@")
    assert (address.database, address.is_tls, address.path) == (2, True, None)
    assert parse_address("redis://localhost").port == 6379
    unix = parse_address("unix:///run/redis.sock?db=1")
    assert (unix.path, unix.database) == ("/run/redis.sock", 1)


@pytest.mark.parametrize(
    "url",
    [
        *("http://x", "redis://x:port", "redis://x/db", "unix://", "", "redis://x:99999"),
        *("redis://[::1", "redis://x/-1", "unix:///x?db=-1"),
        *("redis://x?db=1", "rediss://x?ssl_cert_reqs=none", "redis://x/1#2", "unix:///x?password=secret"),
    ],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_address(url)

from keepsight.tiers.redis_address import parse_address


def test_addresses() -> None:
    address = parse_address("rediss://u:p%40@redis.example:7000/2")
    assert (address.host, address.port, address.user, address.password) == ("redis.example", 7000, "u", "p@")
    assert (address.database, address.is_tls, address.path) == (2, True, None)
    assert parse_address("redis://localhost").port == 6379
    unix = parse_address("unix:///run/redis.sock?db=1")
    assert (unix.path, unix.database) == ("/run/redis.sock", 1)

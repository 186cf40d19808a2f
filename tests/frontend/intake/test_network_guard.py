import asyncio
import errno
import logging
import socket
from ipaddress import ip_address

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import MediaFetchError, MediaRefusedError
from keepsight.frontend.intake.network_guard import (
    ATTEMPT_SECONDS,
    GuardedBackend,
    NetworkGuard,
    destination_of,
    is_public,
    resolve_host,
)
from keepsight.frontend.intake.web_url import UrlFault, parse_web_url

NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.168.1.1", "198.18.0.1",
    "224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1", "168.63.129.16",
    "::", "::1", "fe80::1", "fe80::1%1", "fc00::1", "fd00:ec2::254", "ff02::1", "::127.0.0.1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1",
    "2002:7f00:1::", "2002:a9fe:a9fe::", "2001:0:7f00:1::", "2001:db8::1", "100::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "172.32.0.1", "100.128.0.1", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]

PUBLIC_V4, PUBLIC_V6 = ([f"{start}{number}" for number in range(1, 6)] for start in ("8.8.8.", "2606:4700::"))


def guard_of(*addresses: str, networks: tuple[str, ...] = ()) -> NetworkGuard:
    async def resolve(_host: str, _port: int) -> list[str]:
        return list(addresses)

    return NetworkGuard(allowed_networks=networks, resolve=resolve)


def find(guard: NetworkGuard, host: str = "pictures.test") -> list[str]:
    return asyncio.run(guard.find_addresses(host, 80))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_of_inner_networks_are_refused_alone_and_among_public_ones(address: str) -> None:
    for addresses in ([address], ["8.8.8.8", address], [address, "8.8.8.8"]):
        with pytest.raises(UrlFault, match=r"pictures\.test was not found on the public internet") as caught:
            find(guard_of(*addresses))
        error = caught.value.under("url")
        assert isinstance(error, MediaRefusedError)
        assert address not in error.message, "tells the inner network's addresses"


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_given_as_they_were_found(address: str) -> None:
    assert find(guard_of(address)) == [address]


@pytest.mark.parametrize(("first", "second"), [(PUBLIC_V6, PUBLIC_V4), (PUBLIC_V4, PUBLIC_V6)])
def test_both_families_are_tried_however_many_addresses_one_has(first: list[str], second: list[str]) -> None:
    assert find(guard_of(*first, *second)) == [first[0], second[0], first[1], second[1]]
    assert find(guard_of(*first, second[0])) == [first[0], second[0], first[1], first[2]]


@given(st.ip_addresses())
def test_what_is_public_here_is_public_in_python_s_own_eyes(address: object) -> None:
    destination = destination_of(ip_address(str(address)))
    if is_public(destination):
        kinds = ("private", "loopback", "link_local", "multicast", "unspecified")
        assert not [kind for kind in kinds if getattr(destination, f"is_{kind}")]


@given(st.ip_addresses(v=4))
def test_an_address_in_disguise_is_judged_as_what_it_is(address: object) -> None:
    for disguised in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert str(destination_of(ip_address(disguised))) == str(address)


def test_networks_that_the_operator_lists_may_be_reached_and_no_others() -> None:
    networks = ("10.1.0.0/16", "fd00::/8")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "8.8.8.8"):
        assert find(guard_of(address, networks=networks)) == [address]
    for address in ("10.2.0.1", "127.0.0.1", "fe80::1"):
        with pytest.raises(UrlFault):
            find(guard_of(address, networks=networks))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "::1", "::ffff:127.0.0.1", "0"]
)
def test_every_spelling_of_an_inner_address_ends_where_the_resolver_says(host: str) -> None:
    with pytest.raises(UrlFault) as caught:
        find(NetworkGuard(resolve=resolve_host), host)
    assert isinstance(caught.value.under("url"), MediaRefusedError)


def test_a_host_that_nobody_knows_is_told_from_one_of_the_inner_network_only_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def resolve(_host: str, _port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    caplog.set_level(logging.INFO)
    errors = []
    for guard in (NetworkGuard(resolve=resolve), guard_of("10.0.0.1")):
        with pytest.raises(UrlFault) as caught:
            find(guard)
        errors.append(caught.value.under("url"))
    unknown, inner = errors
    assert unknown.message == inner.message
    assert (unknown.status, unknown.code) == (inner.status, inner.code)
    assert "no such name" in caplog.messages[0]
    assert "10.0.0.1" in caplog.messages[1]
    assert [each.levelno for each in caplog.records] == [logging.INFO, logging.WARNING], "anybody can ask for no host"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), MediaFetchError),
        (socket.gaierror(socket.EAI_FAIL, "Non-recoverable failure in name resolution"), MediaFetchError),
        (socket.gaierror(socket.EAI_MEMORY, "Memory allocation failure"), MediaFetchError),
        (socket.gaierror(socket.EAI_SYSTEM, "System error"), MediaFetchError),
        (OSError(errno.EMFILE, "Too many open files"), MediaFetchError),
        (socket.gaierror(socket.EAI_NODATA, "No address associated with hostname"), MediaRefusedError),
        (UnicodeError("label too long"), MediaRefusedError),
    ],
)
def test_a_lookup_that_fails_is_no_refusal(
    error: Exception, expected: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def resolve(_host: str, _port: int) -> list[str]:
        raise error

    caplog.set_level(logging.INFO)
    with pytest.raises(UrlFault) as caught:
        find(NetworkGuard(resolve=resolve), "a" * 4000)
    assert type(caught.value.under("url")) is expected
    [message] = caplog.messages
    assert str(error) in message
    assert len(message) < 250, "a client chose its host"


def test_the_log_of_a_host_that_is_not_public_is_short(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UrlFault):
        find(guard_of("10.0.0.1"), "a" * 4000)
    assert len(caplog.messages[0]) < 250


def test_only_listed_hosts_are_asked_by_whatever_spelling() -> None:
    guard = NetworkGuard(allowed_domains=["Pictures.Example", "bücher.example"])
    for url in ("http://pictures.example/", "https://PICTURES.example.:8443/", "http://BÜCHER.example/"):
        guard.check_url(parse_web_url(url))
    for url in ("http://example/", "http://a.pictures.example/", "http://pictures.example.org/", "http://8.8.8.8/"):
        with pytest.raises(UrlFault, match="not among the hosts"):
            guard.check_url(parse_web_url(url))


@pytest.mark.parametrize("failure", [httpcore.ConnectError, httpcore.ConnectTimeout])
def test_no_connection_is_tried_before_all_addresses_are_checked(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    tried: list[str] = []

    async def connect(_self: object, host: str, _port: int, seconds: float, *_: object) -> object:
        tried.append(host)
        assert seconds <= ATTEMPT_SECONDS
        raise failure("nobody there")

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    with pytest.raises(UrlFault):
        asyncio.run(GuardedBackend(guard_of("8.8.8.8", "127.0.0.1")).connect_tcp("pictures.test", 80))
    assert tried == []
    with pytest.raises(failure, match="nobody there"):
        asyncio.run(GuardedBackend(guard_of(*PUBLIC)).connect_tcp("pictures.test", 80, timeout=60))
    assert tried == ["8.8.8.8", "2606:4700::1111", "172.32.0.1", "64:ff9b::808:808"]
    with pytest.raises(httpcore.ConnectError, match="no address"):
        asyncio.run(GuardedBackend(guard_of()).connect_tcp("pictures.test", 80))

"""Checks which network addresses a client's URL may lead to: public ones, and those that the operator lists.

A name is resolved once for each connection, all its addresses are checked, and the connection is made to one of the
very addresses that were checked, so a name that resolves differently a moment later (DNS rebinding) gains nothing.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import zip_longest

import httpcore

from keepsight.config import IPV4_WITHIN_IPV6
from keepsight.errors import MediaFetchError, MediaRefusedError
from keepsight.frontend.intake.race_addresses import race_addresses
from keepsight.frontend.intake.web_url import UrlFault, WebUrl, to_ascii_host

logger = logging.getLogger(__name__)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]
# The most addresses tried per name.
MAX_ADDRESSES = 4
ATTEMPT_SECONDS = 3.0
_NOT_FOUND = (socket.EAI_NONAME, socket.EAI_NODATA)

# Spelled out, because the results of Python's `is_global` differ between versions.
_NOT_PUBLIC_V4 = [
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT, and Alibaba's metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host: a public address, a private service
        "169.254.0.0/16",  # link-local, and most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
_PUBLIC_V6 = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = [
    IPv6Network(block)
    for block in (
        "2001::/23",  # Teredo, which embeds an IPv4 address, and other special purposes
        "2001:db8::/32",
        "2002::/16",  # 6to4, which embeds one, too
        "3fff::/20",
    )
]


def is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def destination_of(address: Address) -> Address:
    """Return where a packet to this address ends up: some IPv6 addresses stand for an IPv4 one."""
    if not any(address in network for network in IPV4_WITHIN_IPV6):
        return address
    return IPv4Address(int(address) & 0xFFFFFFFF)


async def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses that the system's resolver finds; it knows every spelling of an address."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class NetworkGuard:
    def __init__(
        self,
        allowed_domains: Iterable[str] | None = None,
        allowed_networks: Iterable[str] = (),
        resolve: Resolve = resolve_host,
    ) -> None:
        """If `allowed_domains` is None, any may be reached. `allowed_networks` need not be public."""
        self._domains = None if allowed_domains is None else frozenset(map(to_ascii_host, allowed_domains))
        self._networks: list[Network] = [ip_network(network) for network in allowed_networks]
        self._resolve = resolve

    def check_url(self, url: WebUrl) -> None:
        if self._domains is not None and url.host not in self._domains:
            raise UrlFault(MediaRefusedError, f"{url.host[:80]} is not among the hosts that pictures may come from")

    async def find_addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses to connect to; raise UrlFault if it has none, or one that is not allowed."""
        # One fault for both, as clients must not learn the names of the internal network. The log tells which it was.
        fault = UrlFault(MediaRefusedError, f"the host {host[:80]} was not found on the public internet")
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and not (isinstance(error, socket.gaierror) and error.errno in _NOT_FOUND):
                logger.warning("a picture's host %r could not be looked up: %s", host[:80], error)
                raise UrlFault(MediaFetchError, "its host cannot be looked up at the moment") from error
            logger.info("a picture's host %r was not found: %s", host[:80], error)
            raise fault from error
        for address in addresses:
            if not self._is_allowed(ip_address(address)):
                logger.warning("a picture's host %r is at %s, which is not public: refused", host[:80], address)
                raise fault
        return _alternate(addresses)[:MAX_ADDRESSES]

    def _is_allowed(self, address: Address) -> bool:
        destination = destination_of(address)
        return is_public(destination) or any(destination in network for network in self._networks)


def _alternate(addresses: Sequence[str]) -> list[str]:
    """Return the addresses of IPv6 and IPv4 in turns: often one of the two does not work at all."""
    first, second = ([each for each in addresses if (":" in each) is is_v6] for is_v6 in (True, False))
    if addresses[:1] == second[:1]:
        first, second = second, first
    return [each for pair in zip_longest(first, second) for each in pair if each is not None]


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """A network backend for httpcore that connects only to checked addresses."""

    def __init__(self, guard: NetworkGuard) -> None:
        self._guard, self._backend = guard, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a checked address. The request and the certificate check still use the host name."""
        seconds = ATTEMPT_SECONDS if timeout is None else min(timeout, ATTEMPT_SECONDS)
        return await race_addresses(
            await self._guard.find_addresses(host, port),
            lambda address: self._backend.connect_tcp(address, port, seconds, local_address, socket_options),
        )

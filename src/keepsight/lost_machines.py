"""How machines are noticed that vanish without a word, as without power: a connection to one would wait for ever."""

import errno
import socket

# Socket options. A connection that waits for an answer fails after 25 seconds. While something that was sent is not
# acknowledged, the kernel sends no such probes, but repeats it for many minutes.
PROBES = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
# What the kernel says of a machine from which nothing comes.
FAULTS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}

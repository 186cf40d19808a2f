"""Plays a process of a server: reports every message it receives to the test and does what the test says.

`python fake_process.py SOCKET`. Each line to the test is `[pid, message]`; each line from it is `"ready"`,
`["fail", MESSAGE]`, `["live", SECONDS]` (one sign of life), `"fork"` (a child that ends at once), or an exit status.
"""

import json
import os
import socket
import sys

import msgspec

from keepsight.ipc.control import Alive, Failed, ProcessEnd, Ready, StartFrontend, ToProcess


def play(path: str) -> None:
    control = ProcessEnd.of_standard_input()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

        def report(message: ToProcess) -> None:
            line = json.dumps([os.getpid(), msgspec.to_builtins(message)]) + "\n"
            connection.sendall(line.encode())

        start = control.receive()
        if isinstance(start, StartFrontend):
            os.close(start.listener_fd)
        report(start)
        control.listen(report)
        for line in connection.makefile():
            match json.loads(line):
                case "ready":
                    control.send(Ready())
                case "fork":
                    if os.fork() == 0:
                        os._exit(0)
                case ["live", seconds]:
                    control.send(Alive(seconds))
                case ["fail", message]:
                    control.send(Failed(message))
                case status:
                    os._exit(status)


if __name__ == "__main__":
    play(sys.argv[1])

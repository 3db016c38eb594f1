"""The other host: gives each connection that the tests make a messenger in a process of its own, and ends with `bye`.

A connection's first line, JSON, is the arguments of `child.py` or "bye". Further lines go to the child, whose answers
come back. The child ends with the connection. All are forked from this process, since importing takes long.
"""

import json
import os
import runpy
import signal
import socket
from pathlib import Path

import pyverbs.qp
import pyverbs.srq  # noqa: F401

import messenger.rdma.transport  # noqa: F401

PORT = 7700
"""As in conftest.py."""
CHILD = Path(__file__).resolve().parents[2] / "child.py"


def main() -> None:
    address = os.environ["RDMA_VM_RAILS"].split(",")[0].split("=")[1]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    with socket.create_server((address, PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                first = b""
                while not first.endswith(b"\n"):
                    first += connection.recv(1)
                order = json.loads(first)
                if order == "bye":
                    return
                if os.fork() == 0:
                    listener.close()
                    runpy.run_path(str(CHILD), {"FORKED_WITH": (connection, *order)}, "forked")
                    os._exit(0)


if __name__ == "__main__":
    main()
